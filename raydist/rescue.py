"""The last state of a run gets to the disk: the whole one of any node, or a sharded one, the parts of all. (driver)"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from raydist.config import Checkpoint
from raydist.events import Event, event

FLUSH_S = 600.0
"""Longest wait for a state to get to the disk; a second signal ends it sooner."""
Part = tuple[int, int]
"""Whose: a rank, of so many."""


@dataclass(frozen=True)
class Node:
    """One that may have a state, or a part of one."""

    host: str
    flush: Callable[[dict[str, Any] | None], Future[list[Event]]]
    """Calls node.seat.Seat.flush there."""


@dataclass(frozen=True)
class Held:
    """The parts that one node has, each with its step."""

    own: frozenset[tuple[Part, int]] = frozenset()
    copies: frozenset[tuple[Part, int]] = frozenset()
    """Of ranks of another node."""
    disk: int = -1
    """The step of the newest checkpoint that the node sees."""


@dataclass(frozen=True)
class Choice:
    """Who writes which parts of which step."""

    step: int
    of: Mapping[int, Sequence[Part]]
    """By node, as they were asked."""


def flush(nodes: Sequence[Node], settings: Checkpoint, tell: Callable[[Event], None]) -> None:
    """Have the newest state written to the disk, if it is not there yet. `nodes`: that of rank 0 first."""
    for node in nodes:
        with contextlib.suppress(Exception):  # that node is gone: another one has the same
            for happened in node.flush(None).result(FLUSH_S):
                tell(happened)
            break
    looked = _ask(nodes, {number: {"do": "look"} for number in range(len(nodes))}, "parts", tell)
    if not looked:
        return
    chosen = choose({number: _held(told) for number, told in looked.items()})
    if isinstance(chosen, Choice):
        _write(nodes, chosen, settings, tell)
    elif chosen:
        tell(event("warning", text=chosen))


def choose(held: Mapping[int, Held]) -> Choice | str:
    """The newest step of which all parts are left, each from its own node where that is there; or why there is none.

    Empty: the disk has it, or a newer one.
    """
    steps = {(step, world) for one in held.values() for (_, world), step in one.own | one.copies}
    for step, world in sorted(steps, reverse=True):
        of: dict[int, list[Part]] = {}
        for part in ((rank, world) for rank in range(world)):
            has = [number for number, one in held.items() if (part, step) in one.own]
            has += [number for number, one in held.items() if (part, step) in one.copies]
            if has:
                of.setdefault(has[0], []).append(part)
        if sum(map(len, of.values())) == world:
            return "" if step <= max(one.disk for one in held.values()) else Choice(step, of)
    return (
        "the sharded state is not on the disk: of no step are all parts in the memories that are left" if steps else ""
    )


def _held(told: Event) -> Held:
    own, copies = (frozenset(((rank, world), step) for rank, world, step in told[kind]) for kind in ("own", "copies"))
    return Held(own, copies, told["disk"])


def _write(nodes: Sequence[Node], chosen: Choice, settings: Checkpoint, tell: Callable[[Event], None]) -> None:
    """Each node writes its parts; one that sees them all makes a checkpoint of them."""
    same = {"step": chosen.step, "mark": uuid.uuid4().hex[:8]}
    asks = {number: {**same, "do": "write", "ranks": parts} for number, parts in chosen.of.items()}
    written = _ask(nodes, asks, "written", tell)
    if len(written) == len(asks) and _commit(nodes, same, written, settings, tell):
        return
    _ask(nodes, {number: {**same, "do": "drop"} for number in asks}, "dropped", tell)


def _commit(
    nodes: Sequence[Node],
    same: dict[str, Any],
    written: Mapping[int, Event],
    settings: Checkpoint,
    tell: Callable[[Event], None],
) -> bool:
    """Have the first of these nodes make a checkpoint of what they have written; whether it could."""
    files = {name: told for each in written.values() for name, told in each["files"].items()}
    first = min(written)
    ask = {**same, "do": "commit", "files": files, "keep": settings.keep, "best": settings.best}
    answer = _ask(nodes, {first: ask}, "saved", tell, also="unseen").get(first)
    if answer is not None and answer["kind"] == "unseen":
        lacks = {*answer["files"]}
        hosts = [nodes[number].host for number, each in written.items() if lacks & each["files"].keys()]
        text = (
            f"the sharded state of step {same['step']} is not on the disk: {nodes[first].host} does not see what "
            f"{', '.join(dict.fromkeys(hosts))} wrote to {answer['folder']}; say storage=FOLDER, one that all nodes "
            "see, or storage=s3://BUCKET/FOLDER"
        )
        tell(event("warning", text=text))
    elif answer is not None:
        tell(answer)
    return answer is not None and answer["kind"] == "saved"


def _ask(
    nodes: Sequence[Node],
    asks: Mapping[int, dict[str, Any]],
    kind: str,
    tell: Callable[[Event], None],
    also: str = "",
) -> dict[int, Event]:
    """One question to each of these nodes, all at once; by node the answer of this kind. What else comes is told."""
    calls = {number: nodes[number].flush(ask) for number, ask in asks.items()}
    wait(calls.values(), timeout=FLUSH_S)
    answers = {}
    for number, call in calls.items():
        for happened in [] if not call.done() or call.exception() is not None else call.result():
            if happened["kind"] in (kind, also):
                answers[number] = happened
            else:
                tell(happened)
    return answers
