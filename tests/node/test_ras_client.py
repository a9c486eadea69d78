"""Asks a port what NCCL's RAS would answer there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from raydist.network.names import RAS_PORT
from raydist.network.ras import ADDRESS
from raydist.node import ras_client
from raydist.node.ras_client import RasPort, ask_ras

Served = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def asked(serve: Served) -> str:
    """Return what a rank's agent gets from this server."""

    async def run() -> str:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask_ras({ADDRESS: f"localhost:{port}"})

    return asyncio.run(run())


def speaks(*replies: str, answer: str) -> Served:
    """Return a server that replies to each line in turn, and gives the answer to `STATUS`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = [*replies]
        while (line := (await reader.readline()).decode().strip()) != "VERBOSE STATUS":
            assert line.split()[0] in ("CLIENT", "TIMEOUT", "SET")
            writer.write(f"{left.pop(0)}\n".encode())
        writer.write(answer.encode())
        writer.close()

    return serve


def test_the_answer_is_what_follows_the_replies_of_old_and_new_versions() -> None:
    new = ("SERVER PROTOCOL 2", "OK", "OK")
    long = "{" + " " * 300_000 + "}\n"  # it comes in parts
    assert asked(speaks(*new, answer=long)) == long
    old = ("SERVER PROTOCOL 2", "OK", "ERROR: Unknown command")
    assert asked(speaks(*old, answer="NCCL version 2.26.2\nOK\n")) == "NCCL version 2.26.2\nOK\n"


def test_one_that_says_nothing_or_does_not_end_costs_the_limit_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ras_client, "ALIVE_S", 0.2)
    monkeypatch.setattr(ras_client, "ANSWER_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other end gives up
        writer.close()  # since Python 3.12 a server waits for that

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"OK\nCommunicators...")
        await reader.read(1000)
        await reader.read()
        writer.close()

    assert asked(silent) == ""
    assert asked(endless) == "Communicators..."


def test_more_than_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "MOST", 100_000)
    assert len(asked(speaks("OK", "OK", "OK", answer="x" * 10_000_000))) < 1_000_000


@pytest.mark.parametrize("address", ["", "localhost", "localhost:port", "127.0.0.1:1", ":28028"])
def test_where_nothing_listens_there_is_no_answer(address: str) -> None:
    assert asyncio.run(ask_ras({ADDRESS: address})) == ""


def test_a_port_is_kept_for_nccl_and_nobody_else_gets_it() -> None:
    port = RasPort({ADDRESS: f"127.0.0.1:{RAS_PORT}", "A": "b"})
    host, _, number = port.env[ADDRESS].rpartition(":")
    assert (host, port.env["A"]) == ("127.0.0.1", "b")
    other = socket.socket()
    with pytest.raises(OSError, match="in use"):
        other.bind((host, int(number)))
    other.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(number)))
    nccl = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as rasClientInitSocket() does
        nccl.setsockopt(socket.SOL_SOCKET, option, 1)
    nccl.bind((host, int(number)))
    nccl.listen()
    for _ in range(20):  # each reaches it: the one that keeps the port gets none
        socket.create_connection((host, int(number))).close()
        nccl.accept()[0].close()
    nccl.close()
    port.close()
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind((host, int(number)))
    free.close()


def test_an_address_of_the_users_own_is_left_alone() -> None:
    env = {ADDRESS: "localhost:28028"}
    port = RasPort(env)
    assert port.env == env
    port.close()
