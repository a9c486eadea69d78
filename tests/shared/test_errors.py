from __future__ import annotations

import pickle
import signal

import pytest

from raydist.shared.errors import (
    ConfigError,
    LaunchError,
    RaydistError,
    RunFailed,
    Stopped,
    nearest,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RaydistError("x"), 1),
        (ConfigError("x"), 2),
        (LaunchError("x"), 1),
        (RunFailed("x", result=1, exceptions={}), 1),
        (Stopped(signal.SIGINT), 130),
        (Stopped(signal.SIGTERM), 143),
    ],
)
def test_every_error_has_its_exit_code_and_survives_pickle(error: RaydistError, code: int) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert error.exit_code == back.exit_code == code
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_facts_are_attributes_and_travel() -> None:
    error = pickle.loads(
        pickle.dumps(RunFailed("rank 3 failed", result="R", exceptions={3: ValueError("x")}))
    )
    assert error.result == "R"
    assert isinstance(error.exceptions[3], ValueError)


def test_a_stop_names_its_signal() -> None:
    assert str(Stopped(signal.SIGTERM)) == "stopped by SIGTERM"


@pytest.mark.parametrize(
    ("word", "best"), [("ncll", "nccl"), ("GLOO", "gloo"), ("scal", "scale"), ("zzz", None)]
)
def test_nearest(word: str, best: str | None) -> None:
    assert nearest(word, ["gloo", "nccl", "scale"]) == best


def test_an_unknown_value_is_told_the_nearest_and_all() -> None:
    error = ConfigError.unknown("train", "epoch", ["epochs", "steps"])
    assert error.message.endswith("did you mean train=epochs? (known: epochs, steps)")
    assert ConfigError.unknown("train", "zzz", ["epochs"]).message.endswith("(known: epochs)")
    many = ConfigError.unknown("train", "zzz", [f"name{i:02}" for i in range(50)])
    assert "... (50 in all)".replace("...", "…") in many.message


def test_a_config_error_has_its_parts_and_keeps_them_when_pickled() -> None:
    error = pickle.loads(
        pickle.dumps(ConfigError.of("seed", -1, "must be 0 or more", "seed=0", "seed=1"))
    )
    assert (error.key, error.value, error.suggestion) == ("seed", -1, "seed=0")
    assert str(error) == "seed=-1: must be 0 or more; set seed=0 or seed=1"


def test_an_unknown_value_has_the_nearest_as_its_suggestion() -> None:
    error = ConfigError.unknown("--ops", "reduc", ["reduce", "gather"])
    assert error.suggestion == "--ops reduce"
    assert (
        str(error)
        == "--ops reduc: unknown value; did you mean --ops reduce? (known: gather, reduce)"
    )
    assert ConfigError.unknown("seed", "zzz", ["abc"]).suggestion == ""
