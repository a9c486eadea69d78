"""The door of a seat under mpirun: who is let in, and what is done for them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.errors import LaunchError
from raydist.node import mpi_child
from raydist.node.mpi_seat import MpiSeat
from tests.mpi_programs import requires_openmpi

pytestmark = requires_openmpi
SECRET = "a" * 64


def with_seat(work: Callable[[MpiSeat], Awaitable[Any]]) -> Any:
    """What `work` gives back for an open seat: rank 0, alone on its node."""

    async def whole() -> Any:
        seat = MpiSeat()
        await seat.open(
            {
                "run": os.urandom(4).hex(), "node": "here", "rank": 0, "lead": True, "ip": "127.0.0.1", "store": None,
                "interface": None, "start": "spawn", "modules": [], "threads": 1, "shared": None, "mpirun": "auto",
                "secret": SECRET, "home": None, "env": {},
            }
        )  # fmt: skip
        try:
            return await asyncio.wait_for(work(seat), 30)
        finally:
            await seat.close()

    return asyncio.run(whole())


async def child(seat: MpiSeat, *words: str, secret: str = SECRET, **env: str) -> asyncio.subprocess.Process:
    """mpirun's child, as mpirun would start it."""
    ours = {"RAYDIST_MPI_FOLDER": str(seat.folder), "RAYDIST_MPI_SECRET": secret, **env}
    command = [sys.executable, "-IS", mpi_child.__file__, *words]
    return await asyncio.create_subprocess_exec(*command, env=ours, stderr=subprocess.PIPE)


def test_an_agent_is_heard_and_ends_as_the_daemon_did() -> None:
    async def work(seat: MpiSeat) -> None:
        agent = await child(seat, "agent", "-x", "node1", '"/opt/bin/hydra_pmi_proxy"', "--proxy-id", "1")
        (asked,) = await seat.asked()
        assert (asked["host"], asked["words"]) == ("node1", ['"/opt/bin/hydra_pmi_proxy"', "--proxy-id", "1"])
        await seat.answered(asked["id"], {"code": 3, "signal": 0, "said": "no such file\n"})
        _, said = await agent.communicate()
        assert (agent.returncode, said) == (3, b"no such file\n")

    with_seat(work)


@pytest.mark.parametrize("words", [("agent", "node0", "/bin/prted"), ("rank",)])
def test_without_the_secret_nobody_is_heard(words: tuple[str, ...]) -> None:
    async def work(seat: MpiSeat) -> None:
        stranger = await child(seat, *words, secret="b" * 64, PMI_RANK="0")
        _, said = await stranger.communicate()
        assert (stranger.returncode, said) == (1, b"raydist: this is not mpirun's child\n")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(seat.asked(), 0.2)

    with_seat(work)


def test_a_second_child_of_the_same_rank_is_sent_away() -> None:
    async def work(seat: MpiSeat) -> None:
        first = await child(seat, "rank", PMI_RANK="0")
        while not (seat._child is not None and seat._child.done()):
            await asyncio.sleep(0.01)
        second = await child(seat, "rank", PMI_RANK="0")
        assert await second.wait() == 1
        assert first.returncode is None
        first.kill()
        await first.wait()

    with_seat(work)


def test_nonsense_at_the_door_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def work(seat: MpiSeat) -> None:
        for packet in (b"", b"\xff\xfe", b"[]", b'"x"', json.dumps({"secret": SECRET}).encode()):
            knock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            knock.connect(str(seat.folder / "mpi-0"))
            if packet:
                knock.send(packet)
            knock.close()
        agent = await child(seat, "agent", "node0", "true")
        assert [asked["host"] for asked in await seat.asked()] == ["node0"]
        agent.kill()
        await agent.wait()

    with_seat(work)
    assert caplog.text == ""  # asyncio logs the exceptions that nobody asked for


@pytest.mark.parametrize("words", [["touch", "{file}"], ["/bin/sh", "-c", "touch {file}"], ["prted;touch", "{file}"]])
def test_a_foreign_command_is_refused(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "made"

    async def work(seat: MpiSeat) -> None:
        with pytest.raises(LaunchError, match="that is not the daemon of"):
            await seat.daemon([word.replace("{file}", str(file)) for word in words], {})

    with_seat(work)
    assert not file.exists()


def test_one_daemon_for_each_host() -> None:
    async def work(seat: MpiSeat) -> None:
        end = await seat.daemon(["prted", "--version"], {})
        assert end["code"] == 0, end
        with pytest.raises(LaunchError, match="a second prted"):
            await seat.daemon(["prted", "--version"], {})

    with_seat(work)


def test_its_door_is_nobody_elses() -> None:
    async def work(seat: MpiSeat) -> None:
        assert seat.folder.stat().st_mode & 0o777 == 0o700

    with_seat(work)


def test_a_rank_that_nobody_comes_for_is_told_why() -> None:
    async def work(seat: MpiSeat) -> None:
        starting = asyncio.ensure_future(seat.start({"script": "x.py"}, None))
        await asyncio.sleep(0)
        await seat.dismiss("mpirun ended with code 213: No network interfaces were found")
        with pytest.raises(LaunchError, match="code 213: No network interfaces"):
            await starting

    with_seat(work)
