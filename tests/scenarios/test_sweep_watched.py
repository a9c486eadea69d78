"""One real sweep, and what shows it: its page while it runs, in a browser, as a file; each
tracker's group."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raydist.watch.trackers import Ledger
from tests import trackers
from tests.browser import Browser, needs_chromium
from tests.programs import Program
from tests.scenarios.test_track import ledger
from tests.scenarios.test_watch_page import DRAWN, assert_only_local, status_of, watching
from tests.scenarios.test_watch_rig import first_event
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
PATIENCE_S = 300.0
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
JOB = """
import os, time
import raydist

def job(config, factor: float = 0.0):
    for step in range(1, 41):
        raydist.report(step=step, loss=factor / step, steps=40)
        while step == 20 and not os.path.exists(f"go-{factor:g}"):
            time.sleep(0.05)
    if factor == 3:
        raise ValueError("too <b>great</b>")
"""


class Swept(NamedTuple):
    """The sweep of this module: trial 0 is the best, trial 2 has failed."""

    folder: Path
    running: dict[str, Any]
    """A sweep and what its page received while two trials had done 20 of 40 steps."""
    last: dict[str, Any]
    """The last that it was told."""
    env: dict[str, str]
    """Where its trackers keep what they were told."""


@pytest.fixture(scope="module")
def swept(ray_address: str) -> Iterator[Swept]:
    tmp = tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True)
    with tmp as name, pytest.MonkeyPatch.context() as on:
        there, folder = Path(name), Path(name, "runs/job/one_sweep")
        env = {"TRACKIO_DIR": f"{name}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{name}/mlflow.db",
               "WANDB_MODE": "offline", "HOME": name}  # fmt: skip
        for variable, value in env.items():
            on.setenv(variable, value)
        (there / "job.py").write_text(JOB.replace("go-", f"{name}/go-"))
        words = ["job=job.py", "job.args.factor=1,2,3", "scale=1x1", "backend=gloo", "restart=none", "sweep.parallel=2",
                 "sweep.objective=min:loss", f"hydra.sweep.dir={folder}", "watch.page=true"]  # fmt: skip
        track = [] if trackers.MISSING else [f"track=[{','.join(TRACKERS)}]"]
        program = Program(there, *words, *track, address=ray_address, module="raydist.tools.sweep")
        program.wait_until(lambda: "page  http" in program.screen, "link", PATIENCE_S)
        (link,) = re.findall(r"page  (http\S+)", program.screen)
        _, running = first_event(f"{link}trials", both_wait)
        # On a busy machine a tracker starts slower than the 30 s that it has after the end of a run.
        for trial in range(3):
            if track:
                wait_until(lambda n=trial: begun(folder / str(n)), "its trackers", PATIENCE_S)  # type: ignore[misc]
            (there / f"go-{trial + 1}").touch()
        _, last = first_event(
            f"{link}trials", lambda name, news: name == "sweep" and news["state"] == "finished"
        )
        assert program.wait(PATIENCE_S) == 0, program.screen
        yield Swept(folder, running, last, env)


def begun(trial: Path) -> bool:
    """Return whether each tracker of a trial has begun to write."""
    ledgers = [Ledger.read(trial, name) for name in TRACKERS]
    return all(each.newest.step >= 0 for each in ledgers)


def both_wait(name: str, news: Any) -> bool:
    """Return whether the page shows two trials at the step at which they wait."""
    return name == "sweep" and [one["step"] for one in news["trials"]] == [20, 20]


def test_the_page_beside_a_sweep(swept: Swept) -> None:
    assert [one["state"] for one in swept.running["trials"]] == ["running", "running"]
    assert [one["values"]["loss"] for one in swept.running["trials"]] == [1 / 20, 2 / 20]
    shown = [(one["trial"], one["state"], one["step"], one["best"]) for one in swept.last["trials"]]
    assert shown == [
        (0, "finished", 40, True),
        (1, "finished", 40, False),
        (2, "failed", 40, False),
    ]
    assert swept.last["trials"][1]["settings"] == {"job.args.factor": "2"}
    (again,) = re.findall(r"again +(.*)", (swept.folder.parents[2] / "screen.txt").read_text())
    assert "1,2,3" not in again
    assert again.endswith(" job.args.factor=1")


@needs_chromium
def test_the_page_of_a_sweep_in_a_browser(swept: Swept) -> None:
    runs = swept.folder.parents[1]
    with watching(runs.parent, str(runs)) as link, Browser(400, 900, dark=True) as browser:
        browser.open(link)
        browser.wait_until(
            "document.querySelectorAll('#runs tbody tr').length == 1"
        )  # one line for all trials
        assert "2 finished, 1 failed, loss 0.025" in browser.text("#runs tbody")
        browser.value("document.querySelector('#runs a').click()")
        browser.wait_until(f"{DRAWN} && location.search.includes('one_sweep')")
        look_at(browser)
        assert browser.value("document.documentElement.scrollWidth") <= 400
        browser.value("document.querySelector('#trials tbody tr').focus()")
        browser.press("ArrowDown")
        assert "trial 1:" in browser.text("#chosen")
        assert browser.value("document.querySelectorAll('#parallel polyline.lit').length") == 1
        browser.press("Enter")
        browser.wait_until("raydist.curves?.loss?.steps.at(-1) == 40")
        browser.wait_until("document.querySelector('nav a:last-child')?.innerText == 'the sweep'")
        browser.value("document.querySelector('nav a:last-child').click()")
        browser.wait_until(f"{DRAWN} && raydist.sweep?.trials.length == 3")
        assert_only_local(browser)
        assert status_of(f"{link}trials?sweep=../..")[0] == status_of(f"{link}trials")[0] == 404
    with (
        watching(runs.parent, "newest") as link,
        Browser() as browser,
    ):  # the newest run is one of its trials
        browser.open(link)
        browser.wait_until(DRAWN)
        look_at(browser)
        assert_only_local(browser)
    argv = [
        sys.executable,
        "-m",
        "raydist.tools.watch",
        str(swept.folder),
        "--export",
        "report.html",
    ]
    subprocess.run(argv, cwd=runs.parent, check=True, stdout=subprocess.DEVNULL)
    with Browser() as browser:
        browser.open(f"file://{runs.parent}/report.html")
        browser.wait_until(DRAWN)
        look_at(browser)
        assert_only_local(browser)
        assert [url for url in browser.requests.values() if url.startswith("http")] == []


def look_at(browser: Browser) -> None:
    """Hold the three views of the trials against what they did."""
    # The curves that have come so far may lack trials, or steps.
    numbers = "Array.from(column).filter(Number.isFinite).length"
    browser.wait_until(
        f"raydist.plot?.data.length == 4 && raydist.plot.data.every((column) => {numbers} == 40)"
    )
    rows = browser.value(
        "[...document.querySelectorAll('#trials tbody tr')].map((row) => row.innerText)"
    )
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]  # the best first
    assert "★" in rows[0]
    assert "too <b>great</b>" in rows[2]
    lines = "[...document.querySelectorAll('#parallel polyline')]"
    assert browser.value(f"{lines}.map((line) => line.points.length)") == [
        2,
        2,
        2,
    ]  # one setting, one objective
    heights = browser.value(f"{lines}.map((line) => line.points[1].y)")
    assert heights == sorted(
        heights
    )  # drawn from the worst to the best, which has the least loss: the lowest point
    data = browser.value("raydist.plot.data.map((column) => Array.from(column))")
    steps = range(1, 41)
    assert data == [
        [*steps],
        *(pytest.approx([factor / step for step in steps], rel=1e-5) for factor in (3, 2, 1)),
    ]
    # the lower half of the objective's axis: the worst is out
    browser.value("document.querySelector('#parallel').scrollIntoView()")
    left, top, width, height = browser.value(
        "(({ left, top, width, height }) => [left, top, width, "
        "height])(parallel.getBoundingClientRect())"
    )
    for kind, y in (
        ("mousePressed", height - 5),
        ("mouseMoved", height / 2),
        ("mouseReleased", height / 2),
    ):
        browser.call(
            "Input.dispatchMouseEvent",
            type=kind,
            x=left + width - 44,
            y=top + y,
            button="left",
            buttons=1,
        )
    assert browser.text("#chosen") == "2 of 3 trials"
    assert (
        browser.value(
            "[...document.querySelectorAll('#trials tbody tr')].filter((row) => !row.hidden).length"
        )
        == 2
    )
    browser.press("Escape")
    assert browser.value("document.querySelectorAll('#parallel polyline.out').length") == 0
    browser.value("document.querySelector('#chart').focus()")
    browser.press("+")
    browser.wait_until("raydist.plot.scales.x.max - raydist.plot.scales.x.min < 20")
    browser.press("0")
    browser.wait_until("raydist.plot.scales.x.max - raydist.plot.scales.x.min == 39")


@trackers.requires_trackers
def test_trackers_show_trials_as_a_group(swept: Swept) -> None:
    folders = [swept.folder / str(number) for number in range(3)]
    ids = [
        {name: ledger(folder, name)["id"] for name in ("mlflow", "tensorboard", "trackio")}
        for folder in folders
    ]
    assert [each["trackio"] for each in ids] == [f"one_sweep-{number}" for number in range(3)]
    assert [each["tensorboard"] for each in ids] == [
        f"{swept.folder}/tensorboard/{number}" for number in range(3)
    ]
    wanted = (
        ["mlflow", ids[1]["mlflow"]], ["mlflow", ids[2]["mlflow"]], ["wandb", str(folders[1])],
        ["trackio", "job", "one_sweep-1"], ["hparams", ids[1]["tensorboard"]],
    )  # fmt: skip
    with ThreadPoolExecutor() as pool:
        second, third, wandb, trackio, hparams = pool.map(
            lambda words: trackers.read(*words, env=swept.env), wanted
        )
    tags = [[each["tags"][name] for name in ("raydist.sweep", "mlflow.runName", "raydist.trial")]
            for each in (second, third)]  # fmt: skip
    assert tags == [["one_sweep", f"one_sweep-{n}", f"job.args.factor={n + 1}"] for n in (1, 2)]
    assert (second["status"], third["status"], second["runs"]) == ("FINISHED", "FAILED", 3)
    assert "too <b>great</b>" in third["culprit"]
    assert (wandb["group"], wandb["notes"]) == ("one_sweep", "job.args.factor=2")
    assert (trackio["group"], trackio["runs"]) == ("one_sweep", 3)
    assert hparams == {"differs": {"job.args.factor": 2.0}, "metrics": ["loss"], "ended": True}
