"""Durations as people type them."""

from __future__ import annotations

import pytest

from raydist.settings.duration import seconds_of
from raydist.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("45s", 45),
        ("30m", 1800),
        ("4h", 14400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1d12h", 129600),
    ],
)
def test_a_duration_in_seconds(text: str, seconds: float) -> None:
    assert seconds_of("queue.limit", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "4 h", "h", "30m1h", "-5", "1e3", "4hours"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match=r"queue\.limit=4h"):
        seconds_of("queue.limit", text)
