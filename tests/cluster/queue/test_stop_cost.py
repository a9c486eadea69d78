"""What a stop of a run costs after each of its events."""

from __future__ import annotations

from functools import reduce

import pytest

from raydist.cluster.queue.stop_cost import StopCost, cost_after
from raydist.shared import kinds
from raydist.shared.kinds import Event

NOW = 1000.0
PLAN = kinds.Plan(backend="gloo", world_size=4, slots=())
BEGAN = kinds.Began(rank=0, host="n1", pid=7, t=NOW - 50)
FIT = kinds.Begin(rank=0, t=NOW - 40)
SAVED = kinds.Saved(rank=0, step=5, path="/c/5", s=2.0, t=NOW - 10)
FOUND = kinds.Saved(rank=0, step=5, path="/c/5", s=0.0, t=NOW - 5)


@pytest.mark.parametrize(
    ("script", "events", "expected"),
    [
        pytest.param(False, [PLAN, BEGAN], 200, id="no state yet"),
        pytest.param(False, [PLAN, BEGAN, SAVED], 48, id="a loop of its own, from its checkpoint"),
        pytest.param(False, [PLAN, BEGAN, SAVED, FOUND], 28, id="the duration of the last save"),
        pytest.param(False, [PLAN, BEGAN, FIT], 0, id="raydist.fit stops after a step"),
        pytest.param(False, [PLAN, BEGAN, FIT, SAVED], 8, id="raydist.fit saves once more"),
        pytest.param(True, [PLAN, BEGAN, FIT], 200, id="a program does not stop after a step"),
        pytest.param(True, [PLAN, BEGAN, SAVED], 48, id="a program that saves"),
        pytest.param(False, [PLAN, SAVED, BEGAN], 208, id="another attempt"),
        pytest.param(
            False,
            [PLAN, BEGAN, kinds.Began(rank=1, host="n2", pid=8, t=NOW)],
            200,
            id="only rank 0 counts",
        ),
        pytest.param(
            False,
            [PLAN, BEGAN, kinds.Resize(backend="gloo", world_size=2, slots=(), nodes=1, before=2)],
            100,
            id="fewer ranks",
        ),
    ],
)
def test_what_a_stop_costs(script: bool, events: list[Event], expected: int) -> None:
    cost = reduce(lambda cost, event: cost_after(cost, event, script), events, StopCost())
    assert cost.rank_seconds(NOW) == expected
