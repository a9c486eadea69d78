"""`make matrix`: which environments it makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.conftest import ROOT


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.matrix", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_python_that_is_not_supported_is_refused_with_those_that_are() -> None:
    done = run("3.10", "3.9")
    assert done.returncode == 2
    assert done.stderr == "error: no Python 3.9: type some of 3.10, 3.11, 3.12, 3.13\n"


def test_every_python_has_the_newest_and_the_lowest_torch() -> None:
    names = [turn.name for turn in matrix.turns([])]
    assert names[:2] == ["3.10", f"3.10-torch-{matrix.lowest_torch()}"]
    assert len(names) == 2 * len(matrix.MINORS)
    (turn,) = matrix.turns(["3.13:2.9.1"])
    assert "TORCH=2.9.1" in turn.command("python3.13")


def test_this_python_is_found_and_one_that_is_not_there_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    here = "{}.{}".format(*sys.version_info)
    found = matrix.interpreter(here)
    assert found is not None
    version = subprocess.run([found, "-V"], capture_output=True, text=True).stdout
    assert version.startswith(f"Python {here}.")
    assert matrix.interpreter("3.99") is None
