"""The command `raydist queue`: the runs of a cluster in the queue, and what a person wants of them.
(driver)

`python -m raydist.tools.queue` is the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from raydist.cluster import connect
from raydist.cluster.queue import order, store
from raydist.cluster.queue.entry import CANCEL, MOVE, PAUSE, RESUME, Entry, Instruction
from raydist.cluster.queue.first_entry import owner
from raydist.cluster.queue.turn import seen_cluster, time_of_day, why_waiting
from raydist.cluster.shortage import describe_request
from raydist.reporting.progress import duration
from raydist.reporting.wording import table
from raydist.settings.config import Job
from raydist.settings.priority import priority_of
from raydist.shared.errors import ConfigError, LaunchError, last_line, nearest
from raydist.shared.rank_names import counted
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.plan import connected

USAGE = """Lists the runs in the queue of a Ray cluster, or changes what becomes of one:

  raydist queue pause RUN      give its room back after a step, and wait until it is resumed
  raydist queue resume RUN     wait in the queue again, with the time of its first entry
  raydist queue cancel RUN     leave the queue; its last state is on the disk if it has run
  raydist queue move RUN high  give it another priority: high, normal, low, or a whole number"""
TAKEN_S = 15.0
"""Seconds within which a driver takes an instruction; it looks every second."""
ACTIONS = (PAUSE, RESUME, CANCEL, MOVE)


@dataclass(frozen=True)
class Wish:
    """What a person wants of a run, as typed."""

    act: str
    run: str
    """Its name or folder."""
    priority: int = 0


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
    """Why it waits, for whom it makes way, or until when it has its room."""
    stop_cost: int | None
    """Rank-seconds that it loses if it makes way now; None while it holds no room."""
    folder: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong word or run, or if no Ray runs here."""

    def act() -> int:
        parser = ToolParser("queue", USAGE)
        parser.positional("ACTION RUN", "pause, resume, cancel or move; the run's name or folder")
        parser.add_argument("--json", action="store_true", help="print it as JSON, one line a run")
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        wish = read_wish(arguments.overrides) if arguments.overrides else None
        if connect.running_address() is None:
            raise ConfigError("raydist queue: no Ray runs on this machine; set RAY_ADDRESS")
        with connected(Job()):
            from ray.exceptions import RpcError

            try:
                lines = _lines(wish, arguments.json)
            except RpcError as error:
                text = f"the cluster's GCS does not answer ({last_line(error)}); try again"
                raise LaunchError(f"raydist queue: {text}") from error
        print("\n".join(lines), flush=True)
        return 0

    return run_tool(act)


def _lines(wish: Wish | None, as_json: bool) -> list[str]:
    """Do what a person wants, or read the queue; return what to print."""
    if wish is not None:
        return [follow_wish(wish)]
    rows = read_rows()
    if as_json:
        return [json.dumps(asdict(row)) for row in rows]
    return queue_table(rows) if rows else ["no run is in the queue"]


def read_wish(words: Sequence[str]) -> Wish:
    """Return what a person wants. ConfigError: the words are not one action and what it needs."""
    act, *rest = words
    if act not in ACTIONS:
        guess = nearest(act, ACTIONS)
        cause = "there is no such action"
        raise ConfigError.of("raydist queue", act, cause, guess=guess, known=ACTIONS)
    wanted = ("RUN", "PRIORITY") if act == MOVE else ("RUN",)
    if len(rest) != len(wanted):
        cause = f"it takes {' and '.join(wanted)}"
        example = f"raydist queue {act} gpt" + (" high" if act == MOVE else "")
        raise ConfigError.of(f"raydist queue {act}", " ".join(rest), cause, example)
    return Wish(act, rest[0], priority_of(rest[1], "PRIORITY", "high") if act == MOVE else 0)


def follow_wish(wish: Wish) -> str:
    """Have the run that is meant do it; return what happens, for a person.

    ConfigError: no run or several are meant, or that one can't do it. LaunchError: its driver does
    not answer.
    """
    entry = find_entry(store.read_all().entries, wish.run)
    name = f"raydist queue {wish.act}"
    if wish.act == RESUME and not entry.paused_by:
        raise ConfigError.of(name, wish.run, "it is not paused", "raydist queue")
    if wish.act in (PAUSE, CANCEL):
        check_stoppable(entry, wish)
    store.instruct(entry.id, Instruction(wish.act, owner(), wish.priority))
    until = time.monotonic() + TAKEN_S
    while store.instruction_for(entry.id) is not None:
        if time.monotonic() > until:
            store.forget_instruction(entry.id)
            raise LaunchError(f"{name}: the driver of {entry.name} ({entry.owner}) does not answer")
        time.sleep(0.1)
    if wish.act == MOVE:
        return f"{entry.name} has the priority {wish.priority} now"
    if wish.act == RESUME:
        return f"{entry.name} waits in the queue again"
    # It may have got its room just before its driver took the instruction.
    entry = next((each for each in store.read_all().entries if each.id == entry.id), entry)
    check_stoppable(entry, wish)
    if entry.has_room:
        return f"{entry.name} stops after a step, and keeps its state"
    return f"{entry.name} is {'paused' if wish.act == PAUSE else 'cancelled'}"


def check_stoppable(entry: Entry, wish: Wish) -> None:
    """Raise ConfigError if the run has its room and cannot be stopped after a step."""
    if entry.has_room and not entry.yields:
        cause = "raydist can't stop it after a step (queue.killable)"
        raise ConfigError.of(
            f"raydist queue {wish.act}", wish.run, cause, f"raydist stop {entry.folder}"
        )


def find_entry(entries: Sequence[Entry], run: str) -> Entry:
    """Return the entry of the run with this name or folder. ConfigError: not exactly one has it."""
    folder = os.path.abspath(run)
    meant = [each for each in entries if run == each.name or folder == each.folder]
    if len(meant) == 1:
        return meant[0]
    if not meant:
        names = sorted({each.name for each in entries})
        guess = nearest(run, names)
        raise ConfigError.of("RUN", run, "it is not in the queue", guess=guess, known=names)
    cause = f"{len(meant)} runs have this name"
    raise ConfigError.of("RUN", run, cause, known=[each.folder for each in meant])


def read_rows() -> list[QueueRow]:
    """Return a row for each run: those with room first, then the line."""
    found, now = store.read_all(), time.time()
    verdicts = order.order_runs(found.entries, seen_cluster(), found.requests, now)

    def row(entry: Entry) -> QueueRow:
        reason = why_waiting(verdicts[entry.id]) if entry.in_line else ""
        if entry.id in found.requests:
            request = found.requests[entry.id]
            part = f"gives up {counted(len(request.nodes), 'node')} " if request.nodes else ""
            reason = f"{part}for {request.for_whom}"
        elif entry.has_room and entry.limit_s:
            reason = f"its limit ends at {time_of_day(entry.ends)}"
        elif entry.paused_by:
            reason = f"by {entry.paused_by}"
        # An elastic run has taken more nodes than it asked for at first.
        size = replace(entry.demand, bundles=sum(entry.held.values()) or entry.demand.bundles)
        return QueueRow(
            run=entry.name,
            owner=entry.owner,
            priority=entry.priority,
            size=describe_request(size.as_request()),
            state="paused" if entry.paused_by and not entry.has_room else entry.state,
            s=max(0.0, now - (entry.placed if entry.has_room else entry.since)),
            reason=reason,
            stop_cost=entry.stop.rank_seconds(now) if entry.has_room else None,
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
