"""deploy/node/setup.sh with real pip: a node that joins after a release gets the head's
versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"

# A package that needs Ray and torch, as raydist does. It builds itself: nothing is fetched.
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import shutil

def build_wheel(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("raydist-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""


def release(folder: Path, name: str, version: str, *needs: str) -> None:
    """Put a wheel with nothing in it into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    about = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in needs)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(["Metadata-Version: 2.1", *about, ""]))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class Node:
    """A home folder with what `ray up` copies, and a package index."""

    def __init__(self, home: Path, index: Path) -> None:
        self.home = home
        self.index = index
        source = home / ".raydist" / "src"
        self.scripts = source / "deploy" / "node"
        shutil.copytree(ROOT / "deploy" / "node", self.scripts)
        (source / "pyproject.toml").write_text(PROJECT)
        (source / "backend.py").write_text(BACKEND)
        release(source, "raydist", "1.0", "ray", "torch")

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the setup commands as `ray up` does."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PIP_", "PYTHON", "RAY_"))
        }
        kept |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
        }
        kept |= {"HOME": str(self.home), "PYTHON": sys.executable, **env}
        command = ["bash", str(self.scripts / "setup.sh")]
        return subprocess.run(command, env=kept, capture_output=True, text=True, check=False)

    def has(self, name: str) -> list[str]:
        """Return the versions of a package in the node's environment."""
        environments = (self.home / ".raydist" / "env").glob(
            f"lib/python*/site-packages/{name}-*.dist-info"
        )
        return [each.name.removesuffix(".dist-info").partition("-")[2] for each in environments]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    release(folder, "ray", "1.0")
    release(folder, "torch", "1.0+cu130")
    return folder


def join(head: Node, home: Path) -> Node:
    """Return a node with a copy of the head's folder, as Ray makes it."""
    node = Node(home, head.index)
    shutil.copytree(head.scripts, node.scripts, dirs_exist_ok=True)
    return node


def test_a_node_that_joins_after_a_release_gets_the_heads_versions(
    tmp_path: Path, index: Path
) -> None:
    head = Node(tmp_path / "head", index)
    done = head.setup()
    assert done.returncode == 0, done.stderr
    assert (head.scripts / "versions.txt").read_text().splitlines()[0] == f"# Python {OWN}"
    release(index, "ray", "2.0")
    release(index, "torch", "2.0")

    late = join(head, tmp_path / "late")
    image = tmp_path / "image"  # it has another torch
    with zipfile.ZipFile(index / "torch-2.0-py3-none-any.whl") as wheel:
        wheel.extractall(image)
    done = late.setup(RAY_HEAD_IP="10.0.0.1", PYTHONPATH=str(image))
    assert done.returncode == 0, done.stderr
    assert (late.has("ray"), late.has("torch")) == (["1.0"], [])

    done = late.setup(RAY_HEAD_IP="10.0.0.1")  # the same machine with another image
    assert done.returncode == 0, done.stderr
    assert (late.has("ray"), late.has("torch")) == (["1.0"], ["1.0+cu130"])


def test_a_node_with_another_python_is_refused_by_name(tmp_path: Path, index: Path) -> None:
    node = Node(tmp_path / "node", index)
    (node.scripts / "versions.txt").write_text("# Python 3.8\nray==1.0\n")
    done = node.setup(RAY_HEAD_IP="10.0.0.1")
    assert done.returncode == 1
    assert f"has Python {OWN} and the head Python 3.8" in done.stderr
    assert (
        "setup_commands: [PYTHON=python3.8 bash ~/.raydist/src/deploy/node/setup.sh]" in done.stderr
    )
    assert not (node.home / ".raydist" / "env").exists()
