"""Only unused segments of MPI and of this user are removed from /dev/shm."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raydist.node import mpi_segments
from tests.conftest import ROOT


def test_only_unmapped_segments_are_removed(tmp_path: Path) -> None:
    before = time.time() - 1
    for name in (
        "mpich_shm_177869c5_0",
        "sm_segment.host0.0.9a.1",
        "torch_123",
        "mpich_shm_used_0",
    ):
        (tmp_path / name).write_bytes(b"x" * mmap.PAGESIZE)
    with (tmp_path / "mpich_shm_used_0").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        mpi_segments.remove_leftovers(before, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mpich_shm_used_0", "torch_123"]


def test_one_that_is_about_to_be_mapped_stays(tmp_path: Path) -> None:
    """A job beside, between its shm_open and its mmap, lost its memory."""
    (tmp_path / "mpich_shm_1_0").write_bytes(b"x")
    (tmp_path / "mpich_shm_2_0").write_bytes(b"x")
    with (tmp_path / "mpich_shm_1_0").open("r+b"):
        mpi_segments.remove_leftovers(time.time() - 1, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mpich_shm_1_0"]
    mpi_segments.remove_leftovers(time.time() - 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_older_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "mpich_shm_1_0").write_bytes(b"x")
    mpi_segments.remove_leftovers(time.time() + 10, tmp_path)
    assert (tmp_path / "mpich_shm_1_0").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.root
def test_those_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "mpich_shm_1_0").write_bytes(b"x")
    os.chown(tmp_path / "mpich_shm_1_0", 65534, 65534)
    mpi_segments.remove_leftovers(0, tmp_path)
    assert (tmp_path / "mpich_shm_1_0").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
@pytest.mark.root
@pytest.mark.parametrize(
    ("shared", "kept"),
    [(["--pid"], True), (["--pid", "--ipc"], False), ([], False)],
    ids=["a container with the host's memory", "a container with its own", "the host"],
)
def test_those_of_unseen_processes_stay(shared: list[str], kept: bool, tmp_path: Path) -> None:
    if not kept and mpi_segments.shares_memory_with_unseen_processes():
        pytest.skip("these tests run in a container with the host's memory")
    if kept and os.stat("/proc/self/ns/ipc").st_ino != mpi_segments.INITIAL["ipc"]:
        pytest.skip("these tests run in a container with its own memory")
    (tmp_path / "mpich_shm_1_0").write_bytes(b"x")
    code = "import sys; from pathlib import Path; from raydist.node import mpi_segments; "
    code += "mpi_segments.remove_leftovers(0, Path(sys.argv[1]))"
    inside = ["unshare", *shared, "--fork", "--mount-proc"] if shared else []
    subprocess.run([*inside, sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True)
    assert (tmp_path / "mpich_shm_1_0").exists() is kept
