"""What the sweep reads from the events of a trial."""

from __future__ import annotations

import pytest

from raydist.shared.kinds import Event
from raydist.sweeps.trial import WatchedTrial
from tests.records import event

WAIT = event("wait", text="…")
PLAN = event("plan", backend="gloo", world_size=1, slots=[])
RESTART = event(
    "restart", number=1, most=3, rank=0, host="a", how="lost", step=0, text="…", free=False
)
PLACED = event("placed", number=1, moved=[0])


@pytest.mark.parametrize(
    ("events", "settled"),
    [
        ([WAIT], False),  # for room, or in the queue
        ([WAIT, PLAN], True),
        ([PLAN, WAIT], True),  # while Ray installs packages, or an agent is late: it has its slots
        ([PLAN, RESTART, WAIT], False),  # for a node instead of a lost one
        ([PLAN, RESTART, WAIT, PLACED], True),
    ],
)
def test_the_next_trial_is_placed_once_the_others_have_slots(
    events: list[Event], settled: bool
) -> None:
    watched = WatchedTrial(())
    for each in events:
        watched.add(each)
    assert watched.settled == settled
