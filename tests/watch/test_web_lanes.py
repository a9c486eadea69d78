"""The lanes of a run of any length: all columns stand for equally many events."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.watch.web import lanes
from raydist.watch.web.lanes import UNKNOWN, Lanes

Event = dict[int, int]
"""By rank, its own work as a percentage of the step; UNKNOWN: it took no step."""
SHARE = st.one_of(st.just(UNKNOWN), st.integers(0, 100))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.dictionaries(st.integers(0, 2), SHARE, max_size=3), min_size=1, max_size=70),
)
def test_each_column_has_the_greatest_of_equally_many_events(
    columns: int, events: list[Event]
) -> None:
    found = Lanes()
    with pytest.MonkeyPatch.context() as on:
        on.setattr(lanes, "COLUMNS", columns)
        for number, event in enumerate(events):
            found.add(float(number), {str(rank): figures(own) for rank, own in event.items()})
            assert len(found.times) <= 2 * columns
            assert len(found.times) == ceil((number + 1) / found.every)
    assert found.every == 1 or len(found.times) > columns  # no coarser than it must be
    assert found.times == [*range(0, len(events), found.every)]
    stretches = [
        events[first : first + found.every] for first in range(0, len(events), found.every)
    ]
    assert found.shares == {
        rank: [max(event.get(rank, UNKNOWN) for event in stretch) for stretch in stretches]
        for rank in {rank for event in events for rank in event}
    }


def figures(own: int) -> tuple[int, float, float]:
    """Return what an event has of a rank: steps, seconds of own work and of the whole step."""
    return (0, 0.0, 0.0) if own == UNKNOWN else (1, own / 100, 1.0)
