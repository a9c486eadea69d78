"""What the Xids of NVIDIA's driver mean: whether the GPU is to blame."""

from __future__ import annotations

import re

import pytest

from raydist.node.xids import FAULTS, PROGRAM, QUIET, REPAIRED, describe_xid
from raydist.shared.outcome import BROKEN_GPU


@pytest.mark.parametrize(
    ("number", "words", "at_fault"),
    [
        (13, "graphics engine exception", False),
        (31, "memory page fault", False),
        (43, "stopped processing", False),
        (45, "after an earlier error", False),
        (48, "double-bit ECC error", True),
        (63, "row remapping recorded", False),
        (64, "row remapping failed", True),
        (74, "NVLink error", True),
        (79, "fallen off the bus", True),
        (94, "contained ECC error", True),
        (95, "uncontained ECC error", True),
        (119, "GSP", True),
        (120, "GSP", True),
        (145, "NVLink error", True),
        (999, "catalogue", False),
    ],
)
def test_only_a_fault_of_the_gpu_blames_it(number: int, words: str, at_fault: bool) -> None:
    line = describe_xid(number, "3")
    assert line.startswith(f"NVML reported Xid {number} of GPU 3")
    assert words in line
    assert bool(BROKEN_GPU.search(line)) is at_fault


def test_each_xid_has_one_meaning() -> None:
    for others in (PROGRAM, REPAIRED):
        assert not FAULTS.keys() & others.keys()
    assert not PROGRAM.keys() & REPAIRED.keys()
    assert QUIET in PROGRAM
    for number, words in {**FAULTS, **PROGRAM, **REPAIRED}.items():
        assert bool(re.search(BROKEN_GPU, describe_xid(number, "0"))) is (number in FAULTS), words
