"""Which trial continues, is paused or ended, or is next: decisions over trials, and over 64
recorded curves."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.settings.config import Job, Sweep, Watch
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, Stopped
from raydist.sweeps import conduct, room, rules
from raydist.sweeps.conduct import Conductor, Over, Reached, Setup
from raydist.sweeps.folder import Folder, read_trials
from raydist.sweeps.requests import write_request
from raydist.sweeps.rules import Prune, next_trial, verdict
from raydist.sweeps.table import SweepScreen
from raydist.sweeps.trial import Objective, State, Trial, best_trials, parse_objectives
from tests.records import event

CURVES: list[list[float]] = json.loads(Path(__file__).with_name("curves.json").read_text())
"""64 trainings of a linear model on digits, with random learning rates: the test loss after each of
27 steps."""
LOSS = Objective("loss", 1)
ASHA = Prune("asha", LOSS, first=1, reduction=3)
MEDIAN = Prune("median", LOSS, first=1)


def trial(number: int, *values: float, state: State = "paused", passed: int = 0) -> Trial:
    curve = tuple((step, value) for step, value in enumerate(values))
    return Trial(
        number,
        {},
        state=state,
        curve=curve,
        passed=passed,
        values={"loss": values[-1]} if values else {},
    )


def reference_asha(workers: int) -> dict[int, int]:
    """Algorithm 2 of arXiv:1810.05934 with r=1, eta=3, R=27: the highest rung that each trial was
    run to."""
    rungs: list[dict[int, float]] = [{}, {}, {}, {}]
    promoted: list[set[int]] = [set(), set(), set(), set()]
    started = 0

    def get_job() -> tuple[int, int] | None:
        nonlocal started
        for k in (2, 1, 0):
            ranked = sorted(rungs[k], key=lambda t: (rungs[k][t], t))
            candidates = [t for t in ranked[: len(ranked) // 3] if t not in promoted[k]]
            if candidates:
                promoted[k].add(candidates[0])
                return candidates[0], k + 1
        if started == len(CURVES):
            return None
        started += 1
        return started - 1, 0

    now: list[tuple[int, int, int]] = []  # (time at which it is done, trial, rung)
    time = 0
    while True:
        while len(now) < workers and (job := get_job()) is not None:
            number, rung = job
            now.append((time + 3**rung - (3 ** (rung - 1) if rung else 0), number, rung))
        if not now:
            return {
                number: max(k for k in range(4) if number in rungs[k]) for number in range(started)
            }
        now.sort()
        time, number, rung = now.pop(0)
        rungs[rung][number] = CURVES[number][3**rung - 1]


class Unrun(Conductor):
    """The Conductor, whose trials do nothing: the test says when one has come to a milestone or has
    ended."""

    def _run(self, trial: Trial, job: Job, again: bool) -> None:
        self._live[trial.number].watched_trial.add(event("plan"))


class AnySpace:
    def job(self, settings: Mapping[str, str]) -> Job:
        return Job()


class InOrder:
    def propose(self, number: int) -> dict[str, str]:
        return {"seed": str(number)}

    def tell(self, trial: Trial) -> None: ...


def conductor_of(sweep: Sweep, path: Path, trials: int) -> Unrun:
    """Return a Conductor for so many trials."""
    screen = SweepScreen(Watch(progress="none"), (LOSS,))
    space: Any = AnySpace()
    setup = Setup(
        space, InOrder(), sweep, trials, (LOSS,), Folder(path), screen, lambda trials: None
    )
    return Unrun(setup, {})


def ours(workers: int, path: Path) -> dict[int, int]:
    """Return the verdicts of the Conductor, where a trial that may continue keeps its place."""
    sweep = Sweep(objective="min:loss", prune="asha", min_steps=1, reduction=3, parallel=workers)
    conductor = conductor_of(sweep, path, len(CURVES))
    now: list[tuple[int, int, int]] = []
    time = 0

    def run(number: int) -> None:
        rung = len(conductor.trials[number].curve)
        now.append((time + 3**rung - (3 ** (rung - 1) if rung else 0), number, rung))

    while True:
        before = {*conductor._live}
        while conductor._start_next():
            for live in conductor._live.values():
                live.thread.join()
        for number in conductor._live.keys() - before:
            run(number)
        if not now:
            return {trial.number: len(trial.curve) - 1 for trial in conductor.states}
        now.sort()
        time, number, rung = now.pop(0)
        live = conductor._live[number]
        loss = CURVES[number][3**rung - 1]
        live.watched_trial.add(kinds.Report(rank=0, step=3**rung, values={"loss": loss}))
        conductor._reached(Reached(number, 3**rung, loss))
        if rung == 3:
            conductor._over(Over(number, None))
        elif live.intent:
            conductor._over(Over(number, Stopped(signal.SIGTERM)))
        else:
            run(number)


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_asha_ends_the_trials_that_the_reference_ends(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        room, "find_room", lambda job, gangs, alone: job
    )  # no Ray: there is always room
    reached = ours(workers, tmp_path)
    assert reached == reference_asha(workers)
    assert sorted({*reached.values()}) == [0, 1, 2, 3]


def test_a_trial_that_is_stopped_alone_stops_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "find_room", lambda job, gangs, alone: job)
    sweep = Sweep(objective="min:loss", prune="asha", min_steps=1, reduction=3, parallel=2)
    conductor = conductor_of(sweep, tmp_path, 3)
    while conductor._start_next():
        for live in conductor._live.values():
            live.thread.join()
    conductor._over(Over(0, Stopped(signal.SIGTERM)))  # `raydist stop` of this trial
    assert conductor._live[1].halt.stopped is None
    assert conductor._start_next()
    for number in (1, 2):
        conductor._reached(Reached(number, 1, 1.0))
        conductor._over(Over(number, Stopped(signal.SIGTERM)))
    states = {trial.number: trial.state for trial in conductor.states}
    assert states == {0: "stopped", 1: "paused", 2: "paused"}
    # The stopped one finishes only in another part of the sweep: the best one goes on here.
    assert conductor._next() == 1


def test_a_trial_whose_folder_was_deleted_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        room, "find_room", lambda job, gangs, alone: job
    )  # no Ray: there is always room
    folder = Folder(tmp_path)
    done = [
        replace(trial(number, float(number), state="finished"), dir=str(number))
        for number in range(5)
    ]
    for each in done:
        folder.note(each)
    folder.summarize({}, done, [])
    shutil.rmtree(tmp_path / "3")

    def started(sweep: Sweep) -> list[int]:
        space: Any = AnySpace()
        screen = SweepScreen(Watch(progress="none"), ())
        trials = read_trials(tmp_path)
        before = {**trials}
        setup = Setup(space, InOrder(), sweep, 7, (), folder, screen, lambda trials: None)
        conductor = Unrun(setup, trials)
        while conductor._start_next():
            for live in conductor._live.values():
                live.thread.join()
        assert all(conductor.trials[number] == each for number, each in before.items())
        return [*conductor._live]

    assert started(Sweep()) == [5, 6]
    (tmp_path / "sweep.json").unlink()
    for number in (5, 6):
        shutil.rmtree(tmp_path / str(number))
    assert started(Sweep(parallel=2)) == [3, 5]  # of trial 3 nothing is left


def test_a_cluster_without_room_is_not_asked_at_every_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time is a task on the head, where the driver is elsewhere."""
    now, looks = 1000.0, list[float]()
    monkeypatch.setattr(conduct, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(room, "find_room", lambda job, gangs, alone: looks.append(now))
    space: Any = AnySpace()
    screen, folder = SweepScreen(Watch(progress="none"), ()), Folder(tmp_path)
    setup = Setup(space, InOrder(), Sweep(), 3, (), folder, screen, lambda trials: None)
    conductor = Unrun(setup, {})
    while now < 1060:
        assert not conductor._start_next()
        now += conduct.POLL_S
    assert 60 / conduct.ROOM_S - 1 <= len(looks) <= 60 / conduct.ROOM_S + 5
    assert looks[1] - looks[0] < conduct.ROOM_S / 2  # at first there may soon be room


def test_added_trials_come_first_and_once_though_the_driver_dies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "find_room", lambda job, gangs, alone: job)
    monkeypatch.setattr(room, "check_can_ever_fit", lambda job: None)

    def started() -> list[int]:
        """Return what a driver starts that is killed then."""
        space: Any = AnySpace()
        screen, folder = SweepScreen(Watch(progress="none"), ()), Folder(tmp_path)
        setup = Setup(
            space, InOrder(), Sweep(parallel=2), 3, (), folder, screen, lambda trials: None
        )
        conductor = Unrun(setup, read_trials(tmp_path))
        conductor._take_added()
        while conductor._start_next():
            for live in conductor._live.values():
                live.thread.join()
        folder.close()
        return [*conductor._live]

    assert started() == [0, 1]
    name = write_request(tmp_path, [{"lr": "5"}, {"lr": "6"}])
    for _ in range(2):  # the first driver was killed between the two
        assert started() == [3, 4]
        assert read_trials(tmp_path)[4].added == name
        shutil.rmtree(tmp_path / "4")
        folder = Folder(tmp_path)
        folder.note(replace(read_trials(tmp_path)[3], state="waiting"))
        folder.close()
    assert started() == [3, 4]
    assert started() == [2]
    trials = read_trials(tmp_path)
    assert [trial.added for trial in trials.values()] == ["", "", "", name, name]
    assert trials[4].settings == {"lr": "6"}


def verdicts() -> Iterator[tuple[str, list[Trial], Prune, bool, str]]:
    a, b = trial(0, 1.0), trial(1, 2.0)
    here = trial(9, 0.5, state="running")
    yield "first of many", [here], ASHA, True, "pause"
    yield "the only one at all", [here], ASHA, False, "continue"
    yield "best of three", [a, b, here], ASHA, True, "continue"
    yield "second of three", [trial(0, 0.1), b, here], ASHA, True, "pause"
    yield "may pass already", [trial(0, 0.1), b, replace(here, passed=1)], ASHA, True, "continue"
    yield "no number is the worst", [a, b, trial(9, math.nan, state="running")], ASHA, True, "pause"
    yield (
        "large is good",
        [a, b, trial(9, 9.0, state="running")],
        replace(ASHA, objective=Objective("x", -1)),
        True,
        "continue",
    )
    yield "others still run", [trial(0, 0.1, state="running"), here], ASHA, False, "pause"
    yield "one has finished", [trial(0, 0.1, state="finished"), here], ASHA, False, "pause"
    yield "too few for a median", [a, b, trial(9, 7.0, state="running")], MEDIAN, True, "continue"
    three = [a, b, trial(2, 3.0)]
    yield "worse than the median", [*three, trial(9, 7.0, state="running")], MEDIAN, True, "end"
    yield (
        "as good as the median",
        [*three, trial(9, 2.0, state="running")],
        MEDIAN,
        True,
        "continue",
    )
    yield (
        "was good before",
        [*(trial(n, 4.0, 4.0) for n in range(3)), trial(9, 1.0, 9.0, state="running")],
        MEDIAN,
        True,
        "continue",
    )
    yield "no rule", [*three, trial(9, 7.0, state="running")], Prune(), True, "continue"


@pytest.mark.parametrize(
    ("what", "trials", "rule", "more", "expected"), [*verdicts()], ids=lambda case: str(case)[:30]
)
def test_verdict(what: str, trials: list[Trial], rule: Prune, more: bool, expected: str) -> None:
    assert verdict(trials, 9, rule, more) == expected, what


def test_next() -> None:
    waiting = trial(5, state="waiting")
    paused = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0)]
    assert next_trial([], ASHA, True) is None
    assert next_trial([*paused, waiting], ASHA, True) == 1  # a promoted one first
    assert next_trial([*paused[:2], waiting], ASHA, True) == 5
    assert next_trial([*paused, waiting], Prune(), True) == 5
    assert next_trial(paused[:2], ASHA, True) is None
    assert next_trial(paused[:2], ASHA, False) == 1  # all are paused: the best finishes
    assert next_trial([*paused[:2], trial(7, state="failed")], ASHA, False) == 1
    assert next_trial([*paused[:2], trial(7, state="finished")], ASHA, False) is None
    assert (
        next_trial(
            [trial(0, 3.0), trial(1, 5.0, 4.0), trial(3, 2.0)], replace(ASHA, reduction=9), False
        )
        == 1
    )


@pytest.mark.parametrize(
    ("sweep", "failed", "hours", "expected"),
    [
        (Sweep(), 5, 100.0, []),
        (Sweep(max_failures=3), 2, 0.0, []),
        (Sweep(max_failures=3), 3, 0.0, ["sweep.max_failures=6"]),
        (Sweep(hours=2), 9, 1.999, []),
        (Sweep(hours=2), 9, 2.0, ["sweep.hours=4"]),
        (Sweep(hours=0.025), 0, 0.0251, ["sweep.hours=0.05"]),
        (Sweep(hours=2), 0, 9.5, ["sweep.hours=10"]),  # it was continued with fewer
        (Sweep(max_failures=1, hours=1), 1, 1.5, ["sweep.max_failures=2", "sweep.hours=2"]),
    ],
)
def test_limits(sweep: Sweep, failed: int, hours: float, expected: list[str]) -> None:
    trials = [
        trial(9, state="finished"),
        *(trial(number, state="failed") for number in range(failed)),
    ]
    assert rules.raised_limits(trials, sweep, hours * 3600) == expected
    if not expected:
        rules.check_below_limits(trials, sweep, hours * 3600)
        return
    with pytest.raises(ConfigError) as wrong:
        rules.check_below_limits(trials, sweep, hours * 3600)
    assert f"set {expected[0]}" in wrong.value.message


def test_best() -> None:
    wanted = parse_objectives("min:loss, max:accuracy")
    assert [each.direction for each in wanted] == ["minimize", "maximize"]

    def done(number: int, loss: float, accuracy: float, state: State = "finished") -> Trial:
        return Trial(number, {}, state=state, values={"loss": loss, "accuracy": accuracy})

    trials = [
        done(0, 1, 0.5),
        done(1, 2, 0.9),
        done(2, 2, 0.4),
        done(3, 0, 1, "paused"),
        done(4, math.nan, 0.1),
    ]
    assert [each.number for each in best_trials(trials, wanted)] == [0, 1]
    assert [each.number for each in best_trials(trials, wanted[:1])] == [0]
    assert best_trials(trials, ()) == []
    assert Trial.from_json(json.loads(json.dumps(done(1, 2, 0.9).to_json()))).values == {
        "loss": 2,
        "accuracy": 0.9,
    }
    assert math.isnan(Trial.from_json(done(4, math.nan, 0.1).to_json()).values["loss"])
