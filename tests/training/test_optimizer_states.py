"""What an optimizer keeps for each parameter, which the plan counts."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.settings.config import Optim
from raydist.training.memory import states_of


@pytest.mark.parametrize(
    ("name", "args", "states"),
    [
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 1),
        ("adagrad", {}, 1),
        ("adam", {"amsgrad": True}, 3),
        ("adamw", {}, 2),
        ("adamw", {"capturable": True, "fused": True}, 2),
        ("rmsprop", {}, 1),
        ("rmsprop", {"momentum": 0.9, "centered": True}, 3),
    ],
    ids=str,
)
def test_each_state_of_an_optimizer_counts(name: str, args: dict[str, Any], states: int) -> None:
    assert states_of(Optim(name=name, args=args)) == states
