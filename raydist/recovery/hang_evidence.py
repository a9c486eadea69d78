"""The files about a hang in the folder of the logs, and what further witnesses say. (driver)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from raydist.launch.limits import longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetNativeStack, RankActivity
from raydist.recovery.hang_verdict import Diagnosis, RankState, name

NATIVE_S = 25.0
"""Limit on the wait for py-spy, which reads the symbols of every library of a rank."""
CULPRITS = 4
"""Limit on the culprits whose frames of C code are read."""


class HangEvidence:
    """The evidence of one attempt's hangs; further witnesses are asked once for each diagnosis."""

    def __init__(self, group: WorkerGroup, logs: Path) -> None:
        self._group = group
        self._logs = logs
        self._about = ""
        """The text of the last diagnosis for which they were asked."""
        self._frames: Mapping[int, str] = {}
        self._notes: tuple[str, ...] = ()

    def complete(self, found: Diagnosis, answers: Mapping[int, RankActivity]) -> Diagnosis:
        """Return the diagnosis with what further witnesses say; it may take NATIVE_S."""
        if not found.text:
            return found
        if self._about != found.text:
            self._about = found.text
            self._frames, self._notes = self._native_frames(found, answers)
        states = [
            replace(state, stack=f"{state.stack.rstrip()}\n\nwith C code:\n{frames}")
            if (frames := self._frames.get(state.rank))
            else state
            for state in found.states
        ]
        return replace(found, notes=self._notes, states=tuple(states))

    def _native_frames(
        self, found: Diagnosis, answers: Mapping[int, RankActivity]
    ) -> tuple[dict[int, str], tuple[str, ...]]:
        """Return the frames of culprits where C code holds the GIL, and why some have none."""
        culprits = [state for state in found.states if state.rank in found.culprits]
        in_c = [state for state in culprits if answers[state.rank].way == "signal"][:CULPRITS]
        calls = {state.rank: self._group.call(state.rank, GetNativeStack()) for state in in_c}
        wait(calls.values(), timeout=longest(NATIVE_S, len(calls)))
        frames: dict[int, str] = {}
        reasons: dict[str, list[RankState]] = {}
        for state in in_c:
            call = calls[state.rank]
            reply = call.result() if call.done() and not call.exception() else None
            if reply is not None and reply.text:
                frames[state.rank] = reply.text
            elif reply is not None:
                reasons.setdefault(reply.error, []).append(state)
        notes = [f"no frames of C code of {name(own)}: {why}" for why, own in reasons.items()]
        return frames, tuple(notes)

    def write(self, states: Sequence[RankState]) -> None:
        """Write the stacks of the ranks. Events report a full disk."""
        with suppress(OSError):
            for state in states:
                (self._logs / f"rank-{state.rank}.stacks").write_text(state.stack, encoding="utf-8")
