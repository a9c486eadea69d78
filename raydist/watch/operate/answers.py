"""A request of a command -> what the agents and ranks are asked, and the reply. (driver)"""

from __future__ import annotations

import linecache
import re
import signal
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path

from raydist.launch.changes import Changes
from raydist.launch.limits import longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import Examine, GetNativeStack, GetStatus
from raydist.messages.operate import (
    ChangeSettings,
    Debug,
    Execute,
    GetStacks,
    ListRanks,
    MakeProfile,
    RankLine,
    RankTable,
    SaveNow,
    StopRun,
    TextReply,
)
from raydist.messages.request import AnyReply, Request
from raydist.messages.wire import Message
from raydist.settings.changeable import Values, described, read_changes
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, LaunchError, Stopped
from raydist.shared.events import Events
from raydist.shared.rank_names import name_ranks
from raydist.shared.signals import Stopper
from raydist.watch.operate import agreement, folding
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.debugging import debug
from raydist.watch.operate.execution import run_for_ranks
from raydist.watch.operate.profiling import make_profile
from raydist.watch.operate.records import follow_events, record, write_answer
from raydist.watch.operate.wording import silent_row, status_row

STACKS_S = 5.0
"""Limit on the wait for stacks; a busy rank that holds the GIL answers last."""
NATIVE_S = 30.0
"""Limit on the wait for py-spy, which reads the symbols of every library of the ranks."""
SAVED_S = 600.0
"""Limit on the wait for a checkpoint to be complete."""
NOT_WRITTEN = re.compile(r"\bcheckpoint (of step \d+ )?(could not be|was not) written:")
"""In the warnings of a node's writer, and of rank 0."""
STATUS_S = 5.0
"""Limit on the wait for agents to say what they know; an agent that does not is named."""


@dataclass(frozen=True)
class OperatedRun:
    """The run that is operated, while its agents are open."""

    folder: Path
    group: WorkerGroup
    events: Events
    node: str
    """Ray's id of the driver's node; empty without Ray."""
    stopper: Stopper | None
    """None: only the program that started the run can stop it."""
    changes: Changes
    """The settings that were changed so far."""
    buttons: bool
    """Whether pages may have buttons for it."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set once no rank runs: what the ranks did is in the file of events."""


def answer(run: OperatedRun, request: Message, connection: CommandLink) -> None:
    """Carry out a request.

    OSError: the command has gone. ConfigError: it was typed wrongly.
    """
    match request:
        case ListRanks():
            connection.send(RankTable(rank_rows(run)))
        case GetStacks(ranks, native):
            connection.send(answer_stacks(run, ranks, native))
        case Execute(ranks):
            chosen = chosen_ranks(run, ranks)
            run_for_ranks(run.group, run.events, chosen, request, connection)
        case Debug(rank):
            chosen_ranks(run, [rank])
            debug(run.group, run.events, request, connection)
        case MakeProfile(ranks):
            chosen_ranks(run, ranks)
            make_profile(run.group, run.events, request, connection, run.ended)
        case SaveNow():
            save(run, connection)
        case ChangeSettings(words):
            change_settings(run, read_changes(words), connection)
        case StopRun(now):
            stop(run, connection, now)
        case _:
            # A newer raydist, whose message this one happens to know for another purpose.
            raise ConfigError(f"the run's raydist does not know {type(request).__name__}")


def rank_rows(run: OperatedRun) -> list[RankLine]:
    """Return what is known about each rank now."""
    slots = run.group.plan.slots
    found = ask_ranks(run, GetStatus(), range(len(slots)), STATUS_S)
    return [
        status_row(slot.rank, slot.node.host, found[slot.rank])
        if slot.rank in found
        else silent_row(slot.rank, slot.node.host)
        for slot in slots
    ]


def answer_stacks(run: OperatedRun, named: Sequence[int], native: bool) -> TextReply:
    """Return what these ranks are doing; the file has the stacks of all their threads."""
    slots, ranks = run.group.plan.slots, chosen_ranks(run, named)
    found = ask_ranks(run, Examine(quick=True), ranks, STACKS_S)
    # Afterwards: py-spy would keep the ranks' CPUs busy.
    by_py_spy = ask_ranks(run, GetNativeStack(), found, NATIVE_S) if native else {}
    seen = [
        folding.seen_of(rank, slots[rank].node.host, each, by_py_spy.get(rank))
        for rank, each in found.items()
        if each is not None
    ]
    ended = [rank for rank, each in found.items() if each is None]
    silent = [rank for rank in ranks if rank not in found]
    groups = folding.fold(seen)
    headline = folding.one_line(groups, source_line)
    lines = [*folding.describe(groups, source_line)]
    lines += [f"{name_ranks(ended)}: ended"] if ended else []
    lines += [f"{name_ranks(silent)}: its agent does not answer"] if silent else []
    whole = [f"rank {each.state.rank}:\n{each.state.stack}" for each in seen]
    file = write_answer(run.folder, run.events, "stacks", [*lines, "", *whole])
    record(run.events, "stacks", headline or lines[-1], named, file)
    return TextReply(lines, file)


def save(run: OperatedRun, connection: CommandLink) -> None:
    """Have all ranks save a checkpoint after their current step, and tell when it is complete.

    LaunchError: the checkpoint did not become complete.
    """
    size = run.events.path.stat().st_size
    step = agreement.agree_on_step(run.group, "save", {}, range(run.group.plan.world_size))
    connection.send(TextReply([f"the ranks save after step {step}"]))
    saved = wait_for_saved(run, step, size)
    text = f"step {saved.step}: {saved.path} ({saved.s:.2f} s)"
    record(run.events, "save", text)
    connection.send(TextReply([f"saved {text}"]))


def wait_for_saved(run: OperatedRun, step: int, after: int) -> kinds.Saved:
    """Return the event of the checkpoint of this step or a later one.

    `after`: the size of the file of events before. LaunchError: a warning says that it was not
    written, or it was not within SAVED_S.
    """
    for event in follow_events(run.events.path, after, SAVED_S, run.ended):
        if isinstance(event, kinds.Saved) and event.step >= step:
            return event
        if isinstance(event, kinds.Warning) and NOT_WRITTEN.search(event.text):
            raise LaunchError(event.text)
    if run.ended.is_set():
        raise LaunchError(f"the run has ended without a checkpoint of step {step}")
    raise LaunchError(f"no checkpoint of step {step} became complete within {SAVED_S:g} s")


def change_settings(run: OperatedRun, values: Values, connection: CommandLink) -> None:
    """Have all ranks change these settings after their current step.

    ConfigError: the program is not in raydist.fit. LaunchError: it has ended before that step.
    """
    size, attempt = run.events.path.stat().st_size, run.changes.attempt
    step = agreement.agree_on_step(
        run.group,
        "set",
        values,
        range(run.group.plan.world_size),
        lambda last: run.changes.noted(attempt, last.fit, last.step, values),
    )
    connection.send(TextReply([f"the ranks change it after step {step}"]))
    changed = wait_for_change(run, step, values, size)
    text = f"{described(changed.before, changed.after)} after step {step}"
    record(run.events, "set", text)
    connection.send(TextReply([text]))


def wait_for_change(run: OperatedRun, step: int, values: Values, after: int) -> kinds.Changed:
    """Return the event of these values after this step.

    `after`: as of `wait_for_saved`. LaunchError: the training ended before.
    """
    for event in follow_events(run.events.path, after, ended=run.ended):
        if isinstance(event, kinds.Changed) and (event.step, event.after) == (step, values):
            return event
        # Rank 0 reports the change; other ranks' events may come before its own.
        if isinstance(event, kinds.Done) and event.rank == 0:
            break
    raise LaunchError(f"the training ended before step {step + 1}: nothing has changed")


def stop(run: OperatedRun, connection: CommandLink, now: bool) -> None:
    """Stop the run as Ctrl-C does, and wait for its end; `now`: as a second Ctrl-C does.

    ConfigError: only the program that started it can, or its driver has other runs.
    """
    if run.stopper is None:
        raise ConfigError("raydist stop: a thread of another program has started this run: end it")
    if now and not run.stopper.ends_at_once:
        raise ConfigError("raydist stop --now would end the driver's other runs: omit --now")
    record(run.events, "stop", "at once" if now else "as Ctrl-C does")
    connection.send(TextReply([f"stopping {run.folder}"]))
    run.stopper.stop(Stopped(signal.SIGTERM))
    if now:
        run.stopper.stop(Stopped(signal.SIGINT))
    # The command takes the end of the connection for that of the run, which may write for minutes.
    run.ended.wait()


def source_line(file: str, line: int) -> str:
    """Return a line of a program's file, if this machine has the file."""
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()


def ask_ranks(
    run: OperatedRun, request: Request[AnyReply], ranks: Iterable[int], within_s: float
) -> dict[int, AnyReply]:
    """Return the replies of the agents of these ranks that reply within so many seconds."""
    calls = {rank: run.group.call(rank, request) for rank in ranks}
    wait(calls.values(), timeout=longest(within_s, len(calls)))
    return {
        rank: call.result()
        for rank, call in calls.items()
        if call.done() and not call.cancelled() and call.exception() is None
    }


def chosen_ranks(run: OperatedRun, ranks: Collection[int]) -> list[int]:
    """Return these ranks, or all if none are named. ConfigError: the run has no such rank."""
    world = run.group.plan.world_size
    for rank in ranks:
        if not 0 <= rank < world:
            why = f"the run has {world} ranks, 0 to {world - 1}"
            raise ConfigError.of("rank", rank, why, f"rank={world - 1}")
    return sorted(set(ranks)) or list(range(world))
