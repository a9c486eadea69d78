"""The files about a hang in the folder of the logs, and what further witnesses say. (driver)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from raydist.launch.limits import longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import AskNccl, GetNativeStack, RankActivity
from raydist.network.ras import describe_ras
from raydist.recovery.hang_verdict import STOPPED, Diagnosis, RankState, name

NATIVE_S = 25.0
"""Limit on the wait for py-spy, which reads the symbols of every library of a rank."""
CULPRITS = 4
"""Limit on the culprits whose frames of C code are read."""
RAS_S = 20.0
"""Limit on the wait for NCCL's RAS: that of an agent (node.ras_client), and the way there."""
ASKED = 2
"""How many ranks' RAS are asked, of different nodes: each knows all ranks that it can reach."""
RAS_FILE = "nccl-ras.txt"
"""The file of RAS's answer, in the folder of the logs."""


class HangEvidence:
    """The evidence of one attempt's hangs; further witnesses are asked once for each diagnosis."""

    def __init__(self, group: WorkerGroup, logs: Path) -> None:
        self._group = group
        self._logs = logs
        self._about = ""
        """The text of the last diagnosis for which they were asked."""
        self._frames: Mapping[int, str] = {}
        self._notes: tuple[str, ...] = ()
        self._ras = ""
        """What NCCL's RAS has answered."""

    def complete(self, found: Diagnosis, answers: Mapping[int, RankActivity]) -> Diagnosis:
        """Return the diagnosis with what further witnesses say.

        It may take NATIVE_S and, if the network is cut, RAS_S.
        """
        if not found.text:
            return found
        if self._about != found.text:
            self._about = found.text
            ras = self._ask_ras(found, answers)
            self._frames, why_not = self._native_frames(found, answers)
            self._notes = (*ras, *why_not)
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

    def _ask_ras(self, found: Diagnosis, answers: Mapping[int, RankActivity]) -> list[str]:
        """Return what NCCL's RAS says, a line each; nothing where there is none.

        It is not asked about a rank that a signal has stopped: it would wait for that rank.
        """
        self._ras = ""
        if any(state.state in STOPPED for state in found.states):
            return []
        calls = [self._group.call(rank, AskNccl()) for rank in self._witnesses(found)]
        wait(calls, timeout=longest(RAS_S, len(calls)))
        replies = [call.result() for call in calls if call.done() and not call.exception()]
        self._ras = next(filter(None, replies), "")
        if not self._ras:
            return []
        pids = {rank: activity.pid for rank, activity in answers.items()}
        return describe_ras(self._ras, lambda *at: self._rank_of(pids, *at), f"logs/{RAS_FILE}")

    def _witnesses(self, found: Diagnosis) -> list[int]:
        """Return the ranks whose RAS is asked: rather not the culprits, each of another node."""
        of_node: dict[str, int] = {}
        for state in sorted(found.states, key=lambda each: each.rank in found.culprits):
            of_node.setdefault(self._group.plan.slots[state.rank].node.id, state.rank)
        return [*of_node.values()][:ASKED]

    def _rank_of(self, pids: Mapping[int, int], address: str, pid: int) -> int | None:
        """Return the rank with this process. `address`: where NCCL listens on its node.

        Processes of different nodes may have one number; they then differ by address.
        """
        ranks = [rank for rank, own in pids.items() if own == pid]
        if len(ranks) > 1:
            ranks = [rank for rank in ranks if address in self._addresses(rank)]
        return ranks[0] if len(ranks) == 1 else None

    def _addresses(self, rank: int) -> set[str]:
        own = {self._group.plan.slots[rank].node.ip}
        return own | {each.address for each in self._group.facts[rank : rank + 1]}

    def write(self, states: Sequence[RankState]) -> None:
        """Write the stacks of the ranks, and RAS's answer. Events report a full disk."""
        with suppress(OSError):
            if self._ras:
                (self._logs / RAS_FILE).write_text(self._ras, encoding="utf-8")
            for state in states:
                (self._logs / f"rank-{state.rank}.stacks").write_text(state.stack, encoding="utf-8")
