"""The small job that passes messages on: what it leaves behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from raydist.cluster import ray_private
from raydist.messages.operate import Refused
from raydist.messages.wire import decode
from raydist.watch.operate import job_link, relay_job
from raydist.watch.operate.connection import CommandLink, DriverAddress
from raydist.watch.operate.relay_job import CLOSED
from tests.conftest import ROOT
from tests.waiting import wait_until


def test_its_log_is_for_its_own_user_only(tmp_path: Path) -> None:
    """It has what `raydist exec` printed. Ray lets all users into its folder of logs."""
    path = tmp_path / "job-driver.log"
    command = [sys.executable, "-m", "raydist.watch.operate.relay_job", "raydist-none", "x"]
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    with path.open("a") as log:  # as Ray's JobSupervisor does
        path.chmod(0o644)
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
    assert path.stat().st_mode & 0o777 == 0o600
    first, last = path.read_bytes().splitlines()
    assert isinstance(decode(first), Refused)
    assert last == CLOSED


def test_it_ends_some_time_after_the_last_sign_of_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank stayed in the debugger until the end of the run, if a laptop had gone to sleep."""
    monkeypatch.setenv("RAY_ADDRESS", "here:1")
    monkeypatch.setattr(relay_job, "GONE_S", 0.5)
    monkeypatch.setattr(relay_job, "SIGNS_S", 0.2)
    looks: list[str] = []

    def take(address: str, name: str) -> bytes | None:
        looks.append(name)
        if len(looks) == 2:
            raise ConnectionError
        return b"here" if len(looks) < 5 else None

    monkeypatch.setattr(ray_private, "take_package", take)
    ours, drivers = socket.socketpair()
    relay_job.end_without_signs(CommandLink(ours), "job")
    assert len(looks) >= 5
    assert set(looks) == {"job-alive.zip"}
    assert CommandLink(ours).receive_line(0) is None
    drivers.close()


def test_a_command_shows_signs_of_life_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_link, "SIGN_S", 0.01)
    sent: list[str] = []
    monkeypatch.setattr(ray_private, "send_package", lambda client, name, data: sent.append(name))
    client: Any = None
    link = job_link.JobLink(client, None, cast("DriverAddress", None))
    thread = threading.Thread(target=link._show_life)
    thread.start()
    wait_until(lambda: len(sent) > 2, "signs of life", 60)
    link.close()
    thread.join(60)
    assert not thread.is_alive()
    assert {name.rpartition("-")[2] for name in sent} == {"alive.zip"}
