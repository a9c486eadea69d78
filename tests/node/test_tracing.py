"""What a node lets py-spy trace, and that py-spy then fails for the reason that is given."""

from __future__ import annotations

import asyncio
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.node import native_stack
from raydist.node.tracing import find_py_spy, read_tracing
from tests.conftest import ROOT
from tests.rig import requires_root
from tests.tracing import CALLS

SLEEPER = "import os, sys, time; {}; print('ready', flush=True); time.sleep(600)"
ASK = """
import asyncio, sys
from raydist.node import native_stack
from raydist.node.tracing import read_tracing
pid = int(sys.argv[1])
print(read_tracing(pid))
print(asyncio.run(native_stack.read(pid)))
"""
needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")


def test_it_is_read_from_proc(tmp_path: Path) -> None:
    for name, text in {
        "self/status": "CapEff:\t0000000000000000\nSeccomp:\t0\n",
        "7/status": "Uid:\t1000\t1000\t1000\t1000\n",
        "sys/kernel/yama/ptrace_scope": "2\n",
    }.items():
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(text)
    found = read_tracing(7, tmp_path)
    assert (found.yama, found.capable, found.filtered, found.rank_user) == (2, False, False, 1000)
    everything = f"CapEff:\t{1 << 19:016x}\nSeccomp:\t0\n"
    (tmp_path / "proc/self/status").write_text(everything)
    assert read_tracing(0, tmp_path).capable
    assert read_tracing(0, tmp_path).rank_user == read_tracing(0, tmp_path).agent_user


def test_without_py_spy_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    found = asyncio.run(native_stack.read(1))
    assert (found.text, found.error) == ("", "py-spy is not installed: pip install py-spy")


def ask(wrapper: list[str], first: str = "pass") -> tuple[str, str]:
    """Return, of a process in a wrapper, what it may trace, and what it reads of another.

    `first`: what the other does.
    """
    command = [sys.executable, "-S", "-c", SLEEPER.format(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            done = subprocess.run(
                [*wrapper, sys.executable, "-c", ASK, str(other.pid)],
                cwd=ROOT, capture_output=True, text=True, check=True,
            )  # fmt: skip
        finally:
            other.kill()
    tracing, stack = done.stdout.splitlines()
    return tracing, stack


@needs_py_spy
@pytest.mark.skipif(platform.machine() not in CALLS, reason="the filter is for other machines")
def test_a_seccomp_filter_is_found_and_is_the_reason() -> None:
    tracing, stack = ask([sys.executable, "-m", "tests.tracing"])
    assert "filtered=True" in tracing
    assert "the container's seccomp profile forbids ptrace: docker run" in stack


@needs_py_spy
@requires_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_rank_of_another_user_is_out_of_reach_without_the_capability() -> None:
    wrapper = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    tracing, stack = ask(wrapper, "os.setuid(65534)")
    assert "capable=False" in tracing
    assert "rank_user=65534" in tracing
    assert "the rank runs as user 65534 and its agent, without CAP_SYS_PTRACE, as user 0" in stack
