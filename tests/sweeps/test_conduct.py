"""The trials of a sweep, from the first to the last; their runs only report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.cluster import connect
from raydist.launch import run_storage
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


def test_a_new_sweep_does_not_continue_one_of_its_name_in_the_store(
    runs: Callable[[Values], None], tmp_path: Path
) -> None:
    space = ("digits", *WORDS, "optim.lr=0.1,0.3", f"storage={tmp_path}/store")
    runs(lambda job: {"loss": job.optim.lr})
    first = raydist.sweep(*space, "hydra.sweep.dir=a/one")
    with pytest.raises(raydist.ConfigError) as refused:
        raydist.sweep(*space, "hydra.sweep.dir=b/one")
    assert f"another sweep is in {tmp_path}/store/one already" in str(refused.value)
    assert f"hydra.sweep.dir={tmp_path}/b/one-2" in str(refused.value)
    assert raydist.sweep(*space, "hydra.sweep.dir=b/one-2").exit_code == 0
    assert raydist.sweep("digits", f"sweep.resume={first.dir}").trials == first.trials


def test_a_sweep_that_has_just_begun_has_its_place_in_the_store(
    runs: Callable[[Values], None], tmp_path: Path
) -> None:
    """Its records are copied every ten seconds: until then another of its name joined it."""
    space = ("digits", *WORDS, "optim.lr=0.1,0.3", f"storage={tmp_path}/store")
    refused: list[raydist.ConfigError] = []

    def values(job: Job) -> dict[str, float]:
        try:
            if not refused and "/a/" in job.dir:
                raydist.sweep(*space, "hydra.sweep.dir=b/one")
        except raydist.ConfigError as error:
            refused.append(error)
        return {"loss": job.optim.lr}

    runs(values)
    raydist.sweep(*space, "hydra.sweep.dir=a/one")
    assert [error.key for error in refused] == ["storage"]
    stored = json.loads((tmp_path / "store" / "one" / "sweep.json").read_text())
    assert [len(stored["trials"]), stored["state"]] == [2, "finished"]


def test_a_store_that_cannot_be_read_is_refused_before_a_trial_starts(
    runs: Callable[[Values], None],
) -> None:
    with pytest.raises(raydist.ConfigError, match="nosuch"):
        raydist.sweep("digits", *WORDS, "optim.lr=0.1,0.3", "storage=nosuch://bucket/runs")


def test_only_a_trial_that_ran_before_continues_from_a_state(
    runs: Callable[[Values], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = []

    def values(job: Job) -> dict[str, float]:
        resumed.append(job.resume)
        if len(resumed) == 1:
            raise raydist.RunFailed("not yet")
        return {"loss": 1.0}

    runs(values)
    monkeypatch.setattr(run_storage, "own_newest", lambda _: "a/state")
    words = ("optim.lr=0.1,0.3", "sweep.on_failure=retry")
    assert [each.state for each in raydist.sweep("digits", *WORDS, *words).trials] == [
        "finished"
    ] * 2
    assert sorted(resumed) == ["a/state", "none", "none"]


def test_a_sweep_is_not_continued_with_other_milestones(runs: Callable[[Values], None]) -> None:
    """Values of different steps were compared: the new trials ended all that waited."""
    runs(lambda job: {"loss": job.optim.lr})
    words = ("optim.lr=0.1,0.3", "sweep.objective=min:loss", "sweep.prune=median")
    done = raydist.sweep("digits", *WORDS, *words, "sweep.min_steps=1")
    again = f"sweep.resume={done.dir}"
    for now, before in (("min_steps=2", "min_steps=1"), ("prune=asha", "prune=median")):
        with pytest.raises(raydist.ConfigError, match=f"have the milestones of sweep.{before};"):
            raydist.sweep("digits", again, f"sweep.{now}")
    assert raydist.sweep("digits", again, "sweep.reduction=4").best == done.best
    assert raydist.sweep("digits", again, "sweep.prune=none").best == done.best
    with pytest.raises(raydist.ConfigError, match=r"have the milestones of sweep.min_steps=1;"):
        raydist.sweep("digits", again, "sweep.prune=median", "sweep.min_steps=2")


def test_a_sweep_is_continued_with_other_objectives_only_if_nothing_has_used_them(
    runs: Callable[[Values], None],
) -> None:
    runs(lambda job: {"loss": job.optim.lr, "hits": job.optim.lr})

    def sweep(*words: str) -> raydist.SweepResult:
        done = raydist.sweep(
            "digits", *WORDS, "optim.lr=0.1,0.3", "sweep.objective=min:loss", *words
        )
        assert [trial.number for trial in done.best] == [0]
        return done

    def resume(done: raydist.SweepResult) -> raydist.SweepResult:
        return raydist.sweep("digits", f"sweep.resume={done.dir}", "sweep.objective=max:hits")

    assert [trial.number for trial in resume(sweep()).best] == [1]
    for words in (
        ["sweep.prune=median", "sweep.min_steps=1"],
        ["sweep.sampler=tpe", "sweep.trials=2"],
    ):
        done = sweep(*words)
        with pytest.raises(raydist.ConfigError, match=f"{words[0]} has used min:loss"):
            resume(done)
        assert raydist.sweep("digits", f"sweep.resume={done.dir}").best == done.best
