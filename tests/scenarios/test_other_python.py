"""A driver and a cluster whose Pythons differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import Program, separate_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAJOR, MINOR, PATCH = sys.version_info[:3]
HEADS_PYTHON = """
import ray

# what the head notes in the GCS, and Ray compares with each driver
ray._private.utils.compute_version_info = lambda: (ray.__version__, {version!r})
"""
WORDS = ("job=synthetic", "train.steps=2", "scale=1x1")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a Ray whose head has that version of Python."""
    with separate_ray(HEADS_PYTHON.format(version=request.param)) as address:
        yield address


@pytest.mark.parametrize("cluster", [f"{MAJOR}.{MINOR}.{PATCH + 1}"], indirect=True)
def test_the_heads_python_may_have_another_patch_version(tmp_path: Path, cluster: str) -> None:
    program = Program(tmp_path, *WORDS, address=cluster, alone=True)
    assert program.wait() == 0, program.screen


@pytest.mark.parametrize("cluster", [f"{MAJOR}.{MINOR + 1}.0"], indirect=True)
def test_another_minor_version_is_refused(tmp_path: Path, cluster: str) -> None:
    program = Program(tmp_path, *WORDS, address=cluster)
    assert program.wait() == 1, program.screen
    assert f"Python: {MAJOR}.{MINOR + 1}.0" in program.screen
    assert f"Python: {MAJOR}.{MINOR}.{PATCH}" in program.screen
    assert "Traceback" not in program.screen
