"""What the sweep reads from the events of a trial."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raydist.shared.kinds import Event
from raydist.sweeps.trial import Trial, WatchedTrial, parse_objectives, unreported_objective
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


def test_only_an_objective_that_no_trial_has_reported_is_wrong() -> None:
    loss, both = parse_objectives("min:loss"), parse_objectives("min:loss,max:hits")
    without = Trial(2, {}, "finished")
    has = Trial(1, {}, "finished", values={"loss": 1.0})
    assert unreported_objective(without, loss) is not None  # the first one that finishes
    assert unreported_objective(without, loss, [without, replace(has, state="failed")]) is not None
    assert unreported_objective(without, loss, [has, without]) is None
    wrong = unreported_objective(without, both, [has, without])
    assert wrong is not None
    assert wrong.value == "max:hits"
