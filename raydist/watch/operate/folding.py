"""What ranks are doing -> lines for a person: equal stacks together, the odd one first. (pure)"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raydist.messages.agent import NativeStack, RankActivity
from raydist.recovery.hang_verdict import LAUNCH, LIBRARY, LOADER, RankState, describe_collective
from raydist.shared.rank_names import name_ranks

WAYS = {
    "thread": "written by a thread of the rank",
    "signal": "written by a signal's handler in C: another part of the rank holds the GIL",
    "": "",
}
WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "_fn", "_wrapped_call_impl"})
"""Functions of libraries that only call another one."""
SourceLine = Callable[[str, int], str]
"""Returns a line of a file; empty if it can't be read."""


@dataclass(frozen=True)
class Seen:
    """What was seen of one rank."""

    state: RankState
    way: str = ""
    """As messages.agent.StackWay."""
    native: NativeStack | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What ranks at the same place have in common."""
        frames = tuple(frame.group() for frame in self.state.frames)
        held = self.state.state if self.state.state in "TtD" else ""
        native = self.native.error or native_frames(self.native.text) if self.native else ""
        return held, self.way, frames, native


def seen_of(rank: int, host: str, found: RankActivity, native: NativeStack | None) -> Seen:
    """Return what an agent knows about a rank."""
    state = RankState(
        rank,
        host,
        step=found.beat[0],
        phase=found.beat[1],
        pid=found.pid,
        state=found.state,
        busy=found.busy,
        stack=found.stack,
        collectives=found.collectives,
    )
    return Seen(state, found.way, native)


def fold(ranks: Sequence[Seen]) -> list[list[Seen]]:
    """Return the ranks in groups that are at the same place, the smallest group first.

    Of two equally large groups the first is the one that is stopped, then the later ranks: rank 0
    is rarely the odd one.
    """
    groups: dict[tuple[object, ...], list[Seen]] = {}
    for each in ranks:
        groups.setdefault(each.key, []).append(each)
    return sorted(
        groups.values(),
        key=lambda own: (len(own), own[0].state.state != "T", -own[0].state.rank),
    )


def one_line(groups: Sequence[Sequence[Seen]], line_of: SourceLine) -> str:
    """Return all groups on one line: `rank 3: sleep at train.py:31; ranks 0-2: …`."""
    return "; ".join(f"{name_of_group(own)}: {whereabouts(own[0], line_of)}" for own in groups)


def describe(groups: Sequence[Sequence[Seen]], line_of: SourceLine) -> Iterator[str]:
    """Yield the lines about each group: where it is, its last collective, its stack."""
    for own in groups:
        yield f"{name_of_group(own)}: {whereabouts(own[0], line_of)}"
        hosts = {each.state.host: None for each in own}
        yield f"    on {', '.join(hosts)}, pid {', '.join(str(each.state.pid) for each in own)}"
        if way := WAYS[own[0].way]:
            yield f"    stack {way}"
        yield from (f"    {line}" for line in last_collectives(own))
        yield from (f"    {line}" for line in _stack(own[0]))


def whereabouts(seen: Seen, line_of: SourceLine) -> str:
    """Return what a rank is doing, and where in the program: `all_reduce at train.py:81`."""
    state = seen.state
    if state.state == "T":
        return f"stopped by a signal (SIGSTOP); kill -CONT {state.pid} wakes it"
    if state.state == "t":
        return "held by a tracer (gdb, strace)"
    frames = state.frames
    own = next((n for n, frame in enumerate(frames) if not LIBRARY.search(frame["file"])), None)
    if own is None or LAUNCH.search(frames[own]["file"]):
        if frames:
            return f"{frames[0]['name']} at {_place(frames[0])}"
        blocked = "waits for a disk or a device" if state.state == "D" else "no Python stack"
        return f"{blocked}: it is outside of Python"
    if any(LOADER.search(frame["file"]) for frame in frames[:own]):
        return f"waits for its data loader at {_place(frames[own])}"
    called = [frame["name"] for frame in reversed(frames[:own])]
    plain = [name for name in called if name not in WRAPPERS] or called
    words = plain[0] if plain else line_of(frames[own]["file"], _line(frames[own]))
    return f"{words or frames[own]['name']} at {_place(frames[own])}"


def last_collectives(own: Sequence[Seen]) -> Iterator[str]:
    """Yield the last collective of these ranks, with those ranks where they differ."""
    found: dict[str, list[int]] = {}
    for each in own:
        if (text := _last_collective(each.state)) is not None:
            found.setdefault(text, []).append(each.state.rank)
    for text, ranks in found.items():
        yield text if len(ranks) == len(own) else f"{text} ({name_ranks(ranks)})"


def _last_collective(state: RankState) -> str | None:
    if state.waits_in is not None:
        return f"waits in {describe_collective(state.waits_in)}"
    if state.collectives:
        return f"its last collective: {describe_collective(state.collectives[-1])}"
    return None


def _stack(seen: Seen) -> Iterator[str]:
    """Yield the main thread's stack, innermost line last, from the program's first frame on."""
    if seen.native is not None:
        yield from seen.native.text.splitlines() or [f"no frames of C code: {seen.native.error}"]
        if seen.native.text:
            return
    frames = list(reversed(seen.state.frames))
    while frames and LAUNCH.search(frames[0]["file"]):
        del frames[0]
    for frame in frames:
        yield f'File "{frame["file"]}", line {frame["line"]}, in {frame["name"]}'


def native_frames(text: str) -> str:
    """Return py-spy's output without ids and addresses, which differ between equal processes."""
    return re.sub(r"0x[0-9a-f]+|\b\d{3,}\b", "", text.partition("\n\n")[2])


def name_of_group(own: Sequence[Seen]) -> str:
    """Return `rank 3` or `ranks 0-2`."""
    return name_ranks(each.state.rank for each in own)


def _place(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['file'])}:{frame['line']}"


def _line(frame: re.Match[str]) -> int:
    return int(frame["line"])
