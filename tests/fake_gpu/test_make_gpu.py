"""`make gpu` on fake GPUs: its tests pass, its parts run, its report says what they cannot show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench import gpu
from tests.fake_gpu import ROOT, requires_fake_gpus
from tests.fake_gpu.conftest import Machine

pytestmark = [requires_fake_gpus, pytest.mark.slow, pytest.mark.timeout(1800)]


def run(folder: Path, *command: str) -> str:
    """Return what a program printed that ended well."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as tmp:  # short, for Ray's sockets
        env = {**os.environ, "TMPDIR": tmp}
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trainings_of_the_gpu_tests_pass(machine: Machine) -> None:
    """That they have room and reach their faults on 8 GPUs too is shown by tests/test_bench.py."""
    machine(2)
    chosen = "killed_rank and adamw or of_its_own"
    tests = run(ROOT, "pytest", "-m", "gpu", "-q", "-k", chosen, "tests/scenarios/test_gpu.py")
    assert "2 passed" in tests


def report_of(folder: Path, *words: str) -> str:
    """Return the report of `make gpu`, in which no part has failed."""
    run(folder, "bench", "gpu", "--rounds", "1", *words)
    report = (folder / gpu.REPORT).read_text()
    assert all(each in report for each in gpu.ONLY_REAL)
    assert "FAILED" not in report
    return report


def test_the_report_of_two_gpus_says_what_they_cannot_show(
    machine: Machine, tmp_path: Path
) -> None:
    machine(2)
    parts = [name for name in gpu.PARTS if name != "tests"]
    report = report_of(tmp_path, "--parts", ",".join(parts))
    assert "2 x Fake GPU" in report
    assert "of 2 pairs of blocks" in report
    assert report.count("| it runs; the figure is without meaning |") == len(parts) - 1


@pytest.mark.skipif(not os.environ.get("RAYDIST_FAKE_GPU"), reason="`make fake-gpu` runs them")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_make_gpu_from_end_to_end(machine: Machine, tmp_path: Path, count: int) -> None:
    machine(count)
    report = report_of(tmp_path)
    print(report)
    assert f"{count} x Fake GPU" in report
    passed = re.search(r"\| (\d+) passed.*\| reached \|", report)
    assert passed is not None
    assert int(passed[1]) > 10
    assert report.count("not run") == (count == 1)  # the bandwidth needs two
