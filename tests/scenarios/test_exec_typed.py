"""`raydist exec -it` and `-i` beside a rank, typed by a person into a terminal or piped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.leftovers import ended
from tests.programs import Program
from tests.scenarios.test_operate import operate, refusal, written
from tests.terminals import Terminal
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
EXEC = [sys.executable, "-m", "raydist.cli", "exec"]
PROGRAM = """
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
"""
SHELL = ["--", "bash", "--norc", "--noprofile"]
PROMPT = r"[$#] $"
NO_WINCH = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Becomes a program that SIGWINCH does not reach."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("typed")
    (folder / "reduces.py").write_text(textwrap.dedent(PROGRAM))
    words = ("script=reduces.py", "scale=1x2", "group=inline", "env.HISTFILE=/dev/null")
    program = Program(folder, *words)
    program.wait_until(lambda: "reduces.py" in operate(folder, "stacks").stdout, "the ranks")
    yield program
    assert program.process.poll() is None, program.screen  # no command has disturbed the run
    program.process.kill()
    program.process.wait()
    assert program.leftovers() == []


def options(program: Program) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    return {"cwd": program.folder, "env": env}


@pytest.fixture
def shell(program: Program) -> Iterator[Terminal]:
    """A shell beside rank 1, in a terminal."""
    with Terminal([*EXEC, "rank=1", "-it", *SHELL], **options(program)) as terminal:
        terminal.wait_for(PROMPT)
        yield terminal


def left_alone(terminal: Terminal) -> None:
    """Assert that the terminal is as it was before the command."""
    assert terminal.modes == terminal.modes_before


def remote_pid(terminal: Terminal) -> int:
    """The pid of the shell beside the rank."""
    terminal.enter("echo pid=$$=\n")
    terminal.wait_for(r"pid=\d+=")
    found = re.search(r"pid=(\d+)=", terminal.shown)
    assert found is not None
    return int(found[1])


def test_a_shell_beside_a_rank_is_as_one_in_a_terminal(shell: Terminal, program: Program) -> None:
    assert shell.modes != shell.modes_before
    shell.enter("echo rank=$RANK= in $PWD on $TERM; tty\n")
    shell.wait_for(rf"rank=1= in {program.folder} on xterm-256color\r\n/dev/pts/\d+\r\n")
    assert shell.shown.count("echo rank=$RANK=") == 1  # it is echoed once

    shell.enter("stty size\n")
    shell.wait_for(r"\r24 80\r\n")
    waits = "while :; do sleep 0.1; done"
    shell.enter(f"sh -c 'trap \"stty size; exit\" WINCH; echo ready; {waits}'\n")
    shell.wait_for(r"\rready\r\n")
    shell.resize(50, 132)
    shell.wait_for(r"\r\n50 132\r\n")

    pid = remote_pid(shell)
    shell.enter("sleep 3600\n")
    wait_until(lambda: children(pid) == ["sleep"], "the sleep")
    shell.enter("\x03")
    shell.enter("echo code=$?=\n")
    shell.wait_for(rf"code={128 + signal.SIGINT}=")
    assert shell.process.poll() is None  # Ctrl-C has reached the sleep only

    shell.enter("exit 7\n")
    assert shell.wait() == 7
    left_alone(shell)
    assert ended(pid)
    (event,) = [each for each in program.events("operated") if each["command"] == "exec"][-1:]
    assert event["text"] == "bash on rank 1, exit code 7"
    assert "RANK" not in (program.run_dir / "events.jsonl").read_text()


def below(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def children(pid: int) -> list[str]:
    return [child.name() for child in psutil.Process(pid).children()]


def test_without_a_command_it_is_the_shell_of_the_person_and_ctrl_d_ends_it(
    program: Program,
) -> None:
    with Terminal([*EXEC, "rank=0", "-it"], **options(program)) as terminal:
        terminal.wait_for(r"[$#] ?(\x1b\S*)?$")
        terminal.enter("echo shell=$0= rank=$RANK=\n")
        terminal.wait_for(r"shell=\S*sh= rank=0=\r")
        terminal.enter("\x04")
        assert terminal.wait() == 0
        left_alone(terminal)


def test_what_is_typed_into_a_new_size_comes_after_it(program: Program) -> None:
    """The signal that tells of the size may be later than the typed bytes; here it never comes."""
    late = [sys.executable, "-c", NO_WINCH, *EXEC]
    with Terminal([*late, "rank=1", "-it", *SHELL], **options(program)) as terminal:
        terminal.wait_for(PROMPT)
        terminal.resize(30, 99)
        terminal.enter("stty size\n")
        terminal.wait_for(r"\r30 99\r\n")
        terminal.enter("exit\n")
        assert terminal.wait() == 0


def test_a_terminal_gets_all_that_a_command_prints(program: Program) -> None:
    words = ["rank=0", "-it", "--", "sh", "-c", "yes | head -c 20000000; echo end"]
    with Terminal([*EXEC, *words], **options(program)) as terminal:
        assert terminal.wait() == 0
        assert bytes(terminal.bytes) == b"y\r\n" * 10_000_000 + b"end\r\n"


def test_a_terminal_that_shows_nothing_stops_the_command(program: Program, tmp_path: Path) -> None:
    """What `yes` prints is kept nowhere without a limit: it waits."""
    script = f"echo $$ > {tmp_path}/pid; exec yes"
    words = [*EXEC, "rank=0", "-it", "--", "sh", "-c", script]
    with Terminal(words, reads=False, **options(program)) as terminal:
        wait_until(lambda: written(tmp_path / "pid"), "its pid", 60)
        yes = psutil.Process(int((tmp_path / "pid").read_text()))
        assert waits(yes), "yes goes on"
        printed = yes.io_counters().write_chars
        assert printed < 30_000_000
        terminal.process.kill()
        assert ended(yes.pid)


def waits(process: psutil.Process, within: int = 60) -> bool:
    """Return whether a process ends printing for two seconds."""
    before = -1
    for _ in range(within // 2):
        printed = process.io_counters().write_chars
        if printed == before:
            return True
        before = printed
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(2)
    return False


def close_window(terminal: Terminal) -> None:
    terminal.close()


def kill(terminal: Terminal) -> None:
    terminal.process.kill()


def terminate(terminal: Terminal) -> None:
    terminal.process.terminate()
    assert terminal.wait() == 128 + signal.SIGTERM
    left_alone(terminal)


@pytest.mark.parametrize("leave", [close_window, kill, terminate])
def test_who_leaves_ends_the_command(leave: Callable[[Terminal], None], shell: Terminal) -> None:
    """What the shell has left in the background ends with it."""
    pid = remote_pid(shell)
    shell.enter("(trap '' HUP; sleep 3601; true) &\n")
    wait_until(lambda: len(below(pid)) == 2, "the background job")
    background = below(pid)
    leave(shell)
    assert ended(pid)
    assert all(ended(each) for each in background)
    assert ended(shell.process.pid)


def test_a_command_has_time_to_end_when_the_window_is_closed(
    program: Program, tmp_path: Path
) -> None:
    script = (
        f"trap 'echo hung up > {tmp_path}/hup; exit' HUP; echo here; while :; do sleep 0.1; done"
    )
    with Terminal(
        [*EXEC, "rank=0", "-it", "--", "sh", "-c", script], **options(program)
    ) as terminal:
        terminal.wait_for("here")
        terminal.close()
        wait_until(lambda: written(tmp_path / "hup"), "the SIGHUP", 60)


def test_a_command_that_ignores_the_hang_up_is_killed(program: Program) -> None:
    words = ["rank=0", "-it", "--", "sh", "-c", "trap '' HUP; echo pid=$$=; sleep 3600; sleep 3600"]
    with Terminal([*EXEC, *words], **options(program)) as terminal:
        terminal.wait_for(r"pid=\d+=")
        found = re.search(r"pid=(\d+)=", terminal.shown)
        assert found is not None
        terminal.close()
        assert ended(int(found[1]))


def test_an_error_of_the_rank_s_node_is_shown_and_the_terminal_is_put_back(
    program: Program,
) -> None:
    words = ["rank=0", "-it", "--", "no-such-program"]
    with Terminal([*EXEC, *words], **options(program)) as terminal:
        assert terminal.wait() == 127
        assert "no-such-program" in terminal.shown
        left_alone(terminal)


def piped(program: Program, data: bytes, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Type `… | raydist exec WORDS`."""
    return subprocess.run(
        [*EXEC, *words], input=data, capture_output=True, timeout=120, **options(program)
    )


def test_a_command_reads_what_is_piped_into_it(program: Program) -> None:
    data = bytes(range(256)) * 40_000
    done = piped(program, data, "rank=1", "-i", "--", "cat")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data
    without = piped(program, b"hi\n", "rank=1", "--", "cat")
    assert (without.returncode, without.stdout) == (0, b"")
    unread = piped(program, data, "rank=1", "-i", "--", "sh", "-c", "exit 3")
    assert unread.returncode == 3
    empty = piped(program, b"", "rank=1", "-i", "--", "sh", "-c", "tty; cat")
    assert (empty.returncode, empty.stdout) == (0, b"not a tty\n")


def test_a_command_that_does_not_read_stops_the_pipe(program: Program, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 3600"
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as source:
        running = subprocess.Popen(
            [*EXEC, "rank=0", "-i", "--", "sh", "-c", script],
            stdin=source.stdout,
            **options(program),
        )
        wait_until(lambda: written(tmp_path / "pid"), "its pid", 60)
        yes = psutil.Process(source.pid)
        assert waits(yes), "yes goes on"
        assert yes.io_counters().write_chars < 3_000_000
        running.send_signal(signal.SIGINT)  # reaches the command although the pipe is full
        assert running.wait(60) == 128 + signal.SIGINT
        source.kill()


def test_a_pipe_that_is_closed_ends_the_command(program: Program, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec yes"
    with subprocess.Popen(
        [*EXEC, "rank=0", "-i", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        **options(program),
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(4) == b"y\ny\n"
        running.stdout.close()
        assert running.wait(60) == 128 + signal.SIGPIPE
        assert running.stderr.read() == b""
    assert ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["rank=0", "-it"], "type -i to forward"),
        (["rank=0", "-t", "--", "ls"], "type -it"),
        (["--all", "-i", "--", "cat"], "type rank=0 -i"),
        (["rank=0,1", "-it"], "type rank=0 -it"),
        (["rank=0", "-i"], "type it after --"),
        (["-i", "--", "cat"], "type rank=0"),
    ],
    ids=" ".join,
)
def test_what_can_not_be_passed_on_is_refused(
    words: list[str],
    instead: str,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(program.folder)
    assert instead in refusal(capsys, "exec", *words)
