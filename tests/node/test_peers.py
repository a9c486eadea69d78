"""Nodes call each other by real sockets: 127.0.0.1 to 127.0.0.200 are as good as 200 machines."""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import TypeVar

import pytest

from raydist.messages.checkup import Peer, Trip
from raydist.node import peers
from raydist.node.peers import Listener, call_all, call_peer

T = TypeVar("T")

SECRET = b"only this check-up knows"
PATIENCE = 30.0


async def listening(
    clock: Callable[[], float] = time.time, address: str = "127.0.0.1"
) -> tuple[Listener, Peer]:
    listener = Listener(SECRET, clock)
    return listener, await listener.open(address)


def with_listener(
    talk: Callable[[Peer], Awaitable[T]], clock: Callable[[], float] = time.time
) -> T:
    async def go() -> T:
        listener, peer = await listening(clock)
        try:
            return await talk(peer)
        finally:
            await listener.close()

    return asyncio.run(go())


@contextmanager
def odd_server(
    answers: Sequence[bytes], late_s: float = 0.0, last_late_s: float = 0.0
) -> Iterator[Peer]:
    """A server that gives one of these answers to each thing it hears, and then stays silent.

    It begins `late_s` seconds after it has accepted the connection, and its last answer comes
    `last_late_s` after the one before.
    """

    def serve(server: socket.socket) -> None:
        with server, server.accept()[0] as line:
            time.sleep(late_s)
            for number, one in enumerate(answers, 1):
                line.recv(1 << 16)
                time.sleep(last_late_s if number == len(answers) else 0.0)
                line.sendall(one)
            over.wait(PATIENCE)

    server, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    thread = threading.Thread(target=serve, args=(server,))
    thread.start()
    try:
        yield Peer(*server.getsockname())
    finally:
        over.set()
        thread.join()


def reply(data: bytes, at: float = 0.0) -> bytes:
    return peers.CLOCK.pack(at) + data


def test_a_call_to_a_node_that_listens_is_fine_and_timed() -> None:
    trip = with_listener(lambda peer: call_peer(peer, SECRET, PATIENCE))
    assert trip.kind == "fine"
    assert 0 < trip.rtt_s < PATIENCE
    assert abs(trip.ahead_s) <= trip.rtt_s


@pytest.mark.parametrize("ahead", [-7.5, 3600.0])
def test_a_clock_that_differs_is_measured(ahead: float) -> None:
    trip = with_listener(
        lambda peer: call_peer(peer, SECRET, PATIENCE), clock=lambda: time.time() + ahead
    )
    assert trip.ahead_s == pytest.approx(ahead, abs=trip.rtt_s)


def test_a_slow_peer_shows_in_the_round_trip() -> None:
    def slow() -> float:
        time.sleep(0.02)
        return time.time()

    assert with_listener(lambda peer: call_peer(peer, SECRET, PATIENCE), clock=slow).rtt_s > 0.02


def test_without_the_secret_there_is_no_answer() -> None:
    async def say(peer: Peer, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*peer)
        writer.write(peers.LENGTH.pack(len(data)) + data)
        try:
            return await reader.read()
        except ConnectionResetError:  # it did not even read all
            return b""

    for wrong in (b"x" * len(SECRET), b"", SECRET + b"x", b"x" * peers.PAYLOAD):
        assert with_listener(lambda peer, said=wrong: say(peer, said)) == b""  # type: ignore[misc]
        assert (
            with_listener(lambda peer, said=wrong: call_peer(peer, said, PATIENCE)).kind == "broken"  # type: ignore[misc]
        )


def test_a_short_request_without_the_secret_gets_no_reply() -> None:
    """As short as it, or shorter, so that it is the words that are refused, and not their
    length."""

    async def say(peer: Peer, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*peer)
        writer.write(peers.LENGTH.pack(len(data)) + data)
        return await asyncio.wait_for(reader.read(peers.CLOCK.size), PATIENCE)

    for wrong in (b"x" * len(SECRET), SECRET[:-1], SECRET[:-1] + b"x", b""):
        assert with_listener(lambda peer, said=wrong: say(peer, said)) == b""  # type: ignore[misc]


def test_what_comes_in_pieces_or_is_too_long_does_no_harm() -> None:
    async def piecemeal(peer: Peer) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(*peer)
        for byte in peers.LENGTH.pack(len(SECRET)) + SECRET:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        clock = await reader.readexactly(peers.CLOCK.size + len(SECRET))
        writer.write(peers.LENGTH.pack(peers.PAYLOAD + 1))
        return clock[peers.CLOCK.size :], await reader.read()

    assert with_listener(piecemeal) == (SECRET, b"")


def test_it_listens_on_one_address_until_it_is_closed() -> None:
    async def go() -> tuple[str, str, str]:
        listener, peer = await listening(address="127.0.0.2")
        there = await call_peer(peer, SECRET, PATIENCE)
        beside = await call_peer(Peer("127.0.0.1", peer.port), SECRET, PATIENCE)
        await listener.close()
        return there.kind, beside.kind, (await call_peer(peer, SECRET, PATIENCE)).kind

    assert asyncio.run(go()) == ("fine", "refused", "refused")


def test_closing_closes_open_connections() -> None:
    async def go() -> bytes:
        listener, peer = await listening()
        reader, writer = await asyncio.open_connection(*peer)
        writer.write(peers.LENGTH.pack(len(SECRET)) + SECRET)
        await reader.readexactly(peers.CLOCK.size + len(SECRET))
        await listener.close()
        return await asyncio.wait_for(reader.read(), PATIENCE)

    assert asyncio.run(go()) == b""


def test_an_address_that_the_machine_has_not_is_no_place_to_listen() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.77"):
        asyncio.run(Listener(SECRET).open("192.0.2.77"))


def test_a_path_that_drops_long_packets_is_stalled() -> None:
    short = [reply(SECRET)] * peers.PINGS
    with odd_server(short) as peer:
        trip = asyncio.run(call_peer(peer, SECRET, 0.5))
    assert (trip.kind, trip.words) == ("stalled", "64 KiB did not come back within 1.5 s")
    assert trip.rtt_s > 0
    with odd_server(short[:1]) as peer:
        assert asyncio.run(call_peer(peer, SECRET, 0.2)) == Trip(
            "silent", "connected, then no answer within 0.6 s"
        )


def test_a_busy_peer_may_answer_late_and_drops_long_packets_all_the_same() -> None:
    short = [reply(SECRET)] * peers.PINGS
    with odd_server(short, late_s=0.8) as peer:
        assert asyncio.run(call_peer(peer, SECRET, 0.5)).kind == "stalled"


def test_a_peer_that_is_busy_when_the_long_packets_come_drops_none() -> None:
    answers = [*[reply(SECRET)] * peers.PINGS, reply(bytes(peers.PAYLOAD))]
    with odd_server(answers, last_late_s=0.8) as peer:
        assert asyncio.run(call_peer(peer, SECRET, 0.5)).kind == "fine"


def test_a_wrong_reply_is_not_a_peers() -> None:
    with odd_server([reply(b"x" * len(SECRET))]) as peer:
        trip = asyncio.run(call_peer(peer, SECRET, PATIENCE))
    assert trip == Trip("broken", "connected, then the reply is not the request")


def test_a_machine_that_takes_no_connection_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        own = full.getsockname()
        with socket.create_connection(
            own
        ):  # the only place in its queue is taken: further ones get no answer
            trip = asyncio.run(call_peer(Peer(*own), SECRET, 0.3))
    assert trip == Trip("silent", "no answer within 0.3 s")


def test_one_that_is_away_is_the_only_one_named() -> None:
    async def go() -> list[Trip]:
        pairs = [await listening(address=f"127.0.0.{n}") for n in (1, 2, 3, 4)]
        await pairs[2][0].close()
        trips = await call_all([peer for _, peer in pairs], 0, SECRET, PATIENCE)
        for listener, _ in pairs:
            await listener.close()
        return trips

    assert [trip.kind for trip in asyncio.run(go())] == ["fine", "fine", "refused", "fine"]


def test_a_single_node_calls_no_peer() -> None:
    assert with_listener(lambda peer: call_all([peer], 0, SECRET, PATIENCE)) == [Trip("fine")]


# 200 nodes

NODES = 200


def some_of_the_nodes(
    sockets: Sequence[socket.socket], own: range, others: Barrier, results: Connection
) -> None:
    """The nodes of one process: each answers on its socket, and calls all 200."""

    async def go() -> list[Trip]:
        loop = asyncio.get_running_loop()
        for index in own:
            listener = Listener(SECRET)
            await loop.create_server(
                lambda mine=listener: peers.Connection(mine),  # type: ignore[misc]
                sock=sockets[index],
            )
        every = [Peer(*one.getsockname()) for one in sockets]
        rows = await asyncio.gather(*(call_all(every, index, SECRET, PATIENCE) for index in own))
        await asyncio.to_thread(
            others.wait, 4 * PATIENCE
        )  # their nodes may not have called ours yet
        return [trip for row in rows for trip in row]

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (most, most)
    )  # an ordinary user's first limit is 1024
    trips = asyncio.run(go())
    results.send((Counter(trip.kind for trip in trips), sum(trip.rtt_s > 0 for trip in trips)))


def test_200_nodes_all_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """39 800 real connections, by two processes with 100 nodes each."""
    for name, less in (
        ("CONCURRENT", 4),
        ("PINGS", 1),
        ("PAYLOAD", 2048),
    ):  # 200 nodes share this machine
        monkeypatch.setattr(peers, name, less)
    sockets = [socket.create_server((f"127.0.0.{n}", 0), backlog=4096) for n in range(1, NODES + 1)]
    fork = multiprocessing.get_context("fork")
    barrier, pipes = fork.Barrier(2), [fork.Pipe(duplex=False) for _ in range(2)]
    halves = (range(NODES // 2), range(NODES // 2, NODES))
    processes = [
        fork.Process(target=some_of_the_nodes, args=(sockets, own, barrier, sends))
        for own, (_, sends) in zip(halves, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for one in sockets:
        one.close()
    results = [hears.recv() for hears, _ in pipes]
    for process in processes:
        process.join()
    assert results == [({"fine": NODES * NODES // 2}, (NODES - 1) * NODES // 2)] * 2


def test_patience_grows_with_the_nodes_that_may_all_be_silent() -> None:
    assert peers.patience(1, 3) < peers.patience(200, 3) < 200
    silent_s = (2 * peers.BUSY + 1) * 3 * -(-199 // peers.CONCURRENT)
    assert peers.patience(200, 3) > silent_s
