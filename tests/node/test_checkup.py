"""The check-up of a node, request by request, in this process: real sockets, and a real torch in
another process."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.messages.checkup import (
    CallPeers,
    CheckHost,
    HostCheck,
    ListenForPeers,
    ReachStore,
    TryLibraries,
)
from raydist.node import checkup
from raydist.node.agent import RankAgent
from raydist.node.checkup import Checkup
from raydist.node.tracing import read_tracing
from tests.conftest import ROOT

SECRET = b"only this check-up knows"


def test_two_agents_listen_and_call_each_other_and_stop_when_they_close() -> None:
    async def go() -> tuple[list[str], str]:
        agents = [RankAgent(), RankAgent()]
        peers = [
            await agent.handle(ListenForPeers(f"127.0.0.{n}", SECRET))
            for n, agent in enumerate(agents, 1)
        ]
        trips = [
            await agent.handle(CallPeers(peers, index, SECRET, 10.0))
            for index, agent in enumerate(agents)
        ]
        await agents[1].close()
        again = await agents[0].handle(CallPeers(peers, 0, SECRET, 10.0))
        await agents[0].close()
        return [trip.kind for row in trips for trip in row], again[1].kind

    assert asyncio.run(go()) == (["fine"] * 4, "refused")


def test_an_agent_closes_without_a_check_up() -> None:
    asyncio.run(RankAgent().close())


def test_the_store_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert asyncio.run(Checkup().handle(ReachStore("127.0.0.1", port, 5.0))) == ""
    assert asyncio.run(Checkup().handle(ReachStore("127.0.0.1", port, 5.0))) == "Connection refused"


def test_a_store_that_does_not_answer_times_out() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
    ):
        port = full.getsockname()[1]
        assert (
            asyncio.run(Checkup().handle(ReachStore("127.0.0.1", port, 0.2)))
            == "no answer within 0.2 s"
        )


def test_libraries_run_in_another_process_with_the_ranks_variables() -> None:
    result = asyncio.run(Checkup().handle(TryLibraries(("gloo",), {"GLOO_SOCKET_IFNAME": "lo"})))
    assert result == {"gloo": {"addresses": ["127.0.0.1"]}}


def test_a_failed_trial_is_an_error_of_each_library() -> None:
    result = asyncio.run(
        Checkup().handle(TryLibraries(("gloo", "nccl"), {"PYTHONHASHSEED": "nonsense"}))
    )
    assert result.keys() == {"gloo", "nccl"}
    assert result["gloo"]["error"]


def test_a_host_check(tmp_path: Path) -> None:
    here = asyncio.run(Checkup().handle(CheckHost(str(tmp_path))))
    assert here == HostCheck(
        shm_error="",
        sees_folder=True,
        addresses=checkup.host_addresses(),
        tracing=read_tracing(),
    )
    assert (
        asyncio.run(Checkup().handle(CheckHost(str(tmp_path / "elsewhere")))).sees_folder is False
    )


def test_the_error_of_shared_memory_that_can_not_be_written(tmp_path: Path) -> None:
    assert checkup.shm_error(tmp_path) == ""
    assert checkup.shm_error(tmp_path / "missing") == "No such file or directory"
    assert list(tmp_path.iterdir()) == []
    code = "from raydist.node import checkup; print(checkup.shm_error())"
    full = subprocess.run(
        # -B: Python would cut off the compiled files that it writes, and fail to read them ever
        # after
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    assert full.stdout.strip() == "File too large"


def test_a_host_without_a_name_that_resolves_has_no_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert checkup.host_addresses()
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert checkup.host_addresses() == []
