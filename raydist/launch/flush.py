"""Have the last state of a run written to the disk: a whole one by any node, a sharded one by all. (driver)"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from raydist.settings.config import Checkpoint
from raydist.shared.errors import last_line
from raydist.shared.events import Event, event
from raydist.state.shard_choice import Shard, WholeShards, newest_whole
from raydist.worker import protocol
from raydist.worker.protocol import AnyReply, HeldShards, Request

FLUSH_S = 600.0
"""Longest wait for a state to be written; a second signal ends it sooner."""
Emit = Callable[[Event], None]


class Ask(Protocol):
    """Sends a request to an agent, as protocol.Transport."""

    def __call__(self, request: Request[AnyReply]) -> Future[AnyReply]: ...


@dataclass(frozen=True)
class FlushNode:
    """A node that may have a state, or shards of one."""

    host: str
    ask: Ask
    """Of its first agent."""


def flush(nodes: Sequence[FlushNode], settings: Checkpoint, emit: Emit) -> str:
    """Have the newest state written to the disk, if it is not there yet; why no node could, empty if one has.

    `nodes`: those that answer, that of rank 0 first.
    """
    failed: list[str] = []
    for node in nodes:
        try:
            for each in node.ask(protocol.Flush()).result(FLUSH_S):
                emit(each)
            break
        except Exception as error:  # that node is gone: another one has the same
            failed.append(f"{node.host}: {type(error).__name__}: {last_line(error)}")
    else:
        why = "; ".join(failed[:4]) or "no agent answers"
        return f"no node could write the last state to the disk ({why})"
    flush_shards(nodes, settings, emit)
    return ""


def flush_shards(nodes: Sequence[FlushNode], settings: Checkpoint, emit: Emit) -> None:
    """The same, of a sharded state: each node writes the shards that it has."""
    held = _ask(nodes, dict.fromkeys(range(len(nodes)), protocol.ListShards()), emit)
    chosen = choose_shards({number: each for number, each in held.items() if each is not None})
    if isinstance(chosen, WholeShards):
        _write(nodes, chosen, settings, emit)
    elif chosen:
        emit(event("warning", text=chosen))


def choose_shards(held: Mapping[int, HeldShards]) -> WholeShards | str:
    """The newest step of which the shards of all ranks exist, each from its own node if possible; or a warning.

    Empty: that step, or a later one, is on the disk. `held`: by node.
    """
    own = {number: _as_shards(each.own) for number, each in held.items()}
    copies = {number: _as_shards(each.copies) for number, each in held.items()}
    chosen = newest_whole(own, copies)
    if chosen is None:
        kept = any((*own.values(), *copies.values()))
        return "the sharded state is not on the disk: no step has the shards of all ranks in memory" if kept else ""
    return chosen if chosen.step > max(each.saved for each in held.values()) else ""


def _as_shards(plain: Sequence[Shard]) -> set[Shard]:
    """The shards, which are lists after their way as JSON."""
    return {(rank, world_size, step) for rank, world_size, step in plain}


def _write(nodes: Sequence[FlushNode], chosen: WholeShards, settings: Checkpoint, emit: Emit) -> None:
    """Each node writes its shards; one that sees all files makes a checkpoint of them."""
    step, mark = chosen.step, uuid.uuid4().hex[:8]
    written = _ask(
        nodes,
        {number: protocol.WriteShards(step, mark, chosen.world_size, ranks) for number, ranks in chosen.ranks.items()},
        emit,
    )
    files = {number: each.files for number, each in written.items()}
    if len(files) == len(chosen.ranks) and _commit(nodes, step, mark, files, settings, emit):
        return
    _ask(nodes, dict.fromkeys(chosen.ranks, protocol.DropShards(step, mark)), emit)


def _commit(
    nodes: Sequence[FlushNode],
    step: int,
    mark: str,
    files: Mapping[int, Mapping[str, Mapping[str, Any]]],
    settings: Checkpoint,
    emit: Emit,
) -> bool:
    """Have the first of these nodes make a checkpoint of what they have written; whether it could."""
    first, every = min(files), {name: facts for each in files.values() for name, facts in each.items()}
    request = protocol.CommitShards(step, mark, every, settings.keep, settings.best)
    match _ask(nodes, {first: request}, emit).get(first):
        case protocol.SavedShards(path, s):
            emit(event("saved", rank=0, step=step, path=path, s=s))
            return True
        case protocol.UnseenShards(missing, folder):
            hosts = dict.fromkeys(nodes[number].host for number, own in files.items() if own.keys() & {*missing})
            text = (
                f"the sharded state of step {step} is not on the disk: {nodes[first].host} does not see what "
                f"{', '.join(hosts)} wrote to {folder}; set storage=FOLDER, one that all nodes see, or "
                "storage=s3://BUCKET/FOLDER"
            )
            emit(event("warning", text=text))
    return False


def _ask(nodes: Sequence[FlushNode], requests: Mapping[int, Request[AnyReply]], emit: Emit) -> dict[int, AnyReply]:
    """Send each of these nodes its request, all at once; the replies by node. A node that is gone has none."""
    calls = {number: nodes[number].ask(request) for number, request in requests.items()}
    wait(calls.values(), timeout=FLUSH_S)
    replies = {}
    for number, call in calls.items():
        error = call.exception() if call.done() else None
        if call.done() and error is None:
            replies[number] = call.result()
        elif isinstance(error, OSError):  # of its writer process
            emit(event("warning", text=f"{nodes[number].host}: a checkpoint could not be written: {error}"))
    return replies
