"""The agent of a rank under mpirun: the processes that it serves."""

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

from raydist.messages.agent import Open, ProcessEnd, StartRank
from raydist.messages.mpirun import EndLaunchAgent, MpirunEnded, NextDaemons, RunDaemon
from raydist.node import mpi_child
from raydist.node.mpi_agent import ABORT, MpiRankAgent, exit_code_of, last_output
from raydist.shared.errors import LaunchError
from tests.mpi_programs import requires_openmpi

pytestmark = requires_openmpi
SECRET = "a" * 64


def with_agent(work: Callable[[MpiRankAgent], Awaitable[Any]]) -> Any:
    """Call `work` with an open agent of rank 0, alone on its node; return its value."""

    async def whole() -> Any:
        agent = MpiRankAgent()
        await agent.open(
            Open(
                run=os.urandom(4).hex(), node_id="here", node_ip="127.0.0.1", rank=0, interface=None, start="spawn",
                modules=(), threads=1, mpirun="auto", secret=SECRET, env={},
            )
        )  # fmt: skip
        try:
            return await asyncio.wait_for(work(agent), 30)
        finally:
            await agent.close()

    return asyncio.run(whole())


async def child(
    agent: MpiRankAgent, *words: str, secret: str = SECRET, **env: str
) -> asyncio.subprocess.Process:
    """mpirun's child, as mpirun would start it."""
    ours = {"RAYDIST_MPI_FOLDER": str(agent.folder), "RAYDIST_MPI_SECRET": secret, **env}
    command = [sys.executable, "-IS", mpi_child.__file__, *words]
    return await asyncio.create_subprocess_exec(*command, env=ours, stderr=subprocess.PIPE)


def test_a_launch_agent_ends_as_its_daemon_does() -> None:
    async def work(agent: MpiRankAgent) -> None:
        launched = await child(
            agent, "agent", "-x", "node1", '"/opt/bin/hydra_pmi_proxy"', "--proxy-id", "1"
        )
        (daemon,) = await agent.handle(NextDaemons())
        assert (daemon.host, daemon.argv) == (
            "node1",
            ('"/opt/bin/hydra_pmi_proxy"', "--proxy-id", "1"),
        )
        await agent.handle(
            EndLaunchAgent(daemon.agent, ProcessEnd(3, 0, 0.0, output="no such file\n"))
        )
        _, output = await launched.communicate()
        assert (launched.returncode, output) == (3, b"no such file\n")

    with_agent(work)


@pytest.mark.parametrize("words", [("agent", "node0", "/bin/prted"), ("rank",)])
def test_a_process_without_the_secret_is_refused(words: tuple[str, ...]) -> None:
    async def work(agent: MpiRankAgent) -> None:
        stranger = await child(agent, *words, secret="b" * 64, PMI_RANK="0")
        _, output = await stranger.communicate()
        assert (stranger.returncode, output) == (1, b"raydist: this is not mpirun's child\n")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agent.handle(NextDaemons()), 0.2)

    with_agent(work)


def test_a_second_child_of_the_same_rank_is_refused() -> None:
    async def work(agent: MpiRankAgent) -> None:
        first = await child(agent, "rank", PMI_RANK="0")
        while not (agent._listener is not None and agent._listener.child.done()):
            await asyncio.sleep(0.01)
        second = await child(agent, "rank", PMI_RANK="0")
        assert await second.wait() == 1
        assert first.returncode is None
        first.kill()
        await first.wait()

    with_agent(work)


def test_malformed_messages_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async def work(agent: MpiRankAgent) -> None:
        for packet in (b"", b"\xff\xfe", b"[]", b'"x"', json.dumps({"secret": SECRET}).encode()):
            knock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            knock.connect(str(agent.folder / "mpi-0"))
            if packet:
                knock.send(packet)
            knock.close()
        launched = await child(agent, "agent", "node0", "true")
        assert [daemon.host for daemon in await agent.handle(NextDaemons())] == ["node0"]
        launched.kill()
        await launched.wait()

    with_agent(work)
    assert caplog.text == ""  # asyncio logs exceptions that were never retrieved


@pytest.mark.parametrize(
    "words", [["touch", "{file}"], ["/bin/sh", "-c", "touch {file}"], ["prted;touch", "{file}"]]
)
def test_a_foreign_command_is_refused(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "made"

    async def work(agent: MpiRankAgent) -> None:
        with pytest.raises(LaunchError, match="that is not the daemon of"):
            await agent.handle(
                RunDaemon(tuple(word.replace("{file}", str(file)) for word in words), {})
            )

    with_agent(work)
    assert not file.exists()


def test_one_daemon_for_each_host() -> None:
    async def work(agent: MpiRankAgent) -> None:
        end = await agent.handle(RunDaemon(("prted", "--version"), {}))
        assert end.code == 0, end
        with pytest.raises(LaunchError, match="a second prted"):
            await agent.handle(RunDaemon(("prted", "--version"), {}))

    with_agent(work)


def test_the_socket_is_in_a_private_folder() -> None:
    async def work(agent: MpiRankAgent) -> None:
        assert agent.folder.stat().st_mode & 0o777 == 0o700

    with_agent(work)


def test_a_rank_that_mpirun_does_not_start_fails_with_the_reason() -> None:
    async def work(agent: MpiRankAgent) -> None:
        request = StartRank(
            0, {}, "{}", ("x.py",), "x.py", "", (), nccl_aloud=False, nccl_strict=False
        )
        starting = asyncio.ensure_future(agent.handle(request))
        await asyncio.sleep(0)
        await agent.handle(
            MpirunEnded("mpirun ended with code 213: No network interfaces were found")
        )
        with pytest.raises(LaunchError, match="code 213: No network interfaces"):
            await starting

    with_agent(work)


def test_of_a_log_only_the_end_is_read(tmp_path: Path) -> None:
    """What the driver has got of a log becomes a hole, of as many gigabytes as the rank has
    printed."""
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write("the end is nëar\n".encode())
    assert last_output(log).lstrip("\0") == "the end is nëar\n"
    log.write_text("short")
    assert last_output(log) == "short"


@pytest.mark.parametrize(("abort", "code"), [(9, 9), (-1, 255), (0, 1), (256, 1)])
def test_a_rank_that_called_mpi_abort_has_failed_with_whatever_code(abort: int, code: int) -> None:
    line = (
        f"Abort({abort}) on node 1 (rank 1 in comm 0): application called MPI_Abort("
        f"MPI_COMM_WORLD, {abort}) - process 1"
    )
    found = ABORT.search(f"before\n{line}\n")
    assert found is not None
    assert (exit_code_of(int(found[1])), found[0]) == (code, line)
