"""The ranks that a command names."""

from __future__ import annotations

import pytest

from raydist.shared.errors import ConfigError
from raydist.tools.running import ranks_of_text


def test_ranks_are_numbers_and_ranges() -> None:
    assert ranks_of_text("3") == [3]
    assert ranks_of_text("0,2-4") == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["", "x", "1-", "-1"], "must be ranks"),
        (["7-4", "0,3-1"], "must be two ranks, the smaller one first"),
        (["20000000", "0-20000000", "20000000-3"], "no run has so many ranks"),
    ],
)
def test_no_mistyped_range_stands_for_all_ranks_or_for_too_many(
    texts: list[str], reason: str
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=rf"rank={text}: .*{reason}"):
            ranks_of_text(text)
