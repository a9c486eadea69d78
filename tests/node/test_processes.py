"""Processes that are ended, whoever started them."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from raydist.node import processes
from raydist.node.processes import end_all_of, identify


def test_a_process_that_may_not_be_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that `sudo` has started in a rank: its end would be waited for in vain, and the run end
    because of it."""
    with subprocess.Popen(["sleep", "60"]) as foreign, subprocess.Popen(["sleep", "60"]) as own:
        both = [identify(foreign.pid), identify(own.pid)]
        kill = processes.kill
        monkeypatch.setattr(
            processes, "kill", lambda pid, number: pid != foreign.pid and kill(pid, number)
        )
        assert asyncio.run(end_all_of(both, 5.0)) is None
        assert foreign.poll() is None
        assert own.wait() == -9
        foreign.kill()
