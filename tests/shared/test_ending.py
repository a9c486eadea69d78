"""The end of a command, and what it does not wait for."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.shared import ending

COMMAND = """
import atexit, gc, sys, time
from pathlib import Path
gc.freeze()  # as after the imports of a command
from raydist.shared import ending
from raydist.shared.ending import need_cleanup, tidied, tidy_up, run_to_the_end

def tidy():
    Path("told").touch()
    time.sleep(float(sys.argv[1]))
    Path("tidied").touch()

def main():
    atexit.register(print, "exit handler")
    atexit.register(tidy)  # as Ray does
    tidy_up(tidy)
    if sys.argv[2:] == ["wait"]:
        tidied()
    elif sys.argv[2:]:
        ending.WAIT_S = float(sys.argv[2])
    global file
    file = open("file", "w")
    file.write("not closed")
    print("the end")
    if sys.argv[3:] == ["finished"]:
        return 0
    if sys.argv[3:] == ["needed"]:
        need_cleanup()
        return 0
    return 3

run_to_the_end(main)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_command_waits_for_what_tidies_up(tmp_path: Path) -> None:
    """Ray sends at the end of its shutdown what was counted, such as that the run has failed."""
    done = run(tmp_path, "0.3")
    assert done.returncode == 3
    assert (tmp_path / "tidied").exists()


def test_a_command_does_not_wait_for_long_for_what_tidies_up(tmp_path: Path) -> None:
    done = run(tmp_path, "1000", "0.1")
    assert (done.returncode, done.stdout, done.stderr) == (3, "the end\nexit handler\n", "")
    assert (tmp_path / "told").exists()
    assert (tmp_path / "file").read_text() == "not closed"


def test_a_command_waits_only_for_cleanup_that_is_needed(tmp_path: Path) -> None:
    needed = run(tmp_path, "0.3", "60", "needed")
    assert (needed.returncode, (tmp_path / "tidied").exists()) == (0, True)
    (tmp_path / "tidied").unlink()
    finished = run(tmp_path, "1000", "60", "finished")
    assert (finished.returncode, finished.stdout) == (0, "the end\nexit handler\n")
    assert not (tmp_path / "tidied").exists()


def test_a_process_that_goes_on_waits_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, "0.5", "wait")
    assert done.returncode == 3
    assert (tmp_path / "tidied").exists()


def test_what_is_no_command_tidies_up_at_once() -> None:
    done = []
    ending.tidy_up(lambda: done.append(1))
    assert done == [1]


@pytest.fixture
def as_command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a command in the test only."""
    monkeypatch.setattr(ending, "_command", False)
    collect_at = gc.get_threshold()
    yield
    gc.set_threshold(*collect_at)


@pytest.mark.usefixtures("as_command")
def test_a_command_with_nothing_to_tidy_up_ends_as_any_program() -> None:
    code = "from raydist.shared.ending import run_to_the_end; run_to_the_end(lambda: 4)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 4
    with pytest.raises(SystemExit, match="5"):
        ending.run_to_the_end(lambda: 5)


def test_files_are_flushed_after_imports_that_are_never_collected(tmp_path: Path) -> None:
    code = """
from raydist.shared.imports import uncollected

def main():
    global file
    file = open("file", "w")
    file.write("not closed")

with uncollected():
    pass
main()
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "file").read_text() == "not closed"


FORK = """
import atexit, os, sys, threading, time
from types import SimpleNamespace
from raydist.shared import ending
from raydist.worker import main, program

def say(text):
    # in one write: with PYTHONUNBUFFERED print makes two, and both processes write here
    sys.stdout.write(text + "\\n")

whole, hidden = sys.argv[1] == "script", sys.argv[2]
for name in ("threading", "atexit"):  # this Python has no such private name
    module = getattr(ending, name)
    public = {key: value for key, value in vars(module).items() if f"{name}.{key}" != hidden}
    setattr(ending, name, SimpleNamespace(**public))
try:
    child = os.fork()
    if child == 0:
        atexit.register(say, "exit function")
        threading.Thread(target=lambda: (time.sleep(0.2), say("thread"))).start()
        file = open("file", "w")
        file.write("not closed")
        say("job")
        main.end_process(4 if whole else 0, whole=whole)
finally:
    say("parent")
    sys.stdout.flush()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("hidden", ["none", "threading._shutdown", "atexit._run_exitfuncs"])
@pytest.mark.parametrize(("kind", "code"), [("job", 0), ("script", 4)])
def test_a_fork_does_what_an_interpreter_does_last_in_every_python(
    tmp_path: Path, kind: str, code: int, hidden: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, kind, hidden],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    assert [*sorted(lines[:4])] == ["exit function", "job", "parent", "thread"]
    assert lines[4:] == [str(code)]
    assert done.stderr == ""
    if kind == "script":
        assert (tmp_path / "file").read_text() == "not closed"


def test_an_exit_function_that_fails_is_shown_and_the_others_are_called() -> None:
    code = """
import atexit, threading
from raydist.shared import ending
from raydist.worker import main

atexit.register(print, "other")
atexit.register(lambda: 1 / 0)
ending.threading = type("Interrupted", (), {"_shutdown": staticmethod(lambda: int("signal"))})
main.end_process(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "other\n"
    assert "ZeroDivisionError" in done.stderr
    assert "ValueError: invalid literal" in done.stderr
