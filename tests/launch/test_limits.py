"""The longest waits of a run, by its number of ranks."""

from __future__ import annotations

import pytest

from raydist.launch import limits


@pytest.mark.parametrize(
    ("limit", "few", "many"),
    [
        (limits.ANSWER_S, 60.0, 63.4),
        (limits.IDLE_S, 10.0, 13.4),
        (limits.NETWORK_S, 2.0, 5.4),
        (limits.CLOSE_S, 2.0, 5.4),
        (limits.LOAD_S, 5.0, 8.4),
        (limits.EXAMINE_S, 7.0, 10.4),
        (limits.SILENT_S, 5.0, 8.4),
    ],
)
def test_a_limit_grows_with_the_ranks_that_answer(limit: float, few: float, many: float) -> None:
    """2 ranks; 1,024."""
    assert limits.longest(limit, 2) == pytest.approx(few, abs=0.01)
    assert limits.longest(limit, 1024) == pytest.approx(many, abs=0.02)
