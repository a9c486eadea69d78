"""The ranks that a command names."""

from __future__ import annotations

import pytest

from raydist.shared.errors import ConfigError
from raydist.tools.running import ranks_of_text


def test_ranks_are_numbers_and_ranges() -> None:
    assert ranks_of_text("3") == [3]
    assert ranks_of_text("0,2-4") == [0, 2, 3, 4]


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "7-4", "0,3-1", "0-99999999999"])
def test_no_mistyped_range_stands_for_all_ranks_or_for_too_many(text: str) -> None:
    with pytest.raises(ConfigError, match="rank="):
        ranks_of_text(text)
