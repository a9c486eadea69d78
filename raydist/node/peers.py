"""Connections between every two nodes on the training addresses: round trip, clocks, MTU. (actor)

Each node listens on a port that the kernel chose, as the store, gloo and NCCL do, and calls all
others. A call determines whether a connection succeeds, the time of a round trip, the difference of
the two clocks, and whether packets of full size pass in both directions.

A request is a length and that number of bytes; the reply is the peer's clock and the same bytes.
The first request of a connection is the secret of the check-up: a caller without it gets no reply.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import cast

from raydist.messages.checkup import Peer, Trip

LENGTH, CLOCK = struct.Struct("!I"), struct.Struct("!d")
PINGS = 3
"""Timed round trips. The fastest counts, because a busy machine only makes them slower."""
PAYLOAD = 64 << 10
"""More than any MTU: a path that drops packets of full size drops some of these."""
BUSY = 3
"""Limits of a call that a peer gets for its answers once it has accepted the connection, which its
kernel does: the agent of a busy machine may be late."""
CONCURRENT = 32
"""Maximum concurrent calls of one node."""
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL)
"""Errors of connect() if there is no route, or the route is blocked."""


class Listener:
    """Answers calls of other nodes on one address until it is closed."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self.secret = secret
        self.clock = clock
        self.calls: set[asyncio.BaseTransport] = set()

    async def open(self, address: str) -> Peer:
        """Listen on this address only. Raises OSError if the machine does not have it."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), address, 0, backlog=4096)
        return Peer(address, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self._server.close()
        for transport in list(self.calls):
            transport.close()


class Connection(asyncio.Protocol):
    """One incoming call."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._buffer = bytearray()
        self._trusted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._listener.calls.add(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.calls.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            if length > (PAYLOAD if self._trusted else len(self._listener.secret)):
                return self._transport.close()
            if len(self._buffer) < LENGTH.size + length:
                return None
            request = bytes(self._buffer[LENGTH.size : LENGTH.size + length])
            del self._buffer[: LENGTH.size + length]
            self._trusted = self._trusted or hmac.compare_digest(request, self._listener.secret)
            if not self._trusted:
                return self._transport.close()
            cast(asyncio.Transport, self._transport).write(
                CLOCK.pack(self._listener.clock()) + request
            )
        return None


async def call_peer(
    peer: Peer, secret: bytes, timeout: float, clock: Callable[[], float] = time.time
) -> Trip:
    """Call one peer.

    `timeout`: seconds for the connection; BUSY times as many for the short requests, and again for
    the long one.
    """
    answer_s = BUSY * timeout
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*peer), timeout)
    except (asyncio.TimeoutError, TimeoutError):
        return Trip("silent", f"no answer within {timeout:g} s")
    except ConnectionRefusedError:
        return Trip("refused", "connection refused")
    except OSError as error:
        return Trip("unreachable" if error.errno in UNREACHABLE else "broken", error_text(error))
    pings = ping(reader, writer, secret, clock)
    fastest: tuple[float, float] | None = None
    try:
        fastest = await asyncio.wait_for(pings, answer_s)
        await asyncio.wait_for(send_request(reader, writer, bytes(PAYLOAD)), answer_s)
        return Trip("fine", "", *fastest)
    except (asyncio.TimeoutError, TimeoutError):
        if fastest is None:
            return Trip("silent", f"connected, then no answer within {answer_s:g} s")
        words = f"{PAYLOAD >> 10} KiB did not come back within {answer_s:g} s"
        return Trip("stalled", words, *fastest)
    except (OSError, EOFError) as error:
        return Trip("broken", f"connected, then {error_text(error)}")
    finally:
        # Not close(), which would wait for the bytes that a stalled peer does not accept.
        writer.transport.abort()


async def ping(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Return the round trip and the lead of the peer's clock, in seconds, of the fastest ping."""
    timings = []
    for _ in range(PINGS):
        began, at = time.perf_counter(), clock()
        peer_time = await send_request(reader, writer, secret)
        rtt = time.perf_counter() - began
        timings.append((rtt, peer_time - at - rtt / 2))
    return min(timings)


def error_text(error: Exception) -> str:
    """Return the system's text of an error, without the text that asyncio puts before it."""
    if isinstance(error, EOFError):
        return "the peer closed the connection"
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


async def send_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> float:
    """Send a request, and return the peer's clock when it received it."""
    writer.write(LENGTH.pack(len(request)) + request)
    peer_time: float = CLOCK.unpack(await reader.readexactly(CLOCK.size))[0]
    if await reader.readexactly(len(request)) != request:
        raise ConnectionError("the reply is not the request")
    return peer_time


async def call_all(peers: Sequence[Peer], own: int, secret: bytes, timeout: float) -> list[Trip]:
    """Call every peer except number `own`; return the trips in order of the peers.

    The trip of `own` is a fine one.
    """

    async def one(index: int) -> Trip:
        async with limit:
            return await call_peer(peers[index], secret, timeout)

    limit = asyncio.Semaphore(CONCURRENT)
    # Each node begins with its own neighbour, so that no node is called by all others at the same
    # time.
    order = [(own + step) % len(peers) for step in range(1, len(peers))]
    trips = dict(zip(order, await asyncio.gather(*map(one, order)), strict=True))
    return [trips.get(index, Trip("fine")) for index in range(len(peers))]


def patience(nodes: int, timeout: float) -> float:
    """Return the seconds within which call_all returns, whatever the network does."""
    return (2 * BUSY + 2) * timeout * (1 + nodes // CONCURRENT) + 10
