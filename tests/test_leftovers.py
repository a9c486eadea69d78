"""The check that a session of tests cleans up, in separate sessions of pytest."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import leftovers
from tests.conftest import ROOT
from tests.leftovers import PREFIX, alive
from tests.rig import requires_root
from tests.waiting import wait_until

PRELUDE = """
import os, pathlib, signal, subprocess, tempfile, time
from tests.rig.namespaces import NET, Space

KEPT = []


def sleeps(pid):
    # until then it may have no environment: exec makes that last
    while not pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
        time.sleep(0.01)
    return pid


"""
START = (
    "pathlib.Path({pid!r}).write_text(str(sleeps(subprocess.Popen(['sleep', '1000'], "
    "start_new_session=True).pid)))"
)
# By the test that leaves it: what that does, and how it is told.
WAYS = {
    "process": ("sleeps(subprocess.Popen(['sleep', '1002']).pid)", r"process \d+ sleep 1002"),
    "orphan": (
        "sleeps(int(subprocess.check_output(['sh', '-c', 'sleep 1001 >/dev/null & echo $!'])))",
        r"process \d+ sleep 1001",
    ),
    "tmp": ("tempfile.mkdtemp(prefix='raydist-')", "file FOLDER/raydist-.+"),
    "person": ("(pathlib.Path.home() / '.ray').mkdir()", "file FOLDER/home/.ray"),
    "where_it_stands": ("pathlib.Path('screen.txt').touch()", "file FOLDER/cwd/screen.txt"),
}
ROOTS_WAYS = {
    "shm": ("pathlib.Path('/dev/shm/left').touch()", "file /dev/shm/left"),
    "namespace": ("KEPT.append(Space(NET, ''))", r"process \d+ .*cat, in separate namespaces"),
    "mount": (
        "subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', tempfile.mkdtemp()])",
        "mount FOLDER/tmp.+",
    ),
}


def folders(screen: str) -> list[Path]:
    """Return the folders of other sessions than this one."""
    names = {Path(name) for name in re.findall(rf"/tmp/{PREFIX}\w+", screen)}
    return [folder for folder in names if str(folder) != tempfile.gettempdir()]


def session(folder: Path, *words: str, **bodies: str) -> tuple[int, str]:
    """Run a separate session of tests with these bodies; return its exit code and output."""
    tests = [f"def test_{name}(tmp_path):\n    {body}\n" for name, body in bodies.items()]
    (folder / "test_it.py").write_text(PRELUDE + "\n".join(tests))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "--left-within=1",
        str(folder / "test_it.py"),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "ways",
    [WAYS, pytest.param(ROOTS_WAYS, marks=[pytest.mark.root, requires_root])],
    ids=["anybody", "root"],
)
def test_what_a_test_leaves_fails_the_session_names_the_test_and_is_removed(
    tmp_path: Path, ways: dict[str, tuple[str, str]]
) -> None:
    code, screen = session(
        tmp_path, good="pass", **{name: body for name, (body, _) in ways.items()}, last="pass"
    )
    assert code == 1
    assert f"{len(ways) + 2} passed, 1 error" in screen
    for name, (_, pattern) in ways.items():
        what = pattern.replace("FOLDER", f"/tmp/{PREFIX}[^/]+")
        assert re.search(
            rf"^ +{what}, first seen after .*test_it.py::test_{name}$", screen, re.MULTILINE
        ), screen
    told_of = set(
        re.findall("^ +(.+), first seen after", screen, re.MULTILINE)
    )  # pytest says it twice where CI is set
    assert len(told_of) == len(ways) + (ways is ROOTS_WAYS)  # a mount, and the folder below it
    assert not any(folder.exists() for folder in folders(screen))


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        (START, ["-k", "leaves"], 1),
        (f"{START}; assert False", ["-x"], 1),
        (START, ["-n2"], 1),
        (f"{START}; os.kill(os.getpid(), signal.SIGINT)", [], 2),
    ],
    ids=["only some tests", "-x", "in workers", "Ctrl-C"],
)
def test_so_it_does_however_the_session_ends(
    tmp_path: Path, body: str, words: list[str], code: int
) -> None:
    own = f"--basetemp={tmp_path / 'own'}"  # or the folders of a failed test would stay
    ended, screen = session(
        tmp_path, own, *words, good="pass", leaves=body.format(pid=str(tmp_path / "pid"))
    )
    assert ended == code
    assert re.search(
        r"^ +process \d+ sleep 1000, first seen after .*test_leaves$", screen, re.MULTILINE
    ), screen
    assert not alive(int((tmp_path / "pid").read_text()))


def test_nobody_is_blamed_for_what_others_do(tmp_path: Path) -> None:
    """This very session is another one, with a process and files of its own. Nor is a zombie left
    behind."""
    body = (
        f"pathlib.Path({str(tmp_path / 'mine')!r}).touch(); "
        "KEPT.append(subprocess.Popen(['true'])); time.sleep(0.5)"
    )
    with subprocess.Popen(["sleep", "1000"]) as other, tempfile.NamedTemporaryFile(dir="/dev/shm"):
        code, screen = session(tmp_path, good=body)
        assert other.poll() is None
        other.kill()
    assert code == 0, screen
    assert "error" not in screen


def test_the_folders_of_failed_tests_stay_until_another_session_begins(tmp_path: Path) -> None:
    code, screen = session(tmp_path, bad="assert False")
    assert code == 1
    (folder,) = folders(screen)
    assert f"the folders of these tests are in {folder}/t until the next session" in screen
    assert [path.name for path in folder.iterdir()] == ["t"]
    long_ago(folder)
    leftovers.sweep()
    assert not folder.exists()


def long_ago(folder: Path) -> None:
    os.utime(folder, (0, 0))


def test_what_a_killed_session_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    killed, living = (Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")) for _ in range(2))
    lock = leftovers._lock(living)
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "TMPDIR": str(killed)}) as sleeper:
        # Popen returns before the kernel shows the environment
        wait_until(lambda: leftovers.processes_of(str(killed)), "the sleeping process")
        long_ago(killed)
        long_ago(living)
        leftovers.sweep()
        assert sleeper.wait(60) == -signal.SIGKILL
    assert not killed.exists()
    assert living.exists()
    assert lock is not None
    os.close(lock)
    leftovers.sweep()
    assert not living.exists()
