"""Horovod's rendezvous: a key-value store over HTTP on the training address, with a secret. (actor)

Horovod's C++ (gloo_context.cc, http_store.cc of 0.28.1) opens a connection for each request:

    PUT /scope/key       a rank stores its addresses
    GET /scope/key       200 with the value, or 404 if it is missing: Horovod asks again 10 ms later
    DELETE /scope/rank   the rank is connected to all others of the scope

So 1,024 ranks send a million requests, each over a new connection. Each takes a process 0.16 to 0.2
ms of CPU, half of it the kernel's: three minutes in all. (Without asyncio's streams it would be a
sixth less.) gloo's own full mesh is complete before that.

Horovod has no authentication, and its own server listens on all interfaces. But it builds its URL
as plain text, http://ADDR:PORT/scope/key, so an ADDR of `10.0.0.1:41234/SECRET` sends each request
to http://10.0.0.1:41234/SECRET:41234/scope/key. A process without the secret can neither read nor
store an address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator

from raydist.messages.server import StoreAddress

HOLD_S = 1.0
"""Limit on the wait of a GET for a missing key: waiting saves further requests, and 10 ms before
each."""
READ_S = 10.0
"""Limit on the wait for a whole request."""
MAX_VALUE = 1 << 24
"""Maximum bytes of a value; the addresses of a rank take about 100 bytes for each other rank."""
REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket on a port that the kernel chose, and its address for Horovod.

    The address is `address:port/secret`.
    """
    if ":" in address:
        raise OSError(
            f"{address}: Horovod's rendezvous uses IPv4 only; set fabric.interface=<one with IPv4>"
        )
    listener = socket.create_server((address, 0), backlog=4096)
    return listener, f"{address}:{listener.getsockname()[1]}/{secrets.token_urlsafe(24)}"


def open_http_store(address: str) -> tuple[Callable[[], None], StoreAddress]:
    """Open the store; return a function that serves it until the process ends, and its address."""
    listener, address_text = listen(address)
    secret = address_text.partition("/")[2]
    return lambda: asyncio.run(serve(listener, secret)), StoreAddress(
        listener.getsockname()[1], secret
    )


async def serve(listener: socket.socket, secret: str) -> None:
    """Answer requests until cancelled."""
    store = Store(secret)
    server = await asyncio.start_server(store.answer, sock=listener, backlog=4096)
    try:
        # Not serve_forever(): when cancelled, that waits for open connections (Python 3.12).
        await asyncio.Event().wait()
    finally:
        server.close()


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """Serve the store in a thread of this process; yield its address as listen() returns it."""
    listener, address_text = listen(address)
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(listener, address_text.partition("/")[2]))
    thread = threading.Thread(
        target=run_until_done, args=(loop, task), name="horovod-rendezvous", daemon=True
    )
    thread.start()
    try:
        yield address_text
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    for connection in asyncio.all_tasks(loop):
        connection.cancel()
        loop.run_until_complete(asyncio.wait([connection]))
    loop.run_until_complete(asyncio.sleep(0))  # their sockets close in the next iteration
    loop.close()


class Store:
    """The values of all scopes."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._waiters: dict[str, set[asyncio.Event]] = {}
        """By missing key: the GETs that wait for it."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the single request of a connection."""
        with contextlib.closing(writer):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, name, body = await asyncio.wait_for(self._read(reader), READ_S)
            status, value = await self._respond(method, name, body)
        except PermissionError:
            status, value = 403, b""
        except (
            ValueError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.TimeoutError,
            OSError,
        ):
            status, value = 400, b""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(value)}\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode() + value)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        """Return (method, scope/key, body) of a request.

        Raises ValueError if it is not a request, and PermissionError if it lacks the secret; its
        body, of up to MAX_VALUE, is then not read.
        """
        method, path, size = await read_head(reader)
        _, secret, scope, key = path.split("/")
        if not hmac.compare_digest(secret.partition(":")[0].encode(), self._secret.encode()):
            raise PermissionError
        return method, f"{scope}/{key}", await reader.readexactly(size)

    async def _respond(self, method: str, name: str, body: bytes) -> tuple[int, bytes]:
        if method == "GET":
            return await self._get(name)
        if method == "PUT":
            self._values[name] = body
            for waiting in self._waiters.pop(name, ()):
                waiting.set()
        elif method == "DELETE":
            # All ranks of the scope are connected before the first DELETE, so no rank needs this
            # address any more. It must be gone before an init() that follows a shutdown().
            scope, _, key = name.partition("/")
            for old in (name, f"{scope}/rank_{key}"):
                self._values.pop(old, None)
        else:
            return 400, b""
        return 200, b""

    async def _get(self, name: str) -> tuple[int, bytes]:
        if name not in self._values:
            await self._wait_for(name)
        value = self._values.get(name)
        return (404, b"") if value is None else (200, value)

    async def _wait_for(self, name: str) -> None:
        """Wait up to HOLD_S for the value of a key."""
        put = asyncio.Event()
        waiting = self._waiters.setdefault(name, set())
        waiting.add(put)
        try:
            await asyncio.wait_for(put.wait(), HOLD_S)
        except asyncio.TimeoutError:
            pass
        finally:
            waiting.discard(put)
            if not waiting and self._waiters.get(name) is waiting:
                del self._waiters[name]


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, int]:
    """Return (method, path, bytes of the body) of an HTTP request.

    Raises ValueError if it is not a request.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    fields = (line.partition(":") for line in head[1:])
    size = next((int(value) for name, _, value in fields if name.lower() == "content-length"), 0)
    if not 0 <= size <= MAX_VALUE:
        raise ValueError(f"a value of {size} bytes")
    return method, path, size
