"""Overrides -> the space of a sweep: what it proposes, and what it refuses before anything starts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raydist.settings.compose import SweepConfig
from raydist.shared.errors import ConfigError
from raydist.sweeps import flow, samplers
from raydist.sweeps.optuna_study import OptunaSampler, importance
from raydist.sweeps.space import Space
from raydist.sweeps.trial import Trial, objectives

LOG = "optim.lr=tag(log,interval(1e-4,1e-1))"


def space(*typed: str) -> Space:
    return Space(SweepConfig(typed))


def test_a_grid_has_every_combination_the_last_setting_first() -> None:
    made = space("optim.lr=0.1,0.01", "train.epochs=range(1,3)", "model=mlp", "scale=choice(1x1,1x2)")
    assert made.combinations == 8
    settings = [*made.grid()]
    assert settings[1] == {"optim.lr": "0.1", "train.epochs": "1", "scale": "1x2"}
    job = made.job(settings[6])
    assert (job.optim.lr, job.train.epochs, job.scale.per_node) == (0.01, 2, 1)


def test_random_settings_depend_on_seed_and_number_only_and_stay_in_the_interval() -> None:
    made = space(LOG, "data.batch_size=int(interval(8,11))", "model=mlp,small_cnn")
    drawn = [made.draw(3, number) for number in range(400)]
    assert drawn[7] == made.draw(3, 7) != made.draw(4, 7)
    rates = [float(each["optim.lr"]) for each in drawn]
    assert 1e-4 <= min(rates) < max(rates) <= 1e-1
    assert 150 < sum(rate < math.sqrt(1e-5) for rate in rates) < 250  # half below the middle of the logarithms
    sizes = [each["data.batch_size"] for each in drawn]
    assert all(70 < sizes.count(str(size)) < 130 for size in (8, 9, 10, 11))


@pytest.mark.parametrize(
    ("typed", "refused"),
    [
        (["optim.lr=interval(0.1,0.01)"], r"the interval is empty; set 'optim.lr=interval\(0.01,0.1\)'"),
        (["optim.lr=tag(log,interval(0,1))"], "there is no logarithm of 0"),
        (["optim.lr=0.1,x"], "optim.lr=x: must be a number"),
        (["optim.lr=0.1,0.2", "sweep.seed=1,2"], "a setting of the sweep itself has one value"),
        ([LOG, "sweep.sampler=grid"], "optim.lr is an interval, which has no grid"),
        ([LOG], "sweep.sampler=random needs a number; set sweep.trials=20"),
        (["optim.lr=0.1,0.2", "sweep.sampler=grid", "sweep.trials=1"], "the grid has 2 combinations"),
        (["model=mlp,small_cnn", LOG, "sweep.sampler=cmaes", "sweep.objective=min:loss"], "all of them intervals"),
        ([LOG, "sweep.sampler=tpe"], "it needs an objective; set sweep.objective=min:NAME"),
        (["seed=1,2", "sweep.prune=asha", "sweep.objective=min:a,max:b"], "it takes one objective, not 2"),
        (["seed=1,2", "sweep.objective=loss"], "must be min:NAME or max:NAME; set sweep.objective=min:loss"),
        (["seed=1,2", "group=inline"], "a sweep runs on Ray"),
        (["seed=1,2", "resume=auto"], "sweep.resume=FOLDER goes on with a sweep"),
        (["sweep.resume=nowhere"], "there is no sweep.json in it"),
    ],
)
def test_refused_before_anything_starts(
    typed: list[str], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        flow.run_sweep(typed)
    assert not (tmp_path / "runs").exists()


def test_a_setting_of_sweeps_is_none_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raydist.settings import compose

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="one run does not"):
        compose.compose(["sweep.trials=3"])


def test_auto_is_a_grid_where_there_is_one() -> None:
    typed = ["optim.lr=0.1,0.01", "model=mlp,small_cnn"]
    for more, chosen in (([], ("grid", 4)), (["sweep.trials=3"], ("random", 3))):
        made = space(*typed, *more)
        assert samplers.choose_sampler(next(made.jobs()).sweep, made) == chosen


def test_optuna_proposes_learns_and_remembers(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    made, wanted = space(LOG, "model=mlp,small_cnn"), objectives("min:loss")

    def study() -> OptunaSampler:
        return OptunaSampler("tpe", 5, made, wanted, tmp_path / "optuna.journal")

    first, trials = study(), []
    for number in range(24):
        settings = first.propose(number)
        far = abs(math.log10(float(settings["optim.lr"])) + 2)
        done = Trial(number, settings, state="finished", curve=((1, 9.0),), values={"loss": far})
        first.tell(Trial(number, settings, state="paused", curve=((1, 9.0),)) if number == 3 else done)
        trials.append(done)
    first.tell(trials[3])  # it was taken up again
    again = study()
    assert [again.propose(number) for number in range(24)] == [trial.settings for trial in trials]
    assert again.propose(24) == first.propose(24)
    late = [trial.values["loss"] for trial in trials[12:]]
    assert sum(late) / 12 < sum(trial.values["loss"] for trial in trials[:10]) / 10
    shares = importance(made, wanted, trials)
    assert shares["optim.lr"] > 0.8 > shares["model"]
