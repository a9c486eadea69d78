"""The nodes of a worker group: their fork servers, and what their first agents replied. (driver)"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from raydist.cluster.placement import Plan, Slot
from raydist.launch.paused_states import PausedStates
from raydist.messages.agent import Open, Opened, ProcessId
from raydist.messages.server import StoreKind
from raydist.network.facts import Facts
from raydist.network.traffic import Ports


class OpenedNodes:
    """The nodes on which agents were opened, in all attempts of a worker group."""

    def __init__(self, request: Open, paused: PausedStates | None = None) -> None:
        """`request`: what is the same for all agents. `paused`: the states that nodes may hold."""
        self._request = request
        self._paused = paused
        self._runs: dict[str, str] = {}
        """By node id: the name of its fork server, if the node was opened after the others."""
        self._replies: dict[str, Opened] = {}
        """By node id: the reply of its first agent."""
        self._processes: dict[str, list[ProcessId]] = {}
        """By node id: the processes that its agents have started."""
        self._leftovers: dict[str, list[ProcessId]] = {}
        """The same of agents that are gone, until their node's ranks are started again."""

    def run_of(self, slot: Slot) -> str:
        """Return the name of a node's fork server."""
        return self._runs.get(slot.node.id, self._request.run)

    def requests(self, slots: Sequence[Slot], store: StoreKind | None) -> list[Open]:
        """Return the requests that open the agents of these slots.

        `store`: the kind of store that rank 0's agent opens.
        """
        return [
            replace(
                self._request,
                run=self.run_of(slot),
                rank=slot.rank,
                node_id=slot.node.id,
                node_ip=slot.node.ip,
                lead=slot.local_rank == 0,
                held=self._paused.server(slot) if self._paused and slot.local_rank == 0 else None,
                store=store if slot.rank == 0 else None,
            )
            for slot in slots
        ]

    def note(self, slot: Slot, reply: Opened) -> None:
        """Note the reply of the agent of a slot."""
        if slot.local_rank == 0:
            self._replies[slot.node.id] = reply

    def held_key(self, plan: Plan) -> str:
        """Return the name of the states that all nodes have held for these ranks; empty: none."""
        if self._paused is None or not self._paused.fit(plan):
            return ""
        held = all(self._replies[slot.node.id].holds for slot in plan.leads)
        return self._paused.key if held else ""

    def servers(self, plan: Plan) -> dict[str, str]:
        """Return the folder of the fork server of each node, by node id."""
        known = {slot.node.id: self._replies.get(slot.node.id) for slot in plan.leads}
        return {node: reply.server for node, reply in known.items() if reply is not None}

    def add_standby(self, promoted: Mapping[str, tuple[str, Opened]]) -> None:
        """Add nodes that were opened without ranks, as StandbyNodes.promote returns them."""
        for node, (run, reply) in promoted.items():
            self._runs[node] = run
            self._replies[node] = reply

    def add_new(self, slots: Sequence[Slot]) -> None:
        """Name the fork servers of nodes that are opened after the others."""
        self._request = replace(self._request, warm_server=None)
        self._paused = None
        for slot in slots:
            if slot.local_rank == 0:
                self._runs[slot.node.id] = uuid.uuid4().hex[:8]
                self._replies.pop(slot.node.id, None)

    def unopened(self, slots: Sequence[Slot]) -> set[int]:
        """Return the ranks on nodes whose first agent has not replied."""
        return {slot.rank for slot in slots if slot.node.id not in self._replies}

    def note_started(self, slots: Sequence[Slot], processes: Sequence[ProcessId]) -> None:
        """Note the processes of all ranks, once they are started."""
        self._processes = {slot.node.id: [] for slot in slots}
        for slot, process in zip(slots, processes, strict=True):
            self._processes[slot.node.id].append(process)
        self._leftovers.clear()

    def note_lost(self, slots: Sequence[Slot]) -> None:
        """Note that the agents of these slots are gone; their processes may still be there."""
        for slot in slots:
            self._leftovers.setdefault(slot.node.id, []).extend(
                self._processes.pop(slot.node.id, [])
            )

    def left_on(self, slot: Slot) -> tuple[ProcessId, ...]:
        """Return the processes that lost agents may have left on the node of a slot."""
        return tuple(self._leftovers.get(slot.node.id, ()))

    def facts(
        self, slots: Sequence[Slot], gpus: Sequence[Sequence[str] | None]
    ) -> tuple[Facts, ...]:
        """Return the facts of the node of each slot, with the rank's own GPUs."""
        replies = [self._replies[slot.node.id] for slot in slots]
        return tuple(
            replace(each.facts, gpus=own)
            for each, own in zip(replies, gpus, strict=True)
            if each.facts is not None
        )

    def failed_imports(self, slot: Slot) -> Mapping[str, str]:
        """Return the modules that the slot's node could not import, each with the error."""
        return self._replies[slot.node.id].warm.failed

    def ports(self, slot: Slot) -> Ports:
        """Return the counters of the ports of the slot's node when it was opened.

        Empty if it was not, because its agents did not reply in time.
        """
        reply = self._replies.get(slot.node.id)
        return reply.ports or {} if reply else {}
