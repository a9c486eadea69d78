"""Optuna's samplers, each on a small space: they learn, remember what they proposed, and name what
they lack."""

from __future__ import annotations

import copy
import math
import resource
import statistics
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.settings.compose import SweepConfig
from raydist.settings.config import Sweep
from raydist.shared.errors import ConfigError
from raydist.sweeps import flow, importance, optuna_study, samplers
from raydist.sweeps.folder import Folder
from raydist.sweeps.space import Space
from raydist.sweeps.trial import Trial, parse_objectives

optuna = pytest.importorskip("optuna")
LOG, WHOLE, CHOICE = (
    "optim.lr=tag(log,interval(1e-4,1e-1))",
    "data.batch_size=int(interval(8,64))",
    "model=mlp,small_cnn",
)
ONE, TWO = "min:loss", "min:loss,max:speed"
TRIALS = 32


def values(settings: dict[str, str]) -> dict[str, float]:
    """Return the objectives. The best settings are 0.01, 16, mlp; `speed` prefers larger
    batches."""
    far = abs(math.log10(float(settings["optim.lr"])) + 2) + abs(
        math.log2(int(settings["data.batch_size"])) - 4
    )
    slow = abs(int(settings["data.batch_size"]) - 32) / 32
    return {"loss": far + 3 * (settings.get("model") == "small_cnn"), "speed": -far - slow}


def opened(folder: Path, name: str, objective: str, *overrides: str) -> samplers.Sampler:
    for package in optuna_study.PACKAGES.get(name, ()):
        pytest.importorskip(package)
    sweep = Sweep(sampler=name, trials=TRIALS, objective=objective, seed=123_456_789)
    return samplers.sampler(
        name, sweep, Space(SweepConfig([LOG, WHOLE, *overrides])), Folder(folder)
    )


def proposals(sampler: samplers.Sampler, first: int, end: int, objective: str) -> list[Trial]:
    result = []
    for number in range(first, end):
        settings = sampler.propose(number)
        trial = Trial(number, settings, state="finished", values=values(settings))
        sampler.tell(
            replace(
                trial,
                values={each.name: trial.values[each.name] for each in parse_objectives(objective)},
            )
        )
        result.append(trial)
    return result


@pytest.mark.parametrize(
    ("name", "objective", "overrides"),
    [
        ("tpe", ONE, [CHOICE]),
        ("gp", ONE, [CHOICE]),
        ("cmaes", ONE, []),
        ("nsga2", TWO, [CHOICE]),
        ("qmc", ONE, [CHOICE]),
    ],
    ids=lambda case: case if case in samplers.OPTUNA else "",
)
def test_it_learns_and_goes_on_after_a_kill_as_if_there_had_been_none(
    tmp_path: Path, name: str, objective: str, overrides: list[str]
) -> None:
    for folder in (whole := tmp_path / "whole", broken := tmp_path / "broken"):
        folder.mkdir()
    count = 16 if name == "gp" else TRIALS  # each proposal of it takes a second
    trials = proposals(opened(whole, name, objective, *overrides), 0, count, objective)
    assert all(1e-4 <= float(each.settings["optim.lr"]) <= 1e-1 for each in trials)
    assert all(8 <= int(each.settings["data.batch_size"]) <= 64 for each in trials)
    costs = [each.values["loss"] - each.values["speed"] for each in trials]
    if (
        name == "qmc"
    ):  # each sixteenth of the interval has two of 32 numbers; the first one is not of the sequence
        parts = [
            int((math.log10(float(each.settings["optim.lr"])) + 4) / 3 * 16) for each in trials[1:]
        ]
        assert max(parts.count(part) for part in range(16)) == 2
    else:
        assert statistics.median(costs[-8:]) < 0.7 * statistics.median(costs[:8])

    proposals(opened(broken, name, objective, *overrides), 0, 14, objective)
    proposed = opened(broken, name, objective, *overrides).propose(
        14
    )  # and then it is killed, holding the lock, in a line
    journal = broken / "optuna.journal"
    with journal.open("a") as file:
        file.write('{"op_code":4,"wor')
    Path(f"{journal}.lock").symlink_to(journal)
    again = opened(broken, name, objective, *overrides)
    assert [again.propose(number) for number in range(15)] == [
        *(each.settings for each in trials[:14]),
        proposed,
    ]
    assert [each.settings for each in proposals(again, 14, 16, objective)] == [
        each.settings for each in trials[14:16]
    ]


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would cut off the compiled files that it writes on a full disk, and fail to read them
    ever after."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@contextmanager
def no_space() -> Iterator[None]:
    """Files of 20 KB at most; the write that comes there is cut, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_only_what_optuna_would_have_learned(tmp_path: Path) -> None:
    sampler = opened(tmp_path, "tpe", ONE, CHOICE)
    (warned := list[str]())
    vars(sampler)["_warn"] = warned.append
    with no_space():
        trials = proposals(sampler, 0, TRIALS, ONE)
    assert len({each.settings["optim.lr"] for each in trials}) == TRIALS
    assert warned
    assert (tmp_path / "optuna.journal").read_bytes().endswith(b"\n")
    assert opened(tmp_path, "tpe", ONE, CHOICE).propose(3) == trials[3].settings


def test_a_resumed_trial_is_told_twice_and_the_settings_have_their_importance(
    tmp_path: Path,
) -> None:
    sampler = opened(tmp_path, "tpe", ONE, CHOICE)
    first = Trial(0, sampler.propose(0), state="paused", curve=((1, 9.0),))
    sampler.tell(first)
    sampler.tell(replace(first, state="finished", values=values(dict(first.settings))))
    trials = [first, *proposals(sampler, 1, 24, ONE)]
    assert [sampler.propose(number) for number in range(24)] == [each.settings for each in trials]
    shares = optuna_study.importance(
        Space(SweepConfig([LOG, WHOLE, CHOICE])).parts, parse_objectives(ONE), trials
    )
    assert next(iter(shares)) == "model"
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    name = parse_objectives(ONE)[0].name
    diverged = replace(first, number=99, state="finished", values={name: math.nan})
    space = Space(SweepConfig([LOG, WHOLE, CHOICE]))
    done = optuna_study.weighable(space.parts, parse_objectives(ONE), [*trials, diverged])
    assert done == trials[1:]  # the first is paused


def test_without_the_id_of_a_trial_optuna_learns_its_end_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = optuna_study.OptunaSampler._known

    def without_id(self: optuna_study.OptunaSampler, number: int) -> Any:
        if (known := copy.copy(find(self, number))) is not None:
            del known._trial_id
        return known

    curves = []
    for folder, method in (("with", find), ("without", without_id)):
        monkeypatch.setattr(optuna_study.OptunaSampler, "_known", method)
        (tmp_path / folder).mkdir()
        sampler = opened(tmp_path / folder, "tpe", ONE)
        assert isinstance(sampler, optuna_study.OptunaSampler)
        sampler.tell(Trial(0, sampler.propose(0), state="ended", curve=((1, 9.0),)))
        (known,) = sampler._study.get_trials()
        assert known.state == optuna.trial.TrialState.PRUNED
        curves.append(known.intermediate_values)
    assert curves == [{1: 9.0}, {}]


@pytest.mark.parametrize("name", ["tpe", "cmaes", "nsga2"])
def test_optuna_learns_of_added_trials_of_its_space_once(name: str, tmp_path: Path) -> None:
    sampler = opened(tmp_path, name, ONE)
    assert isinstance(sampler, optuna_study.OptunaSampler)
    trials = proposals(sampler, 0, 6, ONE)
    own = {"optim.lr": "0.01", "data.batch_size": "16"}
    added = Trial(TRIALS, own, added="x", curve=((1, 0.5),))
    for number, other in enumerate(({"optim.lr": "3"}, {"seed": "1"}, {"data.batch_size": "9.5"})):
        outside = {**own, **other}
        wrong = Trial(TRIALS + 1 + number, outside, "finished", values={"loss": 0}, added="x")
        sampler.tell(wrong)
    for state in ("paused", "paused", "finished", "finished"):
        values_now = {"loss": 0.0} if state == "finished" else {}
        sampler.tell(replace(added, state=state, values=values_now))
    trials += proposals(sampler, 6, 8, ONE)
    told = sampler._study.get_trials()[6:-2]
    assert [(each.state.name, each.values, each.params) for each in told] == [
        ("PRUNED", None, {"optim.lr": 0.01, "data.batch_size": 16}),
        ("COMPLETE", [0.0], {"optim.lr": 0.01, "data.batch_size": 16}),
    ]
    again = opened(tmp_path, name, ONE)
    assert [again.propose(number) for number in range(8)] == [each.settings for each in trials]
    space = Space(SweepConfig([LOG, WHOLE]))
    done = replace(added, state="finished", values={"loss": 0.0})
    counted = optuna_study.weighable(space.parts, parse_objectives(ONE), [*trials, done, wrong])
    assert counted == [*trials, done]


def test_the_importance_of_a_running_sweep_is_computed_now_and_then(tmp_path: Path) -> None:
    """In a child process, from few trials on, and not again for each one that finishes."""
    space, changed = Space(SweepConfig([LOG, WHOLE, CHOICE])), threading.Event()
    trials = proposals(samplers.Random(space, 0), 0, 44, ONE)
    weights = importance.RunningImportance(space.parts, parse_objectives(ONE), changed.set)

    def updated(count: int) -> bool:
        changed.clear()
        weights.update(trials[:count])
        thread = weights._thread
        if thread is not None:
            thread.join()
        return changed.is_set()

    assert [updated(count) for count in (3, 4, 4, 40, 43, 44)] == [
        False, True, False, True, False, True,
    ]  # fmt: skip
    assert weights.shares == optuna_study.importance(space.parts, parse_objectives(ONE), trials)
    assert len(weights.shares) == 3
    weights.close()


def test_the_importance_of_a_running_sweep_is_computed_from_some_of_many_trials() -> None:
    trials = [Trial(number, {}) for number in range(450)]
    some = [trial.number for trial in importance.some(trials)]
    assert some == [*range(2, 450, 3)]
    assert importance.some(trials[:200]) == trials[:200]
    assert importance.some([]) == []


@pytest.mark.parametrize("name", samplers.OPTUNA)
def test_a_package_that_is_missing_is_named_with_what_to_type(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    last = optuna_study.PACKAGES.get(name, ("optuna",))[-1]
    monkeypatch.setattr(
        optuna_study, "find_spec", lambda package: None if package == last else package
    )
    with pytest.raises(ConfigError, match=rf"it needs {last}: pip install 'raydist\[sweep\]'"):
        flow.run_sweep(
            [LOG, WHOLE, f"sweep.sampler={name}", "sweep.trials=4", "sweep.objective=min:loss"]
        )
    assert not [*tmp_path.iterdir()]
