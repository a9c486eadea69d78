"""Processes that are ended, whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import psutil
import pytest

from raydist.node import processes
from raydist.node.processes import end_all_of, identify, wants_cpu
from tests.waiting import wait_until


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


def test_a_signal_for_a_group_reaches_what_a_shell_has_started() -> None:
    """Ctrl-C of `raydist exec` ended the shell's command only at the second time: the shell went on
    with the next one."""
    command = ["bash", "-c", "sleep 60; echo the next command"]
    shell = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: bool(psutil.Process(shell.pid).children()), "sleep runs")
    assert processes.kill(shell.pid, signal.SIGINT, group=True)
    assert shell.communicate(timeout=30)[0] == b""
    assert shell.returncode in (-signal.SIGINT, 128 + signal.SIGINT)


def test_a_process_wants_a_cpu_while_one_of_its_threads_runs() -> None:
    assert wants_cpu(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as asleep:
        wait_until(lambda: not wants_cpu(asleep.pid), "it sleeps")
        asleep.kill()
        asleep.wait()
        assert not wants_cpu(asleep.pid)
