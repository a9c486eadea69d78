"""raydist.submit: runs in the background, several at a time, on real Ray and without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist import events
from tests.conftest import ROOT
from tests.records import read_events

pytestmark = pytest.mark.ray
QUIET = "watch.progress=none"


def report_until(file: str, most: int = 100_000) -> int:
    """Report steps until a file exists."""
    for step in range(most):
        raydist.report(step=step, loss=1.0)
        if Path(file).exists():
            return step
        time.sleep(0.01)
    raise AssertionError(file)


def raise_at_first_report(run: raydist.Run[int]) -> None:
    for event in run.events():
        if isinstance(event, events.Report):
            raise KeyError


@pytest.mark.parametrize(
    ("ranks", "group"), [(1, "group=inline"), (3, "group=inline"), (3, "group=ray")]
)
def test_a_run_goes_on_while_its_program_does_and_shows_its_events(
    on_ray: Path, ranks: int, group: str, capfd: pytest.CaptureFixture[str]
) -> None:
    go = on_ray / "go"
    run = raydist.submit(report_until, f"scale=1x{ranks}", group, args=(str(go),))
    kinds = []
    for event in run.events():
        kinds.append(event.kind)
        if isinstance(event, events.Report) and not go.exists():
            assert not run.done()
            with pytest.raises(TimeoutError, match=r"has not ended after 0\.01 s"):
                run.result(timeout=0.01)
            go.touch()
    done = run.result(timeout=250)
    assert run.done()
    assert done.status == "finished"
    assert len(done.values) == ranks
    assert kinds == [event["kind"] for event in read_events(done.dir / "events.jsonl")]
    assert (kinds[0], kinds[-1]) == ("run", "result")
    assert capfd.readouterr() == ("", "")


def test_a_run_is_stopped_in_order_and_raises_stopped(on_ray: Path) -> None:
    run = raydist.submit(report_until, "scale=1x2", "group=inline", args=(str(on_ray / "never"),))
    for event in run.events():
        if isinstance(event, events.Report):
            run.stop()
    with pytest.raises(raydist.Stopped, match="SIGTERM"):
        run.result()
    run.stop()  # it is over: nothing happens


def test_a_failure_and_a_wrong_setting_are_those_of_run(on_ray: Path) -> None:
    def fail() -> None:
        raise ValueError("not today")

    with pytest.raises(raydist.RunFailed, match="not today"):
        raydist.submit(fail, "scale=1x2", QUIET).result()
    before = {*threading.enumerate()}
    with pytest.raises(raydist.ConfigError, match="scale=nonsense"):
        raydist.submit(fail, "scale=nonsense")
    assert {*threading.enumerate()} <= before


def test_a_block_waits_for_its_run_and_stops_it_if_it_raises(on_ray: Path) -> None:
    go = on_ray / "go"
    with raydist.submit(report_until, "scale=1x2", args=(str(go),)) as run:
        go.touch()
    assert run.done()
    run = raydist.submit(report_until, "scale=1x2", args=(str(on_ray / "never"),))
    with pytest.raises(KeyError), run:
        raise_at_first_report(run)
    assert run.done()
    with pytest.raises(raydist.Stopped):
        run.result()


def test_ctrl_c_in_the_wait_at_the_end_of_a_block_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main = threading.main_thread().ident
    assert main is not None

    def press_ctrl_c(event: events.Event) -> None:
        if isinstance(event, events.Report) and event.step == 0:
            signal.pthread_kill(main, signal.SIGINT)

    never = str(tmp_path / "never")
    run = raydist.submit(
        report_until, "scale=1x1", "group=inline", args=(never, 500), on_event=press_ctrl_c
    )
    with pytest.raises(KeyboardInterrupt), run:
        pass
    assert run.done()
    with pytest.raises(raydist.Stopped, match="SIGTERM"):
        run.result()


PROGRAM = """
import functools, pathlib, sys, time
import raydist
from raydist import events

def wait_for(file, mine):
    pathlib.Path(mine).touch()
    while not pathlib.Path(file).exists():
        time.sleep(0.01)
    return mine

if __name__ == "__main__":
    one = raydist.submit(functools.partial(wait_for, "b", "a"), "scale=1x1", sys.argv[1])
    two = raydist.submit(wait_for, "scale=1x1", sys.argv[1], file="a", mine="b")
    print(one.result().values, two.result().values, one.dir.parent.name)
    import ray
    print(ray.is_initialized())
"""


@pytest.mark.parametrize(("group", "joins"), [("group=ray", True), ("group=inline", False)])
def test_two_runs_of_a_program_share_its_connection(
    ray_address: str, tmp_path: Path, group: str, joins: bool
) -> None:
    """Each waits for the other, so both run at a time; the first to end does not leave Ray. A
    partial has the name of its function."""
    (tmp_path / "both.py").write_text(PROGRAM)
    env: dict[str, Any] = {**os.environ, "RAYDIST_RUNS": str(tmp_path / "runs")}
    env |= {"RAY_ADDRESS": ray_address} if joins else {}
    words = [sys.executable, "both.py", group]
    done = subprocess.run(
        words, cwd=tmp_path, env=env, check=False, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "('a',) ('b',) wait_for\nFalse\n"


def test_the_example_of_the_page_runs_and_prints_its_reports(on_ray: Path) -> None:
    section = (ROOT / "docs/jobs.md").read_text().partition("## From Python\n")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    Path("example.py").write_text("\n".join(blocks[:2]))
    command = [sys.executable, "example.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1 {'total': 8.0}" in ended.stdout.splitlines()
