"""A node's part in a check-up, step by step, in this process: real sockets, a real torch beside it."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.node import checkup
from raydist.node.checkup import Checkup
from raydist.node.seat import Seat
from tests.conftest import ROOT

SECRET = b"only this check-up knows"


def test_two_seats_listen_and_call_each_other_and_stop_when_they_close() -> None:
    async def go() -> tuple[list[str], str]:
        seats = [Seat(), Seat()]
        peers = [await seat.check("listen", f"127.0.0.{n}", SECRET) for n, seat in enumerate(seats, 1)]
        trips = [await seat.check("call", peers, index, SECRET, 10.0) for index, seat in enumerate(seats)]
        await seats[1].close()
        again = await seats[0].check("call", peers, 0, SECRET, 10.0)
        await seats[0].close()
        return [trip.kind for row in trips for trip in row], again[1].kind

    assert asyncio.run(go()) == (["fine"] * 4, "refused")


def test_a_seat_that_was_never_checked_closes_as_ever() -> None:
    asyncio.run(Seat().close())


def test_the_store_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        assert asyncio.run(Checkup().reach("127.0.0.1", port, 5.0)) == ""
    assert asyncio.run(Checkup().reach("127.0.0.1", port, 5.0)) == "Connection refused"


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port = full.getsockname()[1]
        assert asyncio.run(Checkup().reach("127.0.0.1", port, 0.2)) == "no answer within 0.2 s"


def test_libraries_are_tried_with_the_ranks_variables_and_never_in_this_process() -> None:
    found = asyncio.run(Checkup().try_out(["gloo"], {"GLOO_SOCKET_IFNAME": "lo"}))
    assert found == {"gloo": {"addresses": ["127.0.0.1"]}}


def test_a_try_that_ends_otherwise_is_an_error_of_each_library() -> None:
    found = asyncio.run(Checkup().try_out(["gloo", "nccl"], {"PYTHONHASHSEED": "nonsense"}))
    assert found.keys() == {"gloo", "nccl"}
    assert found["gloo"]["error"]


def test_looking_says_what_is_there(tmp_path: Path) -> None:
    here = asyncio.run(Checkup().look(str(tmp_path)))
    assert (here["shm"], here["sees"]) == ("", True)
    assert here["name"] == checkup.own_addresses()
    assert asyncio.run(Checkup().look(str(tmp_path / "elsewhere")))["sees"] is False


def test_shared_memory_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    assert checkup.shm_refuses(tmp_path) == ""
    assert checkup.shm_refuses(tmp_path / "missing") == "No such file or directory"
    assert list(tmp_path.iterdir()) == []
    code = "from raydist.node import checkup; print(checkup.shm_refuses())"
    full = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    assert full.stdout.strip() == "File too large"


def test_a_host_without_a_name_that_resolves_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkup.own_addresses()
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert checkup.own_addresses() == []
