"""Writes a run's last state to the disk: a whole one by any node, a sharded one by all. (driver)"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from raydist.launch.limits import ANSWER_S, longest
from raydist.messages.agent import Flush
from raydist.messages.request import AnyReply, Request
from raydist.messages.server import ListSteps
from raydist.messages.writer import (
    CommitShards,
    DropShards,
    HeldShards,
    ListShards,
    ReadRandomStates,
    SavedShards,
    UnseenShards,
    WriteShards,
)
from raydist.settings.config import Checkpoint
from raydist.shared import kinds
from raydist.shared.errors import cause_of, last_line
from raydist.shared.kinds import Event
from raydist.state.shard_choice import Shard, WholeShards, newest_whole

FLUSH_S = 600.0
"""Limit on the wait for a state to be written; a second signal ends it sooner."""
Emit = Callable[[Event], None]
NodeFiles = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""By node, the files that it has written, as in WrittenShards."""


class Ask(Protocol):
    """Sends a request to an agent, like Transport."""

    def __call__(self, request: Request[AnyReply]) -> Future[AnyReply]: ...


@dataclass(frozen=True)
class FlushNode:
    """A node that may have a state, or shards of one."""

    host: str
    ask: Ask
    """Sends to the node's first agent."""
    ranks: int = 1
    """The number of its ranks."""


@dataclass(frozen=True)
class Description:
    """What a checkpoint contains besides its shards, and which other checkpoints are kept."""

    keep: int
    best: str | None
    """As in config.Checkpoint."""
    folder: str = ""
    """As in WriteShards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)
    """As in state.write.Meta."""


def flush(nodes: Sequence[FlushNode], settings: Checkpoint, emit: Emit, world_size: int) -> str:
    """Have the newest state written to the disk, if it is not there yet.

    Returns why no node that has it could write it, or an empty text. `nodes`: those that answer, in
    the order of their ranks. `world_size`: the number of ranks on all nodes.
    """
    request, newest = choose_last(nodes, world_size)
    failed: dict[int, str] = {}
    written = False
    for number, node in enumerate(nodes):
        try:
            flushed = node.ask(request).result(FLUSH_S)
            for each in flushed.events:
                # It has just happened, and the node's clock may be wrong.
                emit(kinds.from_json({**each, "t": time.time()}))
            if written := flushed.had_state:
                break  # a node that has replaced another one may have none yet
        except Exception as error:  # that node is gone: another one has the same state
            failed[number] = f"{node.host}: {type(cause_of(error)).__name__}: {last_line(error)}"
    if len(failed) == len(nodes):
        why = "; ".join([*failed.values()][:4]) or "no agent answers"
        return f"no node could write the last state to the disk ({why})"
    flush_shards(nodes, settings, emit)
    if not written and (lost := failed.keys() & newest.keys()):
        why = "; ".join(failed[number] for number in sorted(lost)[:4])
        step = max(newest[number] for number in lost)
        return f"the state of step {step} may be lost: no node that had it could write it ({why})"
    return ""


def choose_last(nodes: Sequence[FlushNode], world_size: int) -> tuple[Flush, dict[int, int]]:
    """Return the request to write the newest step that all ranks have, with their generators.

    Beside it, the newest step of each node that has a whole state, as far as nodes were asked.

    Any node can write the state of a step, but each has the random generators of its own ranks
    only; and ranks that are stopped at the same moment may be one kept step apart. So several nodes
    all send their steps, some 60 bytes each; then the generators of the chosen step: 10 KB per
    rank (Python 2.5 KB, numpy 2.5 KB, torch 5 KB), 13.5 KB in base64. 1,024 nodes of 8 ranks send
    110 MB in all; 82 MB of it are in the checkpoint, as in each that the ranks save.

    If some ranks have no step in common with the others, or their node is lost or does not answer,
    the node that writes chooses the step, and warns of what it lacks.
    """
    if len(nodes) < 2 or sum(node.ranks for node in nodes) < world_size:
        return Flush(), {}  # all is in the memory of one node, or some of it is lost
    within_s = longest(ANSWER_S, len(nodes))  # nodes that are known to be silent are not asked
    until = time.monotonic() + within_s
    requests = {number: ListSteps(node.ranks) for number, node in enumerate(nodes)}
    held = _ask(nodes, requests, _ignore, within_s)
    step = newest_common_step([held[each].steps if each in held else None for each in requests])
    newest = {number: max(each.steps) for number, each in held.items() if each.steps}
    if step < 0:
        return Flush(), newest
    request = ReadRandomStates(step, world_size)
    left_s = max(0.0, until - time.monotonic())
    drawn = _ask(nodes, dict.fromkeys(requests, request), _ignore, left_s)
    states = [state for each in drawn.values() if each is not None for state in each.states]
    return (Flush(step, states) if len(states) == world_size else Flush()), newest


def newest_common_step(held: Sequence[Collection[int] | None]) -> int:
    """Return the newest step that all nodes hold; -1: there is none. None: one does not answer."""
    return max(set.intersection(*(set(each or ()) for each in held)), default=-1)


def flush_shards(nodes: Sequence[FlushNode], settings: Checkpoint, emit: Emit) -> None:
    """Have each node write the shards that it has of a sharded state, if not yet on disk."""
    held = _ask(nodes, dict.fromkeys(range(len(nodes)), ListShards()), emit)
    chosen = choose_shards({number: each for number, each in held.items() if each is not None})
    if isinstance(chosen, WholeShards):
        have_shards_written(nodes, chosen, Description(settings.keep, settings.best), emit)
    elif chosen:
        emit(kinds.Warning(text=chosen))


def choose_shards(held: Mapping[int, HeldShards]) -> WholeShards | str:
    """Return the newest step for which the shards of all ranks exist; or a warning.

    Each shard is taken from its own node if possible. The warning is empty if that step, or a later
    one, is on the disk. `held`: by node.
    """
    own = {number: _as_shards(each.own) for number, each in held.items()}
    copies = {number: _as_shards(each.copies) for number, each in held.items()}
    chosen = newest_whole(own, copies)
    if chosen is None:
        kept = any((*own.values(), *copies.values()))
        return (
            "the sharded state is not on the disk: no step has the shards of all ranks in memory"
            if kept
            else ""
        )
    return chosen if chosen.step > max(each.saved for each in held.values()) else ""


def _as_shards(plain: Sequence[Shard]) -> set[Shard]:
    """Return the shards as tuples: JSON has made lists of them."""
    return {(rank, world_size, step) for rank, world_size, step in plain}


def have_shards_written(
    nodes: Sequence[FlushNode],
    shards: WholeShards,
    described: Description,
    emit: Emit,
    within_s: float | None = FLUSH_S,
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Have each node write its shards, and one node commit the checkpoint; or all drop their files.

    `within_s`: limit on the wait for each of these; None: until it is done, or the node is gone.
    `wanted`: returns whether the ranks still wait for it.
    """
    step = shards.step
    mark = uuid.uuid4().hex[:8]
    folder = described.folder
    began = time.perf_counter()
    path = ""
    try:
        requests = {
            number: WriteShards(step, mark, shards.world_size, ranks, folder)
            for number, ranks in shards.ranks.items()
        }
        written = _ask(nodes, requests, emit, within_s)
        files = {number: each.files for number, each in written.items() if each is not None}
        if (missing := requests.keys() - files.keys()) and folder and wanted():
            hosts = ", ".join(sorted(nodes[number].host for number in missing))
            text = (
                f"the checkpoint of step {step} is not complete, and is dropped: no shards "
                f"from {hosts}"
            )
            emit(kinds.Warning(text=text))
        if not missing and wanted():
            first = min(files)
            every = {name: facts for each in files.values() for name, facts in each.items()}
            request = CommitShards(step, mark, shards.world_size, every, **vars(described))
            match _ask(nodes, {first: request}, emit, within_s).get(first):
                case SavedShards(saved, trouble):
                    path = saved
                    if trouble:
                        emit(kinds.Warning(text=trouble))
                case UnseenShards() as unseen:
                    emit(kinds.Warning(text=unseen_text(nodes, step, files, first, unseen)))
    finally:
        if not path and wanted():
            _ask(nodes, dict.fromkeys(shards.ranks, DropShards(step, mark, folder)), emit, within_s)
    if path:
        emit(kinds.Saved(rank=0, step=step, path=path, s=time.perf_counter() - began))


def unseen_text(
    nodes: Sequence[FlushNode], step: int, files: NodeFiles, first: int, unseen: UnseenShards
) -> str:
    """Describe files that other nodes have written and that the node `first` does not see."""
    missing = {*unseen.files}
    hosts = ", ".join(
        dict.fromkeys(nodes[number].host for number, own in files.items() if own.keys() & missing)
    )
    return (
        f"the sharded state of step {step} is not on the disk: {nodes[first].host} does not see "
        f"what {hosts} wrote to {unseen.folder}; set storage=FOLDER, one that all nodes see, or "
        "storage=s3://BUCKET/FOLDER"
    )


def _ask(
    nodes: Sequence[FlushNode],
    requests: Mapping[int, Request[AnyReply]],
    emit: Emit,
    within_s: float | None = FLUSH_S,
) -> dict[int, AnyReply]:
    """Send each of these nodes its request, all at once; return the replies by node.

    A node that is gone has none. The replies are in the order of the nodes.
    """
    calls = {number: nodes[number].ask(request) for number, request in requests.items()}
    wait(calls.values(), timeout=within_s)
    replies = {}
    for number, call in calls.items():
        error = call.exception() if call.done() else None
        if call.done() and error is None:
            replies[number] = call.result()
        elif isinstance(error, OSError):  # raised by its writer process
            emit(
                kinds.Warning(
                    text=f"{nodes[number].host}: a checkpoint could not be written: {error}",
                )
            )
    return replies


def _ignore(event: Event) -> None:
    """Report nothing: the node that writes the last state warns of what it lacks."""
