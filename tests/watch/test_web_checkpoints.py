"""Checkpoints, the trace and Ray's job of a run, on its page in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.watch.web.model import CHECKPOINTS, Model
from tests.browser import PATIENCE_S, Browser, needs_chromium
from tests.scenarios.test_watch_page import assert_only_local, watching
from tests.waiting import wait_until
from tests.watch.test_web_tabs import write_run

ROWS = "[...document.querySelectorAll('#checkpoints tbody tr')].map((row) => [0, 3, 4].map((at) => row.cells[at].innerText))"


JOB = "document.querySelector('#state a')"


def test_the_newest_checkpoints_are_kept_once() -> None:
    model = Model()
    for step in [*range(2 * CHECKPOINTS), 150]:
        model.add(kinds.Saved(rank=0, step=step, path=f"/run/step-{step}", s=0.5))
    shown = model.sections()["checkpoints"]["checkpoints"]
    assert [row["step"] for row in shown][:3] == [150, 199, 198]
    assert len(shown) == CHECKPOINTS


@needs_chromium
@pytest.mark.slow
def test_checkpoints_and_the_job_are_listed_and_the_trace_is_saved(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/job/one", "one")
    steps = {step: run / f"checkpoints/step-{step}" for step in (10, 20)}
    for step, path in steps.items():
        path.mkdir(parents=True)
        (path / "state.pt").write_bytes(bytes(100 * step))
    with (
        watching(tmp_path, "runs/job/one") as link,
        Browser() as browser,
        Events(run / "events.jsonl") as events,
    ):
        browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        browser.open(link)
        browser.wait_until("document.querySelector('#checkpoints caption')")  # none yet
        for step, path in [*steps.items(), (5, run / "checkpoints/step-5")]:
            events.add(kinds.Saved(rank=0, step=step, path=str(path), s=0.25))
        expected = [
            ["5", "", str(run / "checkpoints/step-5")],
            ["20", "2.0 kB", str(steps[20])],
            ["10", "1.0 kB", str(steps[10])],
        ]
        browser.wait_until(f"JSON.stringify({ROWS}) == JSON.stringify({json.dumps(expected)})")
        assert "removed since" in browser.text("#unsized")
        assert not browser.value(JOB)
        events.add(kinds.Cluster(address="n:6379", job="raysubmit_1", dashboard="n:8265"))
        browser.wait_until(JOB)
        assert browser.value(f"[{JOB}.href, {JOB}.innerText]") == [
            "http://n:8265/#/jobs/raysubmit_1",
            "raysubmit_1",
        ]
        browser.value("document.querySelector('#trace').click()")
        trace = tmp_path / "one-trace.json"
        wait_until(lambda: trace.exists() and trace.read_text().endswith("}"), "it", PATIENCE_S)
        assert "checkpoints" in trace.read_text()
        assert_only_local(browser)
        argv = [sys.executable, "-m", "raydist.tools.watch", "runs/job/one", "--export", "one.html"]
        subprocess.run(argv, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        browser.open(f"file://{tmp_path}/one.html")
        browser.wait_until(f"JSON.stringify({ROWS}) == JSON.stringify({json.dumps(expected)})")
        # saved from the copy: tests/watch/test_web_export.py
        assert browser.value("document.querySelector('#trace').checkVisibility()")
