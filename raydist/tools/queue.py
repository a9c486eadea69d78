"""The command `raydist queue`: the runs of a cluster that have room, and that wait. (driver)

`python -m raydist.tools.queue` is the same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from raydist.cluster import connect
from raydist.cluster.queue import order, store
from raydist.cluster.queue.entry import Entry
from raydist.cluster.queue.turn import seen_cluster
from raydist.cluster.shortage import describe_request
from raydist.reporting.progress import duration
from raydist.reporting.wording import table
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.plan import connected


@dataclass(frozen=True)
class QueueRow:
    """A run as the command shows it."""

    run: str
    owner: str
    priority: int
    size: str
    state: str
    s: float
    """Seconds since it was placed, or since it entered the queue."""
    reason: str
    """Why it waits, or for whom it makes way."""
    folder: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong flag, or if no Ray runs here."""

    def show() -> int:
        parser = ToolParser("queue", "Lists the runs that obey the queue of a Ray cluster.")
        parser.add_argument("--json", action="store_true", help="print it as JSON, one line a run")
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        if arguments.overrides:
            cause = "it takes no settings: it lists all runs with queue=on"
            raise ConfigError.of("raydist queue", arguments.overrides[0], cause, "raydist queue")
        if connect.running_address() is None:
            raise ConfigError("raydist queue: no Ray runs on this machine; set RAY_ADDRESS")
        with connected(Job()):
            rows = read_rows()
        if arguments.json:
            lines = [json.dumps(asdict(row)) for row in rows]
        else:
            lines = queue_table(rows) if rows else ["no run obeys the queue (queue=on)"]
        print("\n".join(lines), flush=True)
        return 0

    return run_tool(show)


def read_rows() -> list[QueueRow]:
    """Return a row for each run: those with room first, then the line."""
    found, now = store.read_all(), time.time()
    verdicts = order.order_runs(found.entries, seen_cluster(Job()), found.asked.keys(), now)

    def row(entry: Entry) -> QueueRow:
        reason = verdicts[entry.id].reason if entry.in_line else ""
        if entry.id in found.asked:
            reason = f"for {found.asked[entry.id]}"
        return QueueRow(
            run=entry.name,
            owner=entry.owner,
            priority=entry.priority,
            size=describe_request(entry.demand.as_request()),
            state=entry.state,
            s=max(0.0, now - (entry.since if entry.in_line else entry.placed)),
            reason=reason,
            folder=entry.folder,
        )

    return [row(entry) for entry in store.as_listed(found.entries)]


def queue_table(rows: Sequence[QueueRow]) -> list[str]:
    """Return the lines of the table."""
    titles = ("run", "owner", "priority", "size", "state", "for", "why")
    return table(
        [
            titles,
            *(
                (
                    row.run,
                    row.owner,
                    str(row.priority),
                    row.size,
                    row.state,
                    duration(row.s),
                    row.reason,
                )
                for row in rows
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
