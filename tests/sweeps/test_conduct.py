"""The trials of a sweep, from the first to the last; their runs only report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.cluster import connect
from raydist.launch.gangs import OneOfMany
from raydist.settings.config import Job
from raydist.sweeps import conduct, room
from tests.records import event

Values = Callable[[Job], dict[str, float]]
WORDS = ("scale=1x1", "backend=gloo", "watch.progress=none", "sweep.parallel=1")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Values], None]:
    """Replace the run of each trial by a report of these values, on no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connect, "connect", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(room, "check_can_ever_fit", lambda _: None)
    monkeypatch.setattr(room, "find_room", lambda job, *_, **__: job)

    def replace_runs(values: Values) -> None:
        def report(job: Job, _: Any, many: OneOfMany) -> None:
            many.reader(event("report", rank=0, step=1, values=values(job)))

        monkeypatch.setattr(conduct, "run_job", report)

    return replace_runs


def test_a_trial_without_the_objective_does_not_end_a_sweep_that_has_it(
    runs: Callable[[Values], None], capsys: pytest.CaptureFixture[str]
) -> None:
    runs(lambda job: {"loss" if job.optim.lr < 0.2 else "hits": job.optim.lr})
    done = raydist.sweep("digits", *WORDS, "optim.lr=0.1,0.3,0.05", "sweep.objective=min:loss")
    assert [trial.state for trial in done.trials] == ["finished"] * 3
    assert [trial.number for trial in done.best] == [2]
    said = capsys.readouterr()
    assert "trial 1 has finished, but has not reported loss" in said.out + said.err
    with pytest.raises(raydist.ConfigError, match="the job reports no number loss"):
        raydist.sweep("digits", *WORDS, "optim.lr=0.3,0.1", "sweep.objective=min:loss")
