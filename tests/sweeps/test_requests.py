"""Trials that a person adds: what is refused before it is written, and who may add."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raydist.settings.compose import SweepConfig
from raydist.shared.errors import ConfigError
from raydist.sweeps.requests import FOLDER, Requests, write_request
from raydist.sweeps.rules import Prune, next_trial
from raydist.sweeps.space import Space, params
from raydist.sweeps.trial import Trial
from raydist.tools import sweep, sweep_add

SPACE = ("optim.lr=tag(log,interval(1e-3,1e-1))", "model=mlp,small_cnn", "seed=int(interval(1,9))")
FULL = ("optim.lr=0.02", "model=mlp", "seed=3")


def summary(*overrides: str, function: str = "") -> Mapping[str, Any]:
    """Return the part of sweep.json that matters here."""
    space = [*Space(SweepConfig(overrides)).parts]
    facts = {"config_name": "config", "function": function, "space": dict.fromkeys(space, "")}
    return {"overrides": [*overrides], "state": "finished", "trials": [], **facts}


def test_settings_of_the_space_lists_and_other_settings() -> None:
    saved = summary(*SPACE, "train.epochs=2", "env.API_KEY=${raydist.secret:env.API_KEY}")
    words = [*FULL, "train.epochs=5", "job.args.x='a b',c"]
    with pytest.raises(ConfigError, match=r"job\.args\.x"):  # the job has no such argument
        sweep_add.trials_of(saved, words)
    found = sweep_add.trials_of(saved, ["model=mlp", "optim.lr=2e-2,0.5", "seed=3", *words[3:4]])
    assert found == [
        {"optim.lr": rate, "model": "mlp", "seed": "3", "train.epochs": "5"}
        for rate in ("0.02", "0.5")
    ]
    space = Space(SweepConfig([*SPACE, "train.epochs=2"]))
    job = space.job(found[0])
    assert (job.optim.lr, job.seed, job.train.epochs) == (0.02, 3, 5)
    assert params(space.parts, found[0]) is None
    own = {key: found[0][key] for key in space.parts}
    assert params(space.parts, own) == {"optim.lr": 0.02, "model": "mlp", "seed": 3}
    for key, wrong in (("optim.lr", "0.5"), ("optim.lr", "x"), ("model", "vit"), ("seed", "3.0")):
        assert params(space.parts, {**own, key: wrong}) is None


def test_a_sweep_of_a_function_does_not_ask_for_its_job() -> None:
    saved = summary("job.args.hidden=16,32", function="__main__:train")
    assert sweep_add.trials_of(saved, ["job.args.hidden=64"]) == [{"job.args.hidden": "64"}]


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (FULL[:2], "seed: the sweep varies it, so a trial that is added needs a value of it; set"),
        ((*FULL, "optim.lrr=1"), "there is no setting optim.lrr; did you mean optim.lr=1"),
        ((*FULL[:2], "seed=x"), "seed=x"),
        ((*FULL, "sweep.trials=3"), "sweep.trials=3: a trial that is added cannot have this"),
        ((*FULL, "hydra/sweeper=basic"), "a trial that is added cannot have this"),
        ((*FULL, "~model"), "a trial that is added cannot have this"),
        ((*FULL, "resume=auto"), "each trial is a new run"),
        ((*FULL, "env.API_KEY=hush"), "a secret is not saved, so it cannot be added"),
        ((*FULL[:2], "seed=int(interval(1,3))"), "a trial has one value; set seed=1"),
        ((*FULL[:2], "seed=range(0,65)"), "one command adds at most 64 trials"),
        ((), "it needs the folder of the sweep and the settings of the trials"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) and value else "",
)
def test_what_is_wrong_is_refused_and_nothing_is_written(
    words: tuple[str, ...], refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(summary(*SPACE)))
    assert sweep.main(["add", str(tmp_path), *words]) == 2
    assert refused in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_no_folder_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["add", f"{tmp_path}/nothing", "seed=1"]) == 2
    assert "there is no sweep.json in it" in capsys.readouterr().err


def test_a_request_gives_each_trial_once_after_any_kill(tmp_path: Path) -> None:
    warned = list[str]()
    settings = [{"seed": "1"}, {"seed": "2"}]
    name = write_request(tmp_path, settings)
    requests = Requests(tmp_path, warned.append)
    assert [*requests.new_trials([])] == [(name, each) for each in settings]
    assert [*requests.new_trials([])] == []
    created = [Trial(7, settings[0], added=name), Trial(0, settings[1])]
    again = Requests(tmp_path, warned.append)  # of a driver that was killed between the two
    assert [*again.new_trials(created)] == [(name, settings[1])]
    (tmp_path / FOLDER / ".half").write_text("[{")
    (tmp_path / FOLDER / "wrong.json").write_text("[{")
    assert [*again.new_trials(created)] == []
    assert warned == [f"{tmp_path}/added/wrong.json is left out: it is not a request"]


@pytest.mark.parametrize("change", ["mode", pytest.param("owner", marks=pytest.mark.root)])
def test_another_user_cannot_add(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(summary(*SPACE)))
    name = write_request(tmp_path, [{"seed": "1"}])
    assert oct((tmp_path / FOLDER).stat().st_mode)[-3:] == "700"
    if change == "mode":
        (tmp_path / FOLDER).chmod(0o777)
    else:
        os.chown(tmp_path / FOLDER, 65534, 65534)
    warned = list[str]()
    assert [*Requests(tmp_path, warned.append).new_trials([])] == []
    cause = "other users can write to its folder"
    assert warned == [f"{tmp_path}/added/{name}.json is left out: {cause}"]
    assert sweep.main(["add", str(tmp_path), *FULL]) == 2
    assert "nothing can be added" in capsys.readouterr().err
    if change == "owner":
        os.chown(tmp_path / "sweep.json", 65534, 65534)
        assert sweep.main(["add", str(tmp_path), *FULL]) == 2
        assert "belongs to uid 65534, and only that user can add" in capsys.readouterr().err


def test_an_added_trial_is_first_in_line() -> None:
    waiting = [Trial(1, {}), Trial(2, {}), Trial(9, {}, added="x")]
    assert next_trial(waiting, Prune(), True) == 9
    assert next_trial(waiting[:2], Prune(), True) == 1
