"""Where Horovod's ranks meet: its key-value store over HTTP, on the training address alone, behind a secret. (actor)

Horovod's C++ (gloo_context.cc, http_store.cc of 0.28.1) opens a connection for each request:

    PUT /scope/key       a rank leaves its addresses
    GET /scope/key       200 with the value, 404 if it is not there yet: asked again 10 ms later
    DELETE /scope/rank   the rank has met all the others of the scope

It knows no authentication, and Horovod's own server listens on all interfaces. But it puts together its URL as plain
text, http://ADDR:PORT/scope/key, so an ADDR of `10.0.0.1:41234/SECRET` makes each request go to
http://10.0.0.1:41234/SECRET:41234/scope/key: who doesn't know the secret can neither read an address nor put in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

HOLD_S = 1.0
"""Longest wait of a GET for a key that is not there yet: saves the asking again, and the 10 ms before it."""
READ_S = 10.0
"""Longest wait for a request to arrive whole."""
LARGEST = 1 << 24
"""Bytes of a value; a rank's addresses are about 100 bytes for each of the others."""
REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found"}


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket on a port that the kernel chose, and the door to it: `address:port/secret`."""
    if ":" in address:
        raise OSError(f"Horovod's rendezvous speaks IPv4 only: say fabric.interface=<one with IPv4>, not {address}")
    listener = socket.create_server((address, 0), backlog=4096)
    return listener, f"{address}:{listener.getsockname()[1]}/{secrets.token_urlsafe(24)}"


def open_store(address: str) -> tuple[Callable[[], None], dict[str, Any]]:
    """The store, served as long as the call of the first that this gives back; the second says where it is."""
    listener, door = listen(address)
    return lambda: asyncio.run(serve(listener, door)), {
        "store": listener.getsockname()[1],
        "secret": door.partition("/")[2],
    }


async def serve(listener: socket.socket, door: str) -> None:
    """Answer until cancelled."""
    store = Store(door.partition("/")[2])
    server = await asyncio.start_server(store.answer, sock=listener, backlog=4096)
    try:
        # Not serve_forever(): when it is cancelled, it waits for those who are still asking (Python 3.12).
        await asyncio.Event().wait()
    finally:
        server.close()


@contextlib.contextmanager
def serving(address: str) -> Iterator[str]:
    """The store in a thread of this process; its door."""
    listener, door = listen(address)
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(listener, door))
    thread = threading.Thread(target=run_until_done, args=(loop, task), name="horovod-rendezvous", daemon=True)
    thread.start()
    try:
        yield door
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def run_until_done(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)
    for held in asyncio.all_tasks(loop):
        held.cancel()
        loop.run_until_complete(asyncio.wait([held]))
    loop.run_until_complete(asyncio.sleep(0))  # their sockets are closed in a turn of their own
    loop.close()


class Store:
    """The values of all scopes, as long as somebody may ask for them."""

    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Event] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        with contextlib.closing(writer):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, path, body = await asyncio.wait_for(read_request(reader), READ_S)
            status, value = await self._respond(method, path, body)
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, OSError):
            status, value = 400, b""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(value)}\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            writer.write(head.encode() + value)
            await writer.drain()

    async def _respond(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        _, told, scope, key = path.split("/")  # anything else is a ValueError
        if not hmac.compare_digest(told.partition(":")[0].encode(), self._secret.encode()):
            return 403, b""
        name = f"{scope}/{key}"
        if method == "GET":
            return await self._get(name)
        if method == "PUT":
            self._values[name] = body
            if event := self._awaited.pop(name, None):
                event.set()
        elif method == "DELETE":
            # All of the scope have met before the first of them says so: nobody asks for this rank any more, and after
            # a shutdown() and another init() nobody may find its old address.
            for old in (name, f"{scope}/rank_{key}"):
                self._values.pop(old, None)
        else:
            return 400, b""
        return 200, b""

    async def _get(self, name: str) -> tuple[int, bytes]:
        if name not in self._values:
            event = self._awaited.setdefault(name, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(event.wait(), HOLD_S)
        value = self._values.get(name)
        return (404, b"") if value is None else (200, value)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """(method, path, body) of an HTTP request; ValueError if it is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    fields = (line.partition(":") for line in head[1:])
    size = next((int(value) for name, _, value in fields if name.lower() == "content-length"), 0)
    if not 0 <= size <= LARGEST:
        raise ValueError(f"a value of {size} bytes")
    return method, path, await reader.readexactly(size)
