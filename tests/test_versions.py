"""The versions that are promised are those that are tried: floors, pins, and the torch that `make`
is told."""

from __future__ import annotations

import ast
import json
import os
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from tests.conftest import ROOT
from tests.deploy.test_node_setup import release

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN = {"s3fs", "hatchling"}
"""Packages of the tests that runs and clusters have too."""

PYTHON = """#!/bin/sh
echo "$*" >>said
case "$*" in
    "-m venv "*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
    "-m pip "*) cat "$PIP_CONSTRAINT" >>said; [ ! -e offline ] ;;
esac
"""
"""An interpreter that writes down what it is asked for; pip fails while there is a file
`offline`."""


def required(*extras: str) -> list[Requirement]:
    """Return the requirements of the extras; without one those of the package and its build."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = read["project"]["dependencies"] + read["build-system"]["requires"]
    more = [line for extra in extras for line in read["project"]["optional-dependencies"][extra]]
    return [Requirement(line) for line in (more if extras else own)]


def test_the_lowest_versions_are_those_that_pyproject_admits() -> None:
    ranges = [
        each
        for each in required() + required("s3", "test")
        if not str(each.specifier).startswith("==")
    ]
    floors = {
        (each.name, spec.version)
        for each in ranges
        for spec in each.specifier
        if spec.operator == ">="
    }
    assert {each.name for each in ranges} == {name for name, _ in floors}, (
        "a package without a floor"
    )
    lines = (ROOT / "tests" / "lowest.txt").read_text().partition("\n\n")[0].splitlines()
    lowest = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {(each.name, shortest(next(iter(each.specifier)).version)) for each in lowest} == {
        (name, shortest(version)) for name, version in floors
    }


def shortest(version: str) -> str:
    """3.0.0 is 3."""
    return version.removesuffix(".0").removesuffix(".0")


def test_what_judges_the_code_is_pinned() -> None:
    loose = {
        each.name
        for each in required("test")
        if [spec.operator for spec in each.specifier] != ["=="]
    }
    assert loose == RUN


OFFERED = {"horovod", "ipython", "pydevd", "typing-extensions"}
"""Packages that are used where they are: a local build, a notebook's, debugpy's,
the driver's, mypy's."""


def imported() -> set[str]:
    """Return the packages that raydist and its jobs import, outside the standard library."""
    names: set[str] = set()
    for path in [*ROOT.glob("raydist/**/*.py"), *ROOT.glob("jobs/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    modules = (
        {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"raydist"}
    )
    packages = packages_distributions()
    return {canonicalize_name(packages.get(module, [module])[0]) for module in modules}


def test_each_package_that_is_imported_is_asked_for() -> None:
    """Not through another one: Ray's next release may ask for other packages."""
    required = {canonicalize_name(each.name) for each in all_required()}
    assert imported() - required == OFFERED & imported()
    assert {"torch", "ray", "pyyaml"} <= imported()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout with an interpreter that only writes down."""
    return checkout(tmp_path / "clone")


def checkout(path: Path) -> Path:
    (path / "tests").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "tests/lowest.txt"):
        shutil.copy(ROOT / name, path / name)
    (path / "python").write_text(PYTHON)
    (path / "python").chmod(0o755)
    (path / "site.txt").write_text("torch<=2.14.1\n")
    return path


def make(clone: Path, *words: str) -> list[str]:
    """Run make; return the calls of the interpreters and the constraints of pip."""
    (clone / "said").unlink(missing_ok=True)
    env = {
        "PATH": os.environ["PATH"],
        "PIP_CONSTRAINT": "site.txt",
        "HOME": str(clone.parent / "home"),
    }
    subprocess.run(
        ["make", "PYTHON=./python", *words], cwd=clone, env=env, check=False, capture_output=True
    )
    log = clone / "said"
    return log.read_text().splitlines() if log.exists() else []


PIP = "-m pip install --quiet --editable"
FAST = "-m pytest -m not ray and not root"


def install_tests(venv: str, *pins: str) -> list[str]:
    """Return what installs the packages of the tests. `pins`: the constraints of pip."""
    mpich = (
        f"-m pip install --quiet --no-deps --ignore-installed --prefix {venv}/mpich mpich==5.0.2"
    )
    return [f"{PIP} .[test]", *pins, mpich, *pins]


def test_a_chosen_torch_has_an_environment_of_its_own(clone: Path) -> None:
    pin = "torch==2.15.0"
    venv = ".venv-torch-2.15.0"
    assert make(clone, "fast", "TORCH=2.15.0") == [
        f"-m venv {venv}",
        f"{PIP} .",
        pin,
        *install_tests(venv, pin),
        FAST,
    ]
    assert make(clone, "train", "TORCH=2.15.0") == ["-m raydist.train"], "it is there"


def test_without_a_word_the_sites_constraints_hold(clone: Path) -> None:
    site = "torch<=2.14.1"
    installed = ["-m venv .venv", f"{PIP} .", site, *install_tests(".venv", site)]
    assert make(clone, "fast") == [*installed, FAST]


def test_the_lowest_versions_are_tried(clone: Path) -> None:
    lowest = (ROOT / "tests" / "lowest.txt").read_text().splitlines()
    assert make(clone, "lowest") == [
        "-m venv .venv-lowest",
        f"{PIP} .",
        *lowest,
        "-m raydist.train",
        *install_tests(".venv-lowest", *lowest),
        FAST,
    ]


def test_below_a_path_with_a_space_the_environment_lies_elsewhere(tmp_path: Path) -> None:
    """Neither Ray nor Open MPI quotes the path that it was started from."""
    spaced, plain = checkout(tmp_path / "a clone"), checkout(tmp_path / "clone")
    pin = "torch==2.15.0"
    venv, *pips, tests = make(spaced, "fast", "TORCH=2.15.0")
    place = Path(venv.removeprefix("-m venv "))
    assert place.is_relative_to(tmp_path / "home" / ".cache" / "raydist")
    assert (spaced / ".venv-torch-2.15.0").resolve() == place
    assert (pips, tests) == ([f"{PIP} .", pin, *install_tests(str(place), pin)], FAST)
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
    log = make(clone, "fast")
    assert log[0] == "-m venv --clear .venv"
    assert log[-1] == FAST


EVERY_PYTHON = ["3.10", "3.11", "3.12", "3.13"]
INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
SIMPLE = {"Accept": "application/vnd.pypi.simple.v1+json"}


def all_required() -> list[Requirement]:
    """Return the requirements of the package, its build and each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return required() + required(*project["optional-dependencies"])


def files_of(name: str) -> list[dict[str, Any]]:
    """Return the files of a package on the index, as PEP 691 describes them."""
    page = f"{INDEX}/{canonicalize_name(name)}/"
    with urllib.request.urlopen(urllib.request.Request(page, headers=SIMPLE), timeout=60) as reply:
        files: list[dict[str, Any]] = json.load(reply)["files"]
        return files


@pytest.fixture(scope="module")
def index() -> dict[str, list[dict[str, Any]]]:
    """The files of each required package."""
    names = sorted({each.name for each in all_required()})
    try:
        with ThreadPoolExecutor(8) as pool:
            return dict(zip(names, pool.map(files_of, names), strict=True))
    except (OSError, ValueError) as error:
        pytest.skip(f"no package index at {INDEX}: {error}")


def fits(file: dict[str, Any], specifier: SpecifierSet, python: str) -> bool:
    """Return whether pip would install this file on that Python."""
    try:
        if file["filename"].endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(file["filename"])
        else:
            _, version = parse_sdist_filename(file["filename"])
            tags = frozenset()
    except (InvalidWheelFilename, InvalidSdistFilename):  # of an old release
        return False
    if file.get("yanked") or not specifier.contains(version):
        return False
    own = f"cp{python.replace('.', '')}"
    built_for = not tags or any(
        tag.interpreter in ("py3", own) or tag.abi == "abi3" for tag in tags
    )
    return built_for and SpecifierSet(file.get("requires-python") or "").contains(f"{python}.0")


def not_installable(wanted: list[Requirement], index: dict[str, Any], python: str) -> Iterator[str]:
    """Yield the requirements that no file of the index meets on a Python."""
    for each in wanted:
        meant = each.marker is None or each.marker.evaluate({"python_version": python, "extra": ""})
        if meant and not any(fits(file, each.specifier, python) for file in index[each.name]):
            yield str(each)


@pytest.mark.parametrize("python", EVERY_PYTHON)
def test_what_pyproject_asks_for_installs_on_every_python(
    index: dict[str, Any], python: str
) -> None:
    assert [*not_installable(all_required(), index, python)] == []


def test_a_pin_that_a_python_cannot_install_is_found(index: dict[str, Any]) -> None:
    pinned = [Requirement("ipykernel==7.4.0")]  # asks for Python 3.11
    assert [*not_installable(pinned, index, "3.10")] == ["ipykernel==7.4.0"]
    assert [*not_installable(pinned, index, "3.11")] == []
    assert [
        *not_installable([Requirement(f"{pinned[0]}; python_version > '3.10'")], index, "3.10")
    ] == []


def test_the_promised_pythons_are_those_that_are_looked_at() -> None:
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert lowest == f">={EVERY_PYTHON[0]}"


UV = Path(sys.executable).with_name("uv")
requires_uv = pytest.mark.skipif(not UV.exists(), reason="no uv: pip install uv")


def resolve(
    project: Path, python: str, cache: Path, *index: str | Path
) -> subprocess.CompletedProcess[str]:
    """Choose a version of each package that a pyproject.toml with all its extras needs on a Python,
    and of what those need.

    Only metadata is fetched, into `cache`. `index`: the options of uv that say where from.
    """
    paths = ssl.get_default_verify_paths()
    certificates = os.environ.get("PIP_CERT") or paths.cafile or ""
    env = {**os.environ, "UV_PYTHON_DOWNLOADS": "never", "UV_CACHE_DIR": str(cache)}
    env["TMPDIR"] = str(cache)  # uv leaves the locks of its builds there
    env |= {"SSL_CERT_FILE": certificates} if certificates else {}
    command: list[str | Path] = [
        UV,
        "pip",
        "compile",
        "--no-config",
        "--all-extras",
        "--python-version",
        python,
    ]
    command += ["--python-platform", "x86_64-manylinux_2_28", *index, project]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uv")


@requires_uv
@pytest.mark.slow
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("python", EVERY_PYTHON)
def test_what_pyproject_asks_for_fits_together_on_every_python(python: str, cache: Path) -> None:
    """With what the packages ask for themselves."""
    done = resolve(ROOT / "pyproject.toml", python, cache, "--default-index", INDEX)
    assert done.returncode == 0, done.stderr
    assert "torch==" in done.stdout


@requires_uv
def test_pins_that_do_not_fit_together_are_found(tmp_path: Path) -> None:
    index = tmp_path / "index"
    release(index, "outer", "1.0", "inner")
    release(index, "inner", "1.0", python=">=3.11")
    release(index, "other", "1.0", "inner<1")

    def resolved(python: str, *wanted: str) -> int:
        project = tmp_path / "pyproject.toml"
        project.write_text(f'[project]\nname = "a"\nversion = "1"\ndependencies = {[*wanted]}\n')
        return resolve(project, python, tmp_path, "--no-index", "--find-links", index).returncode

    assert resolved("3.10", "outer==1.0") == 1  # its own requirement needs Python 3.11
    assert resolved("3.11", "outer==1.0") == 0
    assert resolved("3.11", "outer==1.0", "other==1.0") == 1
