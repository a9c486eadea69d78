"""Each step once, and not before it is settled."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.reporting.points import HELD_S, Points, Position, node_numbers
from raydist.shared import kinds
from raydist.shared.kinds import Event
from tests.records import event


def report(
    step: int | None, loss: float, kept: int | None = None, t: float = 0.0, rank: int = 0
) -> Event:
    return kinds.Report(t=t, rank=rank, step=step, kept=kept, values={"loss": loss})


def other(kind: str, **facts: Any) -> Event:
    return event(kind, t=0.0, **facts)


RESTART, END = other("restart"), other("result")
AFTER_1 = other("begin", rank=0, resumed=1)


def points(*events: Event, repeats: bool = True, before: int = -1) -> list[list[tuple[int, float]]]:
    """Return the points after each event: step and loss."""
    points = Points(newest_released=Position(1, before), repeats=repeats)
    return [[(each.at.step, each.values["loss"]) for each in points.add(event)] for event in events]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # a step is told once a later one is reported and a snapshot has it
        ([report(1, 0.1), report(2, 0.2, kept=1), report(3, 0.3, kept=1), report(4, 0.4, kept=3)],
         [[], [(1, 0.1)], [], [(2, 0.2), (3, 0.3)]]),
        # a checkpoint settles as well, with the next report
        ([report(1, 0.1), report(2, 0.2), other("saved", step=2), report(3, 0.3), END],
         [[], [], [], [(1, 0.1), (2, 0.2)], [(3, 0.3)]]),
        # what an evaluation adds to a step belongs to it
        ([report(1, 0.1), other("report", rank=0, step=1, values={"accuracy": 1.0}), report(2, 0.2, kept=1)],
         [[], [], [(1, 0.1)]]),
        # repeated: the loop reports where it resumes, or the next report shows it
        ([report(1, 0.1), report(2, 0.2), report(3, 0.3), RESTART, AFTER_1, report(2, 2.0), END],
         [[], [], [], [], [], [], [(1, 0.1), (2, 2.0)]]),
        ([report(1, 0.1), report(2, 0.2), report(3, 0.3), RESTART, report(2, 2.0), report(3, 3.0, kept=2)],
         [[], [], [], [], [], [(1, 0.1), (2, 2.0)]]),
        # died between a step and its evaluation: the step stays, and gets it from the next attempt
        ([report(1, 0.1), RESTART, AFTER_1, report(2, 0.2, kept=1)], [[], [], [], [(1, 0.1)]]),
        # nothing is ever told twice, even if a whole machine was lost with its snapshots
        ([report(1, 0.1), report(2, 0.2, kept=1), RESTART, report(1, 9.0), report(2, 2.0), report(3, 3.0, kept=2),
          END],
         [[], [(1, 0.1)], [], [], [], [(2, 2.0)], [(3, 3.0)]]),
        # a loop that never saves is told after a while
        ([report(1, 0.1), report(2, 0.2, t=HELD_S), report(3, 0.3, t=HELD_S + 1)], [[], [], [(1, 0.1)]]),
        # other ranks do not count; a report without a step belongs to the newest
        ([report(1, 0.1), report(1, 9.0, rank=1), report(None, 0.5), END], [[], [], [], [(1, 0.5)]]),
        # or to step 0 if there is none yet: what a job reports before it trains, and again in a restart
        ([report(None, 0.5), report(1, 0.1, kept=0), RESTART, report(None, 0.5), AFTER_1, report(2, 0.2), END],
         [[], [(0, 0.5)], [], [], [], [], [(1, 0.1), (2, 0.2)]]),
        # the length of the training is no value
        ([other("report", rank=0, values={"steps": 9}), report(1, 0.1), END], [[], [], [(1, 0.1)]]),
    ],
)  # fmt: skip
def test_each_step_once(events: list[Event], expected: list[list[tuple[int, float]]]) -> None:
    assert points(*events) == expected


def test_without_restarts_only_the_newest_step_waits() -> None:
    assert points(report(1, 0.1), report(2, 0.2), repeats=False) == [[], [(1, 0.1)]]


def test_a_run_that_resumes_tells_what_the_first_has_not() -> None:
    assert points(report(7, 0.7), report(8, 0.8), report(9, 0.9), END, before=8) == [
        [],
        [],
        [],
        [(9, 0.9)],
    ]


def in_second(step: int, loss: float, kept: int | None = None) -> Event:
    """Rank 0's report in the job's second raydist.fit."""
    return kinds.Report(t=0.0, rank=0, step=step, kept=kept, values={"loss": loss}, fit=2)


def test_a_second_fit_counts_its_own_steps() -> None:
    """Its steps were those of the first one, which the tracker had: all of them were dropped."""
    finds_the_first_done = other("begin", rank=0, resumed=2)
    second_again = other("begin", rank=0, resumed=1, fit=2)
    assert points(
        report(1, 0.1), report(2, 0.2, kept=1), in_second(1, 1.1), in_second(2, 1.2),
        RESTART, finds_the_first_done, second_again, in_second(2, 2.2, kept=1), in_second(3, 2.3, kept=2), END,
    ) == [[], [(1, 0.1)], [], [], [], [], [], [(2, 0.2), (1, 1.1)], [(2, 2.2)], [(3, 2.3)]]  # fmt: skip
    checkpoint = other("saved", step=1, path="/runs/1/checkpoints/fit-2/step-00000001")
    assert points(report(2, 0.2), in_second(1, 1.1), checkpoint, in_second(2, 1.2)) == [
        [],
        [],
        [],
        [(2, 0.2), (1, 1.1)],
    ]


def test_only_numbers_make_curves() -> None:
    values = {
        "loss": 1,
        "nan": float("nan"),
        "name": "text",
        "steps": 100,
        "epoch": 2,
        "good": True,
    }
    points = Points()
    points.add(other("report", rank=0, step=1, values=values))
    (point,) = points.rest()
    assert point.values.keys() == {"loss", "nan", "epoch"}


def test_nodes_are_flat_names() -> None:
    gpu = {"util": 0.5, "memory": [1, 4], "power_w": None, "temp_c": 40}
    load = {"cpu": 0.25, "memory": [1, 2], "gpus": [gpu], "ports": {"mlx5_0/1": [10, 20]}}
    assert node_numbers({"n1": load}) == {
        "system/n1/cpu": 0.25, "system/n1/memory": 0.5, "system/n1/gpu0/util": 0.5, "system/n1/gpu0/memory": 0.25,
        "system/n1/gpu0/temp_c": 40.0, "system/n1/mlx5_0/1/received": 10.0, "system/n1/mlx5_0/1/sent": 20.0,
    }  # fmt: skip
