"""Overrides -> the space of a sweep: what it proposes, and what it refuses before anything
starts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.settings.compose import SweepConfig
from raydist.settings.config import Sweep
from raydist.shared.errors import ConfigError
from raydist.sweeps import flow, samplers
from raydist.sweeps.folder import is_running
from raydist.sweeps.space import Space
from raydist.sweeps.trial import Trial

LOG = "optim.lr=tag(log,interval(1e-4,1e-1))"


def space(*overrides: str) -> Space:
    return Space(SweepConfig(overrides))


def test_a_grid_has_every_combination_the_last_setting_first() -> None:
    result = space(
        "optim.lr=0.1,0.01", "train.epochs=range(1,3)", "model=mlp", "scale=choice(1x1,1x2)"
    )
    assert result.combinations == 8
    settings = [*result.grid()]
    assert settings[1] == {"optim.lr": "0.1", "train.epochs": "1", "scale": "1x2"}
    job = result.job(settings[6])
    assert (job.optim.lr, job.train.epochs, job.scale.per_node) == (0.01, 2, 1)


def test_each_list_of_arguments_makes_a_trial(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    lists = "args=[--lr,0.1],[--lr,0.2]"
    result = space(f"script={tmp_path}/train.py", lists, "fabric.hca=a,b", "scale=1x1")
    jobs = [result.job(settings) for settings in result.grid()]
    assert [(job.args, job.fabric.hca) for job in jobs] == [
        (["--lr", rate], [port]) for rate in ("0.1", "0.2") for port in "ab"
    ]


def test_all_labels_of_a_sweep_apply_whatever_characters_they_have() -> None:
    labels = ("ray.io/market-type=spot", "ray.io/zone=a", "disk=ssd", "ray.io/zone=b")
    result = space("seed=1,2", "scale=1x1", *(f"scale.labels.{each}" for each in labels))
    assert result.job({"seed": "1"}).scale.labels == {
        "ray.io/market-type": "spot",
        "ray.io/zone": "b",
        "disk": "ssd",
    }


def test_random_settings_depend_on_seed_and_number_only_and_stay_in_the_interval() -> None:
    result = space(LOG, "data.batch_size=int(interval(8,11))", "model=mlp,small_cnn")
    drawn = [result.draw(3, number) for number in range(400)]
    assert drawn[7] == result.draw(3, 7) != result.draw(4, 7)
    rates = [float(each["optim.lr"]) for each in drawn]
    assert 1e-4 <= min(rates) < max(rates) <= 1e-1
    assert (
        150 < sum(rate < math.sqrt(1e-5) for rate in rates) < 250
    )  # half below the middle of the logarithms
    sizes = [each["data.batch_size"] for each in drawn]
    assert all(70 < sizes.count(str(size)) < 130 for size in (8, 9, 10, 11))


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["optim.lr=interval(0.1,0.01)"], "empty"),
        ([LOG, "sweep.sampler=grid"], "no grid"),
        (["optim.lr=0.1,0.2", "sweep.sampler=grid", "sweep.trials=1"], "2 combinations"),
        (["seed=1,2", "group=inline"], "Ray"),
    ],
)
def test_refused_before_anything_starts(
    overrides: list[str], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=refused):
        flow.run_sweep(overrides)
    assert not (tmp_path / "runs").exists()


def test_a_setting_of_sweeps_is_none_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydist.settings import compose

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="one run does not"):
        compose.compose(["sweep.trials=3"])


def test_auto_is_a_grid_where_there_is_one() -> None:
    overrides = ["optim.lr=0.1,0.01", "model=mlp,small_cnn"]
    for more, chosen in (
        ([], ("grid", 4)),
        (["sweep.trials=3"], ("random", 3)),
        (["sweep.trials=10"], ("grid", 4)),
    ):
        result = space(*overrides, *more)
        assert samplers.choose_sampler(next(result.jobs()).sweep, result) == chosen


def test_a_sweep_of_a_function_is_gone_on_with_in_python_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command trained the default job in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"function": "__main__:train"}))
    with pytest.raises(ConfigError, match="its job is the function __main__:train") as refused:
        flow.run_sweep(["sweep.resume=."])
    assert refused.value.suggestion == "raydist.sweep(train, 'sweep.resume=.')"


def test_a_refused_sweep_can_be_gone_on_with_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: its folder stayed locked."""
    monkeypatch.chdir(tmp_path)
    record: dict[str, Any] = {"overrides": ["seed=0,1"], "config_name": "config"}
    record |= {"sampler": "grid", "wall_s": 7200.0, "trials": []}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="hours before") as refused:
        flow.run_sweep(["sweep.resume=.", "sweep.hours=1"])
    assert not is_running(tmp_path)
    assert refused.traceback  # which keeps what is open, as that of a notebook does


def test_what_is_typed_after_a_sweep_has_its_flags_and_quotes(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [schema, config, _self_]\n")
    one = Trial(0, {"seed": "0"})
    config = SweepConfig(["seed=0,1", "env.A=b c"], "mine", str(tmp_path))
    record = flow.SweepRecord(
        config.override_texts, "mine", Space(config), (), "grid", Sweep(), config
    )
    flags = f"--config-dir {tmp_path}"
    assert record.command(one) == (
        f"python -m raydist.train --config-name mine {flags} 'env.A=b c' seed=0"
    )
    again = record.resumption(Path("/my runs"), ["sweep.hours=2"])
    assert again == f"raydist sweep {flags} 'sweep.resume=/my runs' sweep.hours=2"

    def train() -> None: ...

    config = SweepConfig(["seed=0,1"], function=train)
    record = replace(record, overrides=config.override_texts, config_name="config", config=config)
    name = train.__qualname__
    assert record.command(one) == f"raydist.run({name}, 'seed=0')"
    assert record.resumption(Path("/r"), []) == f"raydist.sweep({name}, 'sweep.resume=/r')"


def test_a_sweep_with_more_trials_keeps_the_sampler_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of four combinations would be a grid: two of them were drawn already."""
    overrides = ["optim.lr=0.1,0.01", "model=mlp,small_cnn"]
    result = space(*overrides, "sweep.trials=4")
    goes_on = samplers.go_on_with(next(result.jobs()).sweep, "random")
    assert samplers.choose_sampler(goes_on, result) == ("random", 4)

    monkeypatch.chdir(tmp_path)
    record = {"overrides": [*overrides, "sweep.trials=2"], "config_name": "config"}
    (tmp_path / "sweep.json").write_text(json.dumps({**record, "sampler": "random"}))
    with pytest.raises(ConfigError, match=r"began with random.*set sweep\.sampler=random"):
        flow.run_sweep([f"sweep.resume={tmp_path}", "sweep.trials=4", "sweep.sampler=grid"])
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
