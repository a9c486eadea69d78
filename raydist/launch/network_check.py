"""Before the ranks start, nodes call each other with short and with long packets. (driver)

Without it, ranks behind a firewall that drops packets, or on a path with a smaller MTU, would wait
in their first collective for `backend.timeout_s`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from raydist.cluster.placement import Slot
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.checkup import CallPeers, ListenForPeers, Peer, StopListening, Trip
from raydist.network.finding import clock_finding, peer_fix
from raydist.node.peers import patience
from raydist.shared.errors import LaunchError

CALL_S = 10.0
"""Limit on a connection, which the kernel accepts: no busy machine delays that. The answers of the
agent there may take longer (node.peers.BUSY)."""
SKEW_S = 60.0
"""Difference of two clocks above which each run warns: clocks without NTP drift by seconds a day,
and only minutes have consequences beyond logs. The doctor reports half a second: a person has asked
it."""


def check_network(group: WorkerGroup, warn: Callable[[str], None]) -> None:
    """Have each node call rank 0's node and the next node, on the training addresses.

    LaunchError: a pair does not connect, or loses long packets. `raydist doctor` tests all pairs.
    """
    leads = group.plan.leads
    if len(leads) < 2:
        return
    ranks = [lead.rank for lead in leads]
    secret = secrets.token_bytes(32)
    listen = [ListenForPeers(group.facts[rank].address, secret) for rank in ranks]
    peers = group.call_each(listen, ranks=ranks)
    called = [callees(number, len(leads)) for number in range(len(leads))]
    calls = [
        CallPeers([*(peers[each] for each in others), peers[own]], len(others), secret, CALL_S)
        for own, others in enumerate(called)
    ]
    try:
        answers = group.call_each(calls, patience(len(peers), CALL_S), ranks)
    finally:
        for rank in ranks:  # nobody waits for the replies, or hides the error of the calls
            group.call(rank, StopListening())
    for caller, others, trips in zip(leads, called, answers, strict=True):
        for other, trip in zip(others, trips, strict=False):
            if is_blocked(trip):
                raise LaunchError(blocked_text(group, caller, leads[other], peers[other], trip))
            if trip.kind != "fine":
                path = f"{caller.node.host} -> {leads[other].node.host} ({peers[other].address})"
                warn(f"{path}: {trip.words}; the ranks start all the same")
    for lead, (to_first, *_) in zip(leads[1:], answers[1:], strict=True):
        if abs(to_first.ahead_s) > SKEW_S + to_first.rtt_s:
            found = clock_finding(
                lead.node.host, -to_first.ahead_s, f"that of {leads[0].node.host}"
            )
            warn(f"{found.text} (fix: {found.fix})")


def callees(caller: int, nodes: int) -> list[int]:
    """Return which nodes a node calls: the first, whose store all ranks use, and the next one."""
    return [each for each in dict.fromkeys((0, (caller + 1) % nodes)) if each != caller]


def is_blocked(trip: Trip) -> bool:
    """Return whether a path is of no use to the ranks.

    A peer that accepts the connection and says nothing may be busy.
    """
    connected = trip.words.startswith("connected")
    return trip.kind in ("silent", "refused", "unreachable", "stalled") and not connected


def blocked_text(group: WorkerGroup, caller: Slot, called: Slot, peer: Peer, trip: Trip) -> str:
    """Describe a path that is of no use, and what to do about it."""
    facts = group.facts[caller.rank]
    ends = (caller.node.host, facts.address), (called.node.host, peer.address)
    fix = peer_fix(trip.kind, *ends, facts.interface)
    return (
        f"{caller.node.host} ({facts.address}) -> {called.node.host} ({peer.address}): "
        f"{trip.words}: {fix}; raydist doctor tests every pair of nodes"
    )
