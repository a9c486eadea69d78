"""The settings that may change while a run runs."""

from __future__ import annotations

import pytest

from raydist.settings.changeable import CHANGEABLE, read_changes, value_of, with_values
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError


def test_settings_are_read_as_on_the_command_line() -> None:
    words = ["optim.lr=1e-3", "train.clip=null", "checkpoint.every=200", "train.evaluate_steps=5"]
    values = read_changes(words)
    assert values == {
        "optim.lr": 0.001,
        "train.clip": None,
        "checkpoint.every": 200,
        "train.evaluate_steps": 5,
    }
    assert values.keys() == set(CHANGEABLE)
    job = with_values(Job(), values)
    assert {name: value_of(job, name) for name in CHANGEABLE} == values
    assert job.optim.schedule == Job().optim.schedule


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no setting; type optim.lr=0.01"),
        (["optim.lr=fast"], "optim.lr=fast: must be a number; set optim.lr=0.05"),
        (["optim.lr=null"], "must be a number; set"),
        (["optim.lr=-1"], "must be more than 0"),
        (["optim.lr=nan"], "must be a finite number"),
        (["train.clip=0"], "must be more than 0"),
        (["checkpoint.every=2.5"], "must be a whole number, or null; set checkpoint.every=1"),
        (["checkpoint.every=0"], "must be 1 or more"),
        (["optm.lr=0.1"], "did you mean optim.lr=0.1?"),
        (["train.steps=9"], "raydist set can't change it in a run"),
    ],
)
def test_others_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_changes(words)
    assert said in str(refused.value)


def test_a_refusal_lists_what_can_change() -> None:
    with pytest.raises(ConfigError) as refused:
        read_changes(["model.hidden=3"])
    assert all(name in str(refused.value) for name in CHANGEABLE)
