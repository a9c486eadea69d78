"""The versions that are promised are those that are tried: floors, pins, and the torch that `make` is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN = {"s3fs", "hatchling", "pyyaml"}
"""Packages of the tests that runs and clusters have too."""

PYTHON = """#!/bin/sh
echo "$*" >>said
case "$*" in
    "-m venv "*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
    "-m pip "*) cat "$PIP_CONSTRAINT" >>said; [ ! -e offline ] ;;
esac
"""
"""An interpreter that writes down what it is asked for; pip fails while there is a file `offline`."""


def required(*extras: str) -> list[Requirement]:
    """What the extras ask for; without one, what the package and its build ask for."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = read["project"]["dependencies"] + read["build-system"]["requires"]
    more = [line for extra in extras for line in read["project"]["optional-dependencies"][extra]]
    return [Requirement(line) for line in (more if extras else own)]


def test_the_lowest_versions_are_those_that_pyproject_admits() -> None:
    ranges = [each for each in required() + required("s3", "test") if not str(each.specifier).startswith("==")]
    floors = {(each.name, spec.version) for each in ranges for spec in each.specifier if spec.operator == ">="}
    assert {each.name for each in ranges} == {name for name, _ in floors}, "a package without a floor"
    lines = (ROOT / "tests" / "lowest.txt").read_text().partition("\n\n")[0].splitlines()
    lowest = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {(each.name, shortest(next(iter(each.specifier)).version)) for each in lowest} == {
        (name, shortest(version)) for name, version in floors
    }


def shortest(version: str) -> str:
    """3.0.0 is 3."""
    return version.removesuffix(".0").removesuffix(".0")


def test_what_judges_the_code_is_pinned() -> None:
    loose = {each.name for each in required("test") if [spec.operator for spec in each.specifier] != ["=="]}
    assert loose == RUN


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout with an interpreter that only writes down."""
    return checkout(tmp_path / "clone")


def checkout(made: Path) -> Path:
    (made / "tests").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tests/lowest.txt"):
        shutil.copy(ROOT / name, made / name)
    (made / "python").write_text(PYTHON)
    (made / "python").chmod(0o755)
    (made / "site.txt").write_text("torch<=2.14.1\n")
    return made


def make(clone: Path, *words: str) -> list[str]:
    """What the interpreters were asked for, with the constraints that pip had."""
    (clone / "said").unlink(missing_ok=True)
    env = {"PATH": os.environ["PATH"], "PIP_CONSTRAINT": "site.txt", "HOME": str(clone.parent / "home")}
    subprocess.run(["make", "PYTHON=./python", *words], cwd=clone, env=env, check=False, capture_output=True)
    said = clone / "said"
    return said.read_text().splitlines() if said.exists() else []


PIP = "-m pip install --quiet --editable"
FAST = "-m pytest -m not ray and not root"


def test_a_chosen_torch_has_an_environment_of_its_own(clone: Path) -> None:
    pin = "torch==2.15.0"
    venv = ".venv-torch-2.15.0"
    assert make(clone, "fast", "TORCH=2.15.0") == [f"-m venv {venv}", f"{PIP} .", pin, f"{PIP} .[test]", pin, FAST]
    assert make(clone, "train", "TORCH=2.15.0") == ["-m raydist.train"], "it is there"


def test_without_a_word_the_sites_constraints_hold(clone: Path) -> None:
    site = "torch<=2.14.1"
    assert make(clone, "fast") == ["-m venv .venv", f"{PIP} .", site, f"{PIP} .[test]", site, FAST]


def test_the_lowest_versions_are_tried(clone: Path) -> None:
    lowest = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    assert make(clone, "lowest") == [
        "-m venv .venv-lowest", f"{PIP} .", *lowest, "-m raydist.train", f"{PIP} .[test]", *lowest, FAST
    ]  # fmt: skip


def test_below_a_path_with_a_space_the_environment_lies_elsewhere(tmp_path: Path) -> None:
    """Neither Ray nor Open MPI quotes the path that it was started from."""
    spaced, plain = checkout(tmp_path / "a clone"), checkout(tmp_path / "clone")
    pin = "torch==2.15.0"
    venv, *pips, tests = make(spaced, "fast", "TORCH=2.15.0")
    place = Path(venv.removeprefix("-m venv "))
    assert place.is_relative_to(tmp_path / "home" / ".cache" / "raydist")
    assert (spaced / ".venv-torch-2.15.0").resolve() == place
    assert (pips, tests) == ([f"{PIP} .", pin, f"{PIP} .[test]", pin], FAST)
    assert make(spaced, "train", "TORCH=2.15.0") == ["-m raydist.train"], "it is there"
    make(plain, "fast")
    assert not (plain / ".venv").is_symlink()
    make(spaced, "clean")
    assert not place.exists()


@pytest.mark.parametrize("done", ["", "train"])
def test_an_install_that_ended_half_way_is_done_again_from_nothing(clone: Path, done: str) -> None:
    if done:
        make(clone, done)
    (clone / "offline").touch()
    assert make(clone, "fast")[-2].startswith(PIP)
    (clone / "offline").unlink()
    said = make(clone, "fast")
    assert said[0] == "-m venv --clear .venv"
    assert said[-1] == FAST
