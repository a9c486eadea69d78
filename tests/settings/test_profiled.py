"""The steps that watch.profile names."""

from __future__ import annotations

import pytest

from raydist.settings.config import Job, Watch
from raydist.settings.profiled import steps_to_profile
from raydist.settings.validate import validate
from raydist.shared.errors import ConfigError


def test_steps_are_read() -> None:
    assert steps_to_profile("") is None
    assert steps_to_profile("100..105") == (100, 105)
    assert steps_to_profile("2..2") == (2, 2)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("100", "watch.profile=100..105"),
        ("a..b", "watch.profile=100..105"),
        ("1..5", "watch.profile=2..7"),
        ("9..7", "watch.profile=9..14"),
        ("2..1002", "watch.profile=2..7"),
        ("-1..5", "watch.profile=100..105"),
    ],
)
def test_other_texts_are_refused(text: str, instead: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(Job(watch=Watch(profile=text)))
    assert str(error.value).startswith(f"watch.profile={text}: ")
    assert instead in str(error.value)
