"""`raydist debug --vscode`: an editor debugs a rank, by debugpy; the run goes on undisturbed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raydist.tools import editor_port
from tests.conftest import ROOT
from tests.dap import Editor
from tests.programs import Program
from tests.rig import requires_root
from tests.scenarios.test_operate import debug, operate
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
LIMIT_S = 120
LIMITS = ("hang.after_s=5", "hang.limit_s=10", "restart=none")
"""A rank of a busy machine may be silent for seconds."""
PROGRAM = """
    import os
    import time
    import torch
    import torch.distributed as dist
    import raydist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def work(step):
        scale = step * 2
        if rank == 1 and os.path.exists("hold"):
            breakpoint()
        return scale

    step, ends = 0, torch.zeros(1)
    while not ends.item():
        step += 1
        scale = work(step)
        ends += float(os.path.exists("end"))
        dist.all_reduce(ends)
        raydist.report(step=step, scale=scale)
        time.sleep(0.01)
"""
FILE = "debugged.py"


def line_of(text: str) -> int:
    return textwrap.dedent(PROGRAM).splitlines().index(text) + 1


SCALE = line_of("    return scale")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A run that editors come to, one after the other; it ends as without them."""
    folder = tmp_path_factory.mktemp("debugged")
    (folder / FILE).write_text(textwrap.dedent(PROGRAM))
    program = Program(folder, f"script={FILE}", "scale=1x2", "group=inline", *LIMITS)
    program.wait_for_step(3)
    yield program
    assert program.process.poll() is None, program.screen
    (folder / "end").touch()
    assert program.wait(LIMIT_S) == 0


class Command:
    """A running `raydist debug --vscode` that waits for the editor."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raydist.cli", "debug", *words, "--vscode", "--port", "0"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        text = ""
        for line in self.process.stdout:
            if line.startswith("waiting for VS Code"):
                break
            text += line
        assert self.process.poll() is None, text
        self.launch: dict[str, Any] = json.loads(text)

    def end(self) -> str:
        """Return what it has said since, once it has ended by itself."""
        said, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, said
        return said


@contextmanager
def command(folder: Path, *words: str) -> Iterator[Command]:
    """Type `raydist debug WORDS --vscode`; nothing of it stays."""
    started = Command(folder, *words)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def goes_on(program: Program) -> None:
    """Assert that both ranks make further steps."""
    reached = max(each["step"] for each in program.events("report"))
    program.wait_for_step(reached + 20, LIMIT_S)
    assert program.events("hang", "failure") == []


def state(program: Program, rank: int) -> str:
    done = operate(program.folder, "ranks", "--json")
    return str(json.loads(done.stdout.splitlines()[rank])["state"])


def test_an_editor_debugs_a_rank_and_the_run_goes_on(program: Program) -> None:
    file = str(program.folder / FILE)
    before = [each["command"] for each in program.events("operated")].count("debug")
    with command(program.folder, "rank=1") as typed:
        assert typed.launch["connect"]["host"] == "127.0.0.1"
        editor = Editor(typed.launch, program.folder)
        editor.attach({file: [SCALE]})
        thread, frame = editor.stopped_at()
        assert (frame["source"]["path"], frame["line"], frame["name"]) == (file, SCALE, "work")
        step = int(editor.evaluate("step", frame))
        assert editor.evaluate("scale == step * 2", frame) == "True"
        assert editor.evaluate("__import__('os').environ['RANK']", frame) == "'1'"
        names = {each["name"] for each in editor.request("threads")["threads"]}
        assert not [name for name in names if name.startswith("raydist")]
        # longer than a hang lasts until it ends a run: the hang watch rests
        wait_until(lambda: state(program, 1).startswith("debugger"), "the state", LIMIT_S)
        with pytest.raises(subprocess.TimeoutExpired):
            program.process.wait(13)
        assert len(operate(program.folder, "stacks").stdout.splitlines()) > 2
        second = operate(program.folder, "debug", "rank=1")
        assert (second.returncode, second.stdout) == (2, "")
        assert "somebody debugs rank 1 already" in second.stderr

        editor.request("continue", threadId=thread)
        thread, frame = editor.stopped_at()
        assert int(editor.evaluate("step", frame)) == step + 1
        editor.request("next", threadId=thread)
        thread, frame = editor.stopped_at()
        assert frame["line"] != SCALE
        editor.set_breakpoints(file, [])
        editor.request("continue", threadId=thread)
        goes_on(program)
        editor.request("disconnect", terminateDebuggee=True)  # it does not
        editor.close()
        assert typed.end().endswith("the rank continues\n")
    goes_on(program)
    assert not state(program, 1).startswith("debugger")
    operated = [each["command"] for each in program.events("operated")]
    assert operated.count("debug") == before + 1

    # pdb afterwards; the rank may be inside a function of torch, which does not know `rank`
    said = debug(program.folder, "p __import__('os').environ['RANK']\nq\n", "rank=1")
    assert "(rank 1) '1'" in said
    goes_on(program)


def leave_at_once(typed: Command, editor: Editor) -> None:
    editor.close()
    assert typed.end().endswith("the rank continues\n")


def kill_the_command(typed: Command, editor: Editor) -> None:
    typed.process.kill()
    editor.close()


def press_ctrl_c(typed: Command, editor: Editor) -> None:
    typed.process.send_signal(signal.SIGINT)
    assert typed.process.wait(LIMIT_S) == 128 + signal.SIGINT
    editor.close()


def terminate(typed: Command, editor: Editor) -> None:
    editor.request("terminate")
    editor.close()
    assert typed.end().endswith("the rank continues\n")


@pytest.mark.parametrize("leave", [leave_at_once, kill_the_command, press_ctrl_c, terminate])
def test_who_leaves_a_rank_that_is_stopped_lets_it_go_on(
    leave: Callable[[Command, Editor], None], program: Program
) -> None:
    """The next test, in the same run, is another session."""
    file = str(program.folder / FILE)
    with command(program.folder, "rank=0") as typed:
        editor = Editor(typed.launch, program.folder)
        editor.attach({file: [SCALE]})
        editor.stopped_at()
        leave(typed, editor)
    goes_on(program)


def test_an_editor_takes_over_where_a_breakpoint_waits(program: Program) -> None:
    (program.folder / "hold").touch()
    program.wait_until(lambda: "rank 1 waits at" in program.screen, "the breakpoint", LIMIT_S)
    with command(program.folder) as typed:
        editor = Editor(typed.launch, program.folder)
        editor.attach({})
        thread, frame = editor.stopped_at()
        assert frame["name"] == "work"
        assert abs(frame["line"] - SCALE) <= 1
        step = int(editor.evaluate("step", frame))
        editor.request("continue", threadId=thread)
        thread, frame = editor.stopped_at()  # breakpoint() stops in the editor, too
        assert int(editor.evaluate("step", frame)) == step + 1
        (program.folder / "hold").unlink()
        editor.request("continue", threadId=thread)
        editor.request("disconnect")
        editor.close()
        assert typed.end().endswith("the rank continues\n")
    goes_on(program)
    assert len(program.events("held")) == len(program.events("released")) == 1


def test_nothing_listens_on_the_rank_s_node(program: Program) -> None:
    pid = {each["rank"]: each["pid"] for each in program.events("began")}[1]
    with command(program.folder, "rank=1") as typed:
        before = listening(pid)
        editor = Editor(typed.launch, program.folder)
        editor.attach({})
        assert listening(pid) == before
        with pytest.raises(OSError, match="refused"):  # nor does the command any more
            socket.create_connection(("127.0.0.1", typed.launch["connect"]["port"]), 5)
        editor.request("disconnect")
        editor.close()
        typed.end()


def listening(pid: int) -> set[str]:
    """The sockets of a process that listen."""
    import psutil

    found = psutil.Process(pid).net_connections()
    return {str(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.root
@requires_root
def test_another_user_of_this_machine_is_refused(program: Program) -> None:
    with command(program.folder, "rank=1") as typed:
        port = typed.launch["connect"]["port"]
        code = (
            "import os, socket; os.setuid(65534); sock = socket.socket(); "
            f"sock.connect(('127.0.0.1', {port})); print(len(sock.recv(10)))"
        )
        said = subprocess.check_output([sys.executable, "-c", code], text=True)
        assert said == "0\n"
        # What it sent before it closed must not reach debugpy.
        code = (
            "import os, socket; os.setuid(65534); "
            f"sock = socket.socket(); sock.connect(('127.0.0.1', {port})); sock.send(b'Content-')"
        )
        typed.process.send_signal(signal.SIGSTOP)  # until the connection is closed
        subprocess.check_call([sys.executable, "-c", code])
        typed.process.send_signal(signal.SIGCONT)
        editor = Editor(typed.launch, program.folder)  # it waits for the right one
        editor.attach({})
        editor.request("disconnect")
        editor.close()
        typed.end()


@pytest.mark.parametrize(("state", "user"), [("01", 1000), ("05", editor_port.NOBODY)])
def test_a_connection_that_is_closed_proves_no_user(
    state: str, user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of Linux name user 0 for it."""
    (table := tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        f"   0: 0100007F:C8F0 0100007F:162E {state} 00000000:00000000 03:00001763 00000000 "
        f"{1000 if state == '01' else 0} 0 0 3 0\n"
    )
    monkeypatch.setattr(editor_port, "TCP_TABLE", table)
    assert editor_port.user_of(("127.0.0.1", 0xC8F0)) == user
    assert editor_port.user_of(("127.0.0.1", 0xC8F1)) == editor_port.NOBODY


def test_a_session_begins_once_the_one_before_has_ended() -> None:
    """debugpy takes up to a second to end; the rank continues before."""
    code = """
        import contextlib, threading
        from raydist.worker import editor

        assert editor.load_debugpy() == ""
        editor.EditorSession(print, contextlib.nullcontext, print).begin()
        threading.Timer(0.5, editor.stop_tracing).start()
        assert editor.load_debugpy() == ""
        editor.EditorSession(print, contextlib.nullcontext, print).begin()
        editor.END_S = 1.0
        assert "a debugger already" in editor.load_debugpy()
        editor.END_S, editor._last_pydb = 1e6, None  # the program's own: nobody waits for its end
        assert "a debugger already" in editor.load_debugpy()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.check_call(command, cwd=ROOT, timeout=LIMIT_S)


def test_a_rank_without_debugpy_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "debugpy.py").write_text("raise ModuleNotFoundError(\"No module named 'debugpy'\")")
    (tmp_path / FILE).write_text(textwrap.dedent(PROGRAM))
    program = Program(tmp_path, f"script={FILE}", "scale=1x2", "group=inline", *LIMITS)
    program.wait_for_step(3)
    done = operate(tmp_path, "debug", "rank=1", "--vscode", "--port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "rank 1" in done.stderr
    assert "pip install debugpy" in done.stderr
    goes_on(program)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        busy = operate(tmp_path, "debug", "rank=1", "--vscode", "--port", str(port))
    assert busy.returncode == 2
    assert f"--port {port + 1}" in busy.stderr
    program.process.kill()
    program.process.wait()
