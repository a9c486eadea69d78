"""What agents know about ranks -> the rows and lines of `raydist ranks`."""

from __future__ import annotations

import pytest

from raydist.messages.agent import RankStatus
from raydist.watch.operate.wording import milliseconds, rank_table, silent_row, status_row

FORWARD = RankStatus(77, "S", (12, "forward", 1.0), 0.5, (8, 0.02, 0.05))


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (FORWARD, ["3", "node-1", "77", "12", "20 ms", "30 ms", "forward"]),
        (
            RankStatus(77, "R", (0, "", 0.0), 0.0, (40, 0.0, 0.0)),
            ["3", "node-1", "77", "40", "-", "-", "runs"],
        ),
        (
            RankStatus(77, "S", (12, "data", 1.0), 61.2, (0, 0.0, 0.0)),
            ["3", "node-1", "77", "12", "-", "-", "data, silent for 61 s"],
        ),
        (
            RankStatus(77, "D", (1, "save", 1.0), 1.0, (0, 0.0, 0.0)),
            ["3", "node-1", "77", "1", "-", "-", "waits for a disk or a device"],
        ),
        (None, ["3", "node-1", "-", "-", "-", "-", "ended"]),
    ],
)
def test_a_row(status: RankStatus | None, shown: list[str]) -> None:
    _, line = rank_table([status_row(3, "node-1", status)])
    assert line.split() == " ".join(shown).split()


def test_a_rank_whose_agent_is_gone() -> None:
    row = silent_row(1, "node-2")
    assert (row["pid"], row["state"]) == (0, "its agent does not answer")


def test_times_of_a_step() -> None:
    assert [milliseconds(each) for each in (0.00123, 0.5, 2.5)] == ["1.23 ms", "500 ms", "2.5 s"]
