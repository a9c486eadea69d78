from __future__ import annotations

import pickle
import signal

import pytest

from raydist.errors import ConfigError, LaunchError, RaydistError, RunFailed, Stopped, nearest, suggest


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
    error = pickle.loads(pickle.dumps(RunFailed("rank 3 failed", result="R", exceptions={3: ValueError("x")})))
    assert error.result == "R"
    assert isinstance(error.exceptions[3], ValueError)


def test_a_stop_names_its_signal() -> None:
    assert str(Stopped(signal.SIGTERM)) == "stopped by SIGTERM"


@pytest.mark.parametrize(("word", "best"), [("ncll", "nccl"), ("GLOO", "gloo"), ("scal", "scale"), ("zzz", None)])
def test_nearest(word: str, best: str | None) -> None:
    assert nearest(word, ["gloo", "nccl", "scale"]) == best


def test_suggest_names_the_nearest_and_all() -> None:
    assert suggest("epoch", ["epochs", "steps"], prefix="train.") == "did you mean train.epochs? (known: epochs, steps)"
    assert suggest("zzz", ["epochs"]) == "(known: epochs)"
    assert "... (50 in all)".replace("...", "…") in suggest("zzz", [f"name{i:02}" for i in range(50)])
