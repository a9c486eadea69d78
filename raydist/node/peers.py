"""Every node against every other: real connections on the training addresses, timed, and as long as data is. (actor)

Each node listens on a port that the kernel chose, as the store, gloo and NCCL do, and calls all the others. One call
says whether a connection comes about, how long a round trip takes, how the two clocks stand to each other, and whether
packets of full size pass in both directions.

A request is its length and so many bytes, the answer is the other's clock and the same bytes. The first request of a
connection is the secret of the check-up: who does not know it gets no answer.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

LENGTH, CLOCK = struct.Struct("!I"), struct.Struct("!d")
PINGS = 3
"""Round trips that are timed; the fastest counts, since a busy machine only makes them slower."""
PAYLOAD = 64 << 10
"""More than any MTU: a path that loses packets of full size loses some of these."""
AT_ONCE = 32
"""Calls of one node under way at a time."""
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL)
"""What connect says where there is no route, or a route that leads nowhere."""


class Peer(NamedTuple):
    """Where a node listens for the others."""

    address: str
    port: int


class Trip(NamedTuple):
    """What became of a call to a peer."""

    kind: str
    """fine, or how far it came: silent, refused, unreachable, stalled (short packets passed, long ones did not)."""
    words: str = ""
    rtt_s: float = 0.0
    ahead_s: float = 0.0
    """How far the peer's clock is ahead of the caller's; right to half a round trip."""


class Listener:
    """Answers the other nodes' calls on one address, until it is closed."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self.secret = secret
        self.clock = clock
        self.calls: set[asyncio.BaseTransport] = set()

    async def open(self, address: str) -> Peer:
        """Listen on this address only. OSError where the machine has no such address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Answer(self), address, 0, backlog=4096)
        return Peer(address, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and hang up on whoever is still there."""
        self._server.close()
        for transport in list(self.calls):
            transport.close()


class Answer(asyncio.Protocol):
    """One call that came in."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._heard = bytearray()
        self._known = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._listener.calls.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.calls.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        while len(self._heard) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._heard)
            if length > (PAYLOAD if self._known else len(self._listener.secret)):
                return self._transport.close()
            if len(self._heard) < LENGTH.size + length:
                return None
            said = bytes(self._heard[LENGTH.size : LENGTH.size + length])
            del self._heard[: LENGTH.size + length]
            self._known = self._known or hmac.compare_digest(said, self._listener.secret)
            if not self._known:
                return self._transport.close()
            assert isinstance(self._transport, asyncio.Transport)
            self._transport.write(CLOCK.pack(self._listener.clock()) + said)
        return None


async def call(peer: Peer, secret: bytes, timeout: float, clock: Callable[[], float] = time.time) -> Trip:
    """Call one peer. `timeout`: seconds for the connection, and again for all that is said."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*peer), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        return Trip("silent", f"no answer within {timeout:g} s")
    except ConnectionRefusedError:
        return Trip("refused", "connection refused")
    except OSError as error:
        return Trip("unreachable" if error.errno in UNREACHABLE else "broken", words(error))
    heard: list[tuple[float, float]] = []
    try:
        await asyncio.wait_for(converse(reader, writer, secret, clock, heard), timeout)
        return Trip("fine", "", *min(heard))
    except (asyncio.TimeoutError, TimeoutError):
        if len(heard) == PINGS:
            return Trip("stalled", f"{PAYLOAD >> 10} KiB did not come back within {timeout:g} s", *min(heard))
        return Trip("silent", f"connected, then no answer within {timeout:g} s")
    except (OSError, EOFError) as error:
        return Trip("broken", f"connected, then {words(error)}")
    finally:
        writer.transport.abort()  # what is still on its way to a peer that doesn't hear is of no use


async def converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    clock: Callable[[], float],
    heard: list[tuple[float, float]],
) -> None:
    """Short words, timed: (round trip, how far the peer's clock is ahead), each in seconds; then long ones."""
    for _ in range(PINGS):
        began, at = time.perf_counter(), clock()
        there = await ask(reader, writer, secret)
        rtt = time.perf_counter() - began
        heard.append((rtt, there - at - rtt / 2))
    await ask(reader, writer, bytes(PAYLOAD))


def words(error: Exception) -> str:
    """What a person reads of an error. asyncio puts words of its own before the system's."""
    if isinstance(error, EOFError):
        return "the other side hung up"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytes) -> float:
    """Say something; the peer's clock when it had heard it."""
    writer.write(LENGTH.pack(len(said)) + said)
    there: float = CLOCK.unpack(await reader.readexactly(CLOCK.size))[0]
    if await reader.readexactly(len(said)) != said:
        raise ConnectionError("something else answered")
    return there


async def call_all(peers: Sequence[Peer], own: int, secret: bytes, timeout: float) -> list[Trip]:
    """Call every peer but the `own`, a few at a time; the trips in order of the peers, to oneself a fine one."""

    async def one(index: int) -> Trip:
        async with gate:
            return await call(peers[index], secret, timeout)

    gate = asyncio.Semaphore(AT_ONCE)
    # Each begins with its own neighbour, so that no node is called by all the others in the same moment.
    turn = [(own + step) % len(peers) for step in range(1, len(peers))]
    found = dict(zip(turn, await asyncio.gather(*map(one, turn)), strict=True))
    return [found.get(index, Trip("fine")) for index in range(len(peers))]


def patience(nodes: int, timeout: float) -> float:
    """Seconds within which call_all is back, whatever the network does."""
    return 3 * timeout * (1 + nodes // AT_ONCE) + 10
