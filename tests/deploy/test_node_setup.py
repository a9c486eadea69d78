"""deploy/node/setup.sh with real pip: the head gets the versions that cluster.yaml names, and a
node that joins after a release gets the head's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ray
import yaml

from tests.conftest import ROOT

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
TEXT = (ROOT / "cluster.yaml").read_text()
(SETUP,) = yaml.safe_load(TEXT)["setup_commands"]
"""What `ray up` types on every node."""

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


def release(folder: Path, name: str, version: str, *needs: str, python: str = ">=3.8") -> None:
    """Put a wheel with nothing in it into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    about = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    about += [f"Requires-Dist: {each}" for each in needs]
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

    def setup(self, chosen: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run the setup command of cluster.yaml as `ray up` does, with these versions of Ray and
        torch in place of the file's."""
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
        line = re.sub(r"^RAY=\S+ TORCH=\S+ (?=bash )", f"{chosen} ", SETUP)
        assert line != SETUP
        return subprocess.run(
            ["bash", "-c", line], env=kept, capture_output=True, text=True, check=False
        )

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


def image_with_torch_2(folder: Path, index: Path) -> Path:
    """Unpack the index's torch 2.0 into a folder, which a machine's Python has on its path."""
    image = folder / "image"
    with zipfile.ZipFile(index / "torch-2.0-py3-none-any.whl") as wheel:
        wheel.extractall(image)
    return image


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
    image = image_with_torch_2(tmp_path, index)
    done = late.setup("RAY=2.0 TORCH=2.0", RAY_HEAD_IP="10.0.0.1", PYTHONPATH=str(image))
    assert done.returncode == 0, done.stderr
    assert (late.has("ray"), late.has("torch")) == (["1.0"], [])

    done = late.setup(RAY_HEAD_IP="10.0.0.1")  # the same machine with another image
    assert done.returncode == 0, done.stderr
    assert (late.has("ray"), late.has("torch")) == (["1.0"], ["1.0+cu130"])


def test_a_version_without_a_package_for_this_python_is_named(tmp_path: Path, index: Path) -> None:
    """As the newest torch often has none for the Python of an older image: pip leaves it out."""
    head = Node(tmp_path / "head", index)
    done = head.setup("RAY=1.0 TORCH=2.0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"has Python {OWN}, for which pip finds no torch 2.0; the newest is 1.0+cu130:" in last
    assert "put TORCH=1.0+cu130, or PYTHON=python3.12 if all nodes have that" in last
    done = head.setup("RAY=1.0 TORCH=1.0+cu130")
    assert done.returncode == 0, done.stderr


def test_the_head_gets_the_versions_that_the_file_names(tmp_path: Path, index: Path) -> None:
    """A torch of its image stays: it was built for the machine's driver."""
    release(index, "ray", "2.0")
    release(index, "torch", "2.0")
    head = Node(tmp_path / "head", index)
    done = head.setup("RAY=1.0 TORCH=1.0", PYTHONPATH=str(image_with_torch_2(tmp_path, index)))
    assert done.returncode == 0, done.stderr
    assert (head.has("ray"), head.has("torch")) == (["1.0"], [])
    assert {"ray==1.0", "torch==2.0"} <= {*(head.scripts / "versions.txt").read_text().split()}

    done = head.setup("RAY=2.0 TORCH=1.0")  # `ray up` again, on another image
    assert done.returncode == 0, done.stderr
    assert (head.has("ray"), head.has("torch")) == (["2.0"], ["1.0+cu130"])


def check(file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Type the line of cluster.yaml that comes before `ray up`, for another file."""
    first = re.findall(
        r"^# +python (deploy/node/versions\.py check) cluster\.yaml", TEXT, re.MULTILINE
    )
    command = [sys.executable, *flags, *first[0].split(), str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_another_ray_on_the_machine_of_ray_up_is_named_before_it_is_typed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(re.sub(r"\bRAY=[\d.]+", f"RAY={ray.__version__}", TEXT))
    done = check(file)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    file.write_text(re.sub(r"\bRAY=[\d.]+", "RAY=2.1.0", TEXT))
    done = check(file)
    assert done.returncode == 2
    assert done.stderr == (
        f"raydist: this machine has Ray {ray.__version__}, and the nodes get the RAY=2.1.0 of {file}: "
        f"type pip install 'ray[default]==2.1.0' here, or write RAY={ray.__version__} there\n"
    )
    without_packages = check(file, "-S")
    assert without_packages.returncode == 2
    assert "has no Ray: type `make train`" in without_packages.stderr
    file.write_text(TEXT.replace("RAY=", "# RAY="))
    assert check(file).returncode == 2
    assert "has no RAY=VERSION before setup.sh" in check(file).stderr
    assert f"can't read {tmp_path}: Is a directory" in check(tmp_path).stderr


def test_a_node_with_another_python_is_refused_by_name(tmp_path: Path, index: Path) -> None:
    node = Node(tmp_path / "node", index)
    (node.scripts / "versions.txt").write_text("# Python 3.8\nray==1.0\n")
    done = node.setup(RAY_HEAD_IP="10.0.0.1")
    assert done.returncode == 1
    assert f"has Python {OWN} and the head Python 3.8" in done.stderr
    assert "in setup_commands put PYTHON=python3.8 before bash" in done.stderr
    assert not (node.home / ".raydist" / "env").exists()


def test_a_node_whose_home_has_no_locks_is_set_up(tmp_path: Path, index: Path) -> None:
    """As on Lustre without -o flock: `ray up` failed, and did not say why."""
    node, stubs = Node(tmp_path / "node", index), tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "flock").write_text("#!/bin/sh\nexit 71\n")
    (stubs / "flock").chmod(0o755)
    python = stubs / "python"  # it is not the matter here, and takes seconds
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = node.setup(PYTHON=str(python), PATH=f"{stubs}:{os.environ['PATH']}")
    without_locks, without_venv = done.stderr.splitlines()
    assert f"{node.home} on" in without_locks
    assert "has no locks: if nodes share it, set them up one after another" in without_locks
    assert "can't make a Python environment" in without_venv


def test_a_login_shell_checks_pythons_as_the_node_does(tmp_path: Path, index: Path) -> None:
    """A driver that is typed into it joins a head with another patch version; a value of the
    machine's own stays."""
    node = Node(tmp_path / "node", index)
    done = node.setup()
    assert done.returncode == 0, done.stderr
    names = ("RAY_AUTH_MODE", "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "RAY_TMPDIR")
    plain = {"HOME": str(node.home), "PATH": os.environ["PATH"]}
    for env, level in ((plain, "minor"), (plain | {names[1]: "patch"}, "patch")):
        shell = subprocess.run(
            ["bash", "-c", ". ~/.bashrc; env"], env=env, capture_output=True, text=True, check=True
        )
        values = dict(line.split("=", 1) for line in shell.stdout.splitlines())
        assert [values[name] for name in names] == ["token", level, f"/tmp/ray-{os.getuid()}"]
