"""Horovod's rendezvous: the three verbs, the secret, and the address it listens on."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from raydist.node import rendezvous_http
from raydist.node.rendezvous_http import listen, open_http_store, serving

OK, BAD, FORBIDDEN, ABSENT = 200, 400, 403, 404


@pytest.fixture
def address() -> Iterator[str]:
    with serving("127.0.0.1") as opened:
        yield opened


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_http, "HOLD_S", 0.05)
    monkeypatch.setattr(rendezvous_http, "READ_S", 0.2)


def port_of(address: str) -> int:
    return int(address.partition("/")[0].rpartition(":")[2])


def ask(
    address: str, method: str, key: str, body: bytes = b"", secret: str | None = None
) -> tuple[int, bytes]:
    """Send one request like Horovod's C++, which appends `:PORT/scope/key` to the given address."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(address), timeout=10)
    path_secret = address.partition("/")[2] if secret is None else secret
    connection.request(method, f"/{path_secret}:{port_of(address)}/{key}", body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def raw(address: str, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(address)), timeout=10) as line:
        line.sendall(request)
        return line.recv(4096)


@pytest.mark.parametrize("value", [b"", b"addr", bytes(range(256)), b"\r\n\r\n", b"x" * 300_000])
def test_what_is_put_is_got_byte_for_byte(address: str, value: bytes) -> None:
    assert ask(address, "PUT", "global/0", value) == (OK, b"")
    assert ask(address, "GET", "global/0") == (OK, value)


def test_scopes_and_keys_are_apart(address: str) -> None:
    ask(address, "PUT", "global/1", b"global")
    ask(address, "PUT", "local_node-0/1", b"local")
    ask(address, "PUT", "global/11", b"eleven")
    assert [ask(address, "GET", key)[1] for key in ("global/1", "local_node-0/1", "global/11")] == [
        b"global",
        b"local",
        b"eleven",
    ]


def test_what_is_not_there_is_404(address: str, impatient: None) -> None:
    assert ask(address, "GET", "global/7") == (ABSENT, b"")


def test_a_get_waits_for_the_put(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_http, "HOLD_S", 60)
    got: list[tuple[int, bytes]] = []
    asking = [
        threading.Thread(target=lambda: got.append(ask(address, "GET", "global/3")))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    while (
        sum(c.status == "ESTABLISHED" and c.laddr.port == port_of(address) for c in connections())
        < 3
    ):
        pass
    assert got == []
    ask(address, "PUT", "global/3", b"here")
    for thread in asking:
        thread.join(10)
    assert got == [(OK, b"here")] * 3


def connections() -> list[Any]:
    return list(psutil.Process().net_connections())


def test_delete_removes_the_addresses_of_the_rank(address: str, impatient: None) -> None:
    for key in ("0", "1", "rank_0", "rank_1"):
        ask(address, "PUT", f"global/{key}", b"first")
    ask(address, "PUT", "cross_0/0", b"other scope")
    assert ask(address, "DELETE", "global/0") == (OK, b"")
    assert ask(address, "DELETE", "global/0") == (OK, b"")
    left = {key: ask(address, "GET", f"global/{key}")[0] for key in ("0", "rank_0", "1", "rank_1")}
    assert left == {"0": ABSENT, "rank_0": ABSENT, "1": OK, "rank_1": OK}
    assert ask(address, "GET", "cross_0/0") == (OK, b"other scope")


@pytest.mark.parametrize("secret", ["", "wrong", "é", "0" * 32])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_requests_without_the_secret_are_forbidden(address: str, method: str, secret: str) -> None:
    ask(address, "PUT", "global/0", b"mine")
    answer = raw(
        address, f"{method} /{secret}:1/global/0 HTTP/1.1\r\nContent-Length: 4\r\n\r\nevil".encode()
    )
    assert answer.split()[1] == b"403"
    assert ask(address, "GET", "global/0") == (OK, b"mine")


def test_the_body_of_a_request_without_the_secret_is_not_waited_for(address: str) -> None:
    """Any host that reached the port could make the node of rank 0 hold 16 MB for each of its
    connections."""
    head = f"PUT /wrong:1/global/0 HTTP/1.1\r\nContent-Length: {rendezvous_http.MAX_VALUE}\r\n\r\n"
    assert raw(address, head.encode()).split()[1] == b"403"


def test_a_key_that_nobody_waits_for_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_http, "HOLD_S", 0.01)
    store = rendezvous_http.Store("secret")

    async def ask_for_nothing(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /secret:1/global/7 HTTP/1.1\r\n\r\n")
        reply = await reader.read()
        writer.close()
        return reply.split()[1]

    async def go() -> None:
        server = await asyncio.start_server(store.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await asyncio.gather(*(ask_for_nothing(port) for _ in range(3))) == [b"404"] * 3
        server.close()

    asyncio.run(go())
    assert store._waiters == {}


def test_each_store_has_its_own_secret() -> None:
    with serving("127.0.0.1") as one, serving("127.0.0.1") as other:
        secrets = {one.partition("/")[2], other.partition("/")[2]}
        assert len(secrets) == 2
        assert min(map(len, secrets)) >= 32
        assert ask(one, "PUT", "global/0", b"", secret=other.partition("/")[2])[0] == FORBIDDEN


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PUT /{secret}:1/global/0 HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"PUT /{secret}:1/global/0 HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PUT /{secret}:1/global/0 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"PUT /{secret}:1/global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nshort",
        b"POST /{secret}:1/global/0 HTTP/1.1\r\n\r\n",
        b"GET /{secret}:1/global HTTP/1.1\r\n\r\n",
        b"GET /{secret}:1/global/0/more HTTP/1.1\r\n\r\n",
        b"\x80" * 100 + b"\r\n\r\n",
        b"A" * 70_000,
    ],
)
def test_nonsense_is_refused_and_the_store_lives_on(
    address: str, impatient: None, request_: bytes
) -> None:
    secret = address.partition("/")[2].encode()
    assert raw(address, request_.replace(b"{secret}", secret)).split()[1] == b"400"
    assert ask(address, "PUT", "global/0", b"still") == (OK, b"")


def test_a_silent_client_blocks_no_other(address: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(address))):
        assert ask(address, "PUT", "global/0", b"") == (OK, b"")


def test_it_listens_on_its_address_alone() -> None:
    listener, address = listen("127.0.0.1")
    with listener:
        held = [
            c.laddr
            for c in connections()
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port_of(address)
        ]
        assert held == [("127.0.0.1", port_of(address))]


def test_leaving_closes_it() -> None:
    with serving("127.0.0.1") as address:
        port = port_of(address)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_closing_does_not_wait_for_open_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_http, "HOLD_S", 3600)
    with serving("127.0.0.1") as address:
        line = socket.create_connection(("127.0.0.1", port_of(address)))
        line.sendall(f"GET /{address.partition('/')[2]}:1/global/9 HTTP/1.1\r\n\r\n".encode())
        ask(address, "PUT", "global/0", b"")  # answered after the other was taken in
    line.settimeout(10)
    assert line.recv(100) == b""
    line.close()


def test_a_foreign_address_and_ipv6_are_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        listen("203.0.113.7")  # TEST-NET-3: no machine's own
    with pytest.raises(OSError, match=r"fd00::1: .* fabric\.interface="):
        open_http_store("fd00::1")
