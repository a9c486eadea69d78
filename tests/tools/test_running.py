"""The run and the ranks that a command names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.launch.changes import Changes
from raydist.shared.errors import ConfigError
from raydist.shared.events import Events
from raydist.shared.record_names import EVENTS
from raydist.tools import stop, watch
from raydist.tools.running import find_running, ranks_of_text
from raydist.watch.operate.answers import OperatedRun
from raydist.watch.operate.connection import FILE, read_address
from raydist.watch.operate.relay import connect_here
from raydist.watch.operate.server import OperateServer
from tests.conftest import ROOT
from tests.rig import requires_root


@contextmanager
def running(folder: Path) -> Iterator[list[object]]:
    """Let a run be there whose driver answers; yield the stops that it is asked for."""
    stops = list[object]()
    nothing: Any = None
    stopper: Any = type("Stopper", (), {"ends_at_once": True, "stop": lambda self, why: stops.append(why)})()  # fmt: skip
    with Events(folder / EVENTS) as events:
        operated = OperatedRun(folder, nothing, events, "", stopper, Changes(), True)
        with OperateServer(operated):
            yield stops


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([""], "RUN: it is empty; type a run folder"),
        (["--job", ""], "--job : it is empty"),
        (["--address", "http://head:8265"], "use --job ID"),
    ],
)
@pytest.mark.parametrize("command", [stop.main, watch.main])
def test_an_empty_word_does_not_stop_or_show_the_newest_run(
    command: Callable[[list[str]], int],
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `raydist stop --job "$ID"` where ID is not set."""
    monkeypatch.chdir(tmp_path)
    with running(tmp_path / "runs" / "1") as stops:
        assert command(words) == 2
    assert stops == []
    assert reason in capsys.readouterr().err


def test_a_killed_driver_hides_no_run_that_runs(tmp_path: Path) -> None:
    killed, runs = tmp_path / "killed", tmp_path / "runs"
    with running(runs):
        address = read_address(runs)
        assert address is not None
        killed.mkdir()
        (killed / EVENTS).touch()
        replace(address, socket="raydist-gone").write(killed)
        os.utime(killed / FILE, (2e9, 2e9))
        assert find_running(str(tmp_path))[0] == runs
        assert find_running(str(killed))[0] == killed


def test_a_folder_that_may_not_be_entered_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    home = tmp_path / "home"
    home.mkdir(0)
    root = os.geteuid() == 0
    try:
        if root:  # which may enter all folders
            os.seteuid(65534)
        assert stop.main([str(home / "runs")]) == 2
    finally:
        if root:
            os.seteuid(0)
    assert ": Permission denied" in capsys.readouterr().err


@pytest.mark.root
@requires_root
def test_root_may_operate_the_run_of_another_user() -> None:
    """The driver accepts root, but the command hung up."""
    name = f"raydist-{os.getpid()}-of-nobody"
    code = f"""
import os, socket
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0{name}")
listener.listen()
print("listens", flush=True)
listener.accept()[0].recv(1)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listens\n"
        connect_here(name).close()


def test_a_closed_pipe_is_no_error() -> None:
    """As in `raydist plan … | head`."""
    command = [sys.executable, "-m", "raydist.tools.plan", "group=inline", "scale=1x2", "--json"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ranks_are_numbers_and_ranges() -> None:
    assert ranks_of_text("3") == [3]
    assert ranks_of_text("0,2-4") == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["", "x", "1-", "-1"], "must be ranks"),
        (["7-4", "0,3-1"], "must be two ranks, the smaller one first"),
        (["20000000", "0-20000000", "20000000-3"], "no run has so many ranks"),
    ],
)
def test_no_mistyped_range_stands_for_all_ranks_or_for_too_many(
    texts: list[str], reason: str
) -> None:
    for text in texts:
        with pytest.raises(ConfigError, match=rf"rank={text}: .*{reason}"):
            ranks_of_text(text)
