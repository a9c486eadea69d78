"""What agents know about ranks -> rows and lines for a person. (pure)"""

from __future__ import annotations

from collections.abc import Sequence

from raydist.messages.agent import RankStatus
from raydist.messages.operate import RankLine
from raydist.reporting.wording import table

HELD = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "held by a tracer (gdb, strace)",
    "D": "waits for a disk or a device",
    "Z": "ends",
}
"""States of a process in which it does not continue by itself, by the letter of /proc/PID/stat."""
QUIET_S = 10.0
"""Seconds without a heartbeat after which a rank's silence is shown."""


def status_row(rank: int, host: str, status: RankStatus | None) -> RankLine:
    """Return the row of a rank whose agent has answered. `status`: None if it has ended."""
    if status is None:
        return _row(rank, host, "ended")
    step, phase, _ = status.beat
    steps, own_s, step_s = status.work
    state = f"waits in the debugger at {status.held}" if status.held else phase or "runs"
    row = _row(rank, host, HELD.get(status.state, state))
    row["pid"], row["step"], row["quiet_s"] = status.pid, step or steps, status.quiet
    row["own_s"], row["wait_s"] = own_s, max(0.0, step_s - own_s)
    return row


def silent_row(rank: int, host: str) -> RankLine:
    """Return the row of a rank whose agent does not answer."""
    return _row(rank, host, "its agent does not answer")


def _row(rank: int, host: str, state: str) -> RankLine:
    return {
        "rank": rank,
        "host": host,
        "pid": 0,
        "step": 0,
        "own_s": 0.0,
        "wait_s": 0.0,
        "quiet_s": 0.0,
        "state": state,
    }


def rank_table(rows: Sequence[RankLine]) -> list[str]:
    """Return the lines of the table of `raydist ranks`."""
    titles = ("rank", "host", "pid", "step", "own work", "waiting", "state")
    return table([titles, *(_cells(row) for row in rows)])


def _cells(row: RankLine) -> tuple[str, ...]:
    timed = row["own_s"] + row["wait_s"] > 0
    quiet = f", silent for {row['quiet_s']:.0f} s" if row["quiet_s"] >= QUIET_S else ""
    return (
        str(row["rank"]),
        row["host"],
        str(row["pid"] or "-"),
        str(row["step"] or "-"),
        milliseconds(row["own_s"]) if timed else "-",
        milliseconds(row["wait_s"]) if timed else "-",
        row["state"] + quiet,
    )


def milliseconds(seconds: float) -> str:
    """Return a time of a step: `12.3 ms`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
