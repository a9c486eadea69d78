"""The steps after a restart or a resume, compared with those that were recorded before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from raydist.reporting import resume_check
from raydist.reporting.resume_check import Made, Place, ResumeCheck, difference
from raydist.shared import kinds
from raydist.shared.kinds import Event
from tests.records import event

TWO, FOUR, GPUS = Place(2), Place(4), Place(2, True)


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        (Made(0.5, "a", TWO), Made(0.5, "a", TWO), ""),
        (Made(0.5, "a", TWO), Made(math.nextafter(0.5, 1), "a", TWO), "loss"),
        (Made(0.5, "a", TWO), Made(0.5, "b", TWO), "samples"),
        (Made(0.5, "a", TWO), Made(0.6, "b", TWO), "samples"),
        (Made(0.5, None, TWO), Made(0.5, "b", TWO), ""),
        (Made(0.5, "a", TWO), Made(0.6, None, TWO), "loss"),
        (Made(math.nan, "a", TWO), Made(math.nan, "a", TWO), ""),
        (Made(math.nan, "a", TWO), Made(0.5, "a", TWO), "loss"),
        (Made(math.inf, "a", TWO), Made(math.inf, "a", FOUR), ""),
        (Made(0.5, "a", TWO), Made(0.50001, "a", FOUR), ""),
        (Made(0.5, "a", TWO), Made(0.50001, "a", GPUS), ""),
        (Made(0.5, "a", TWO), Made(0.502, "a", FOUR), "loss"),
        (Made(0.5, "a", TWO), Made(0.5, "b", FOUR), "samples"),
    ],
)
def test_what_differs(before: Made, now: Made, what: str) -> None:
    assert difference(before, now) == what


def run(t: float = 0.0, ranks: int = 2) -> list[Event]:
    return [event("run", t=t, name="x", dir="x"), event("plan", world_size=ranks, backend="gloo")]


def begin(resumed: int = 0, checkpoint: str = "", steps: int = 100) -> Event:
    return event("begin", rank=0, resumed=resumed, checkpoint=checkpoint, steps=steps)


def steps(first: int, last: int, other: Sequence[int] = (), **fields: Any) -> list[Event]:
    """Return the reports of these steps; the loss of those in `other` is not the usual one."""
    return [
        event(
            "report",
            **{"rank": 0, "samples_hash": f"hash {step}", **fields},
            step=step,
            values={"loss": 1 / step + (step in other), "samples": 8 * step},
        )
        for step in range(first, last + 1)
    ]


RESTART = event("restart", number=1, text="killed")


def checked(
    events: Iterable[Event], earlier: Sequence[Event] = ()
) -> list[tuple[int, int, int | None, str | None]]:
    """Return (resumed, steps, differs, what) of each comparison."""
    check = ResumeCheck(lambda checkpoint: earlier)
    found = [made for each in events if (made := check.add(each))]
    return [(each.resumed, each.steps, each.differs, each.what) for each in found]


SAVED = "runs/x/checkpoints/step-00000004"
FIRST = [*run(), begin(), *steps(1, 6), event("saved", rank=0, step=4, path=SAVED)]
OTHER_ORDER = steps(6, 6, samples_hash="another")


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([*FIRST, event("done", rank=0)], []),
        ([*FIRST, RESTART, begin(4), *steps(5, 8)], [(4, 2, None, None)]),
        ([*FIRST, RESTART, begin(4), *steps(5, 8, other=[5, 6])], [(4, 1, 5, "loss")]),
        ([*FIRST, RESTART, begin(4), *steps(5, 5), *OTHER_ORDER], [(4, 2, 6, "samples")]),
        ([*FIRST, RESTART, begin(6), *steps(7, 8)], [(6, 0, None, None)]),
        ([*FIRST, RESTART, begin(0), *steps(1, 7)], [(0, 6, None, None)]),
        # it ends before it has repeated all, or any
        ([*FIRST, RESTART, begin(4), *steps(5, 5), event("stop")], [(4, 1, None, None)]),
        ([*FIRST, RESTART, begin(4), event("stop"), event("result")], []),
        # after a second failure the rest is compared
        (
            [*FIRST, RESTART, begin(4), *steps(5, 5), RESTART, begin(5), *steps(6, 8)],
            [(4, 1, None, None), (5, 1, None, None)],
        ),
        # … but not with the steps before a difference
        (
            [
                *[*FIRST, RESTART, begin(4), *steps(5, 5, other=[5])],
                *[RESTART, begin(4), *steps(5, 8, other=[5])],
            ],
            [(4, 1, 5, "loss"), (4, 1, None, None)],
        ),
        # an evaluation reports a step as well; reports of other ranks do not count
        (
            [
                *[*FIRST, RESTART, begin(4)],
                event("report", rank=0, step=5, values={"loss": 9.0}),
                *[*steps(5, 5, rank=1, other=[5]), *steps(5, 6)],
            ],
            [(4, 2, None, None)],
        ),
        # the second fit of a job counts its own steps; the first has finished
        (
            [
                *[*run(), begin(steps=6), *steps(1, 6), event("done", rank=0)],
                *[begin(), *steps(1, 4)],
                *[RESTART, begin(6, steps=6), event("done", rank=0), begin(2), *steps(3, 9)],
            ],
            [(2, 2, None, None)],
        ),
        # a new start in the same folder has nothing to do with the first one
        ([*FIRST, *run(9), begin(), *steps(1, 6, other=[2])], []),
    ],
)
def test_repeated_steps_are_compared(
    events: list[Event], found: list[tuple[int, int, int | None, str | None]]
) -> None:
    assert checked(events) == found


def test_a_resumed_run_is_compared_with_the_one_that_saved_the_checkpoint() -> None:
    here = [*run(5), begin(4, SAVED), *steps(5, 8)]
    assert checked(here, FIRST) == [(4, 2, None, None)]
    assert checked(here, [*FIRST, *here]) == [(4, 2, None, None)]  # in the same folder
    assert checked(here, []) == [(4, 0, None, None)]
    assert checked([*run(5), begin(4, SAVED), *steps(5, 8, [6])], FIRST) == [(4, 2, 6, "loss")]
    # another training in that folder, whose steps are not those of the checkpoint
    later = [*run(2), begin(), *steps(1, 6, [5]), event("saved", rank=0, step=6, path="x/step-6")]
    assert checked(here, [*FIRST, *later]) == [(4, 2, None, None)]
    # a restart of the resumed run is compared with its own steps
    again = [*here, RESTART, begin(6, SAVED), *steps(7, 8)]
    assert checked(again, FIRST) == [(4, 2, None, None), (6, 2, None, None)]


def test_memory_and_work_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_check, "RECORDED", 10)
    monkeypatch.setattr(resume_check, "COMPARED", 3)
    long = [*run(), begin(), *steps(1, 50), RESTART, begin(20), *steps(21, 60)]
    # steps 41 to 50 are still known, and the first three of them are compared
    assert checked(long) == [(20, 3, None, None)]


def test_the_first_step_that_differs_is_named_once() -> None:
    check = ResumeCheck()
    events = [*FIRST, RESTART, begin(4), *steps(5, 6, other=[5, 6])]
    found = [made for each in events if (made := check.add(each))]
    assert [type(each) for each in found] == [kinds.Checked]
