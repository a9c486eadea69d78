"""Memory in huge pages: which of it, that it is the same after, and that a fork server that waits
has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.node.huge_pages import could_be_huge

MAPS = """\
55d000000000-55d000400000 r--p 00000000 fe:00 12 /usr/bin/python3
55d000400000-55d000c00000 rw-p 00400000 fe:00 12 /usr/bin/python3
55d001000000-55d001300000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000500000 rw-p 00000000 00:00 0
7f0000600000-7f0000700000 rw-p 00000000 00:00 0
7f0000800000-7f0000c00000 rw-s 00000000 00:01 7 /dev/shm/a name with spaces
7f0001000000-7f0001400000 ---p 00000000 00:00 0
7f0001400000-7f0001800000 rw-p 00000000 00:00 0                          [anon: named]
7fff00000000-7fff00400000 rw-p 00000000 00:00 0                          [stack]
"""
BLOCK = """
import sys
from raydist.node import huge_pages
from raydist.node.huge_pages import collapse, scattered_addresses
if sys.argv[1:] == ["refused"]:
    huge_pages.MADV_COLLAPSE = 1 << 20  # a kernel that does not know it answers the same
block = bytearray(range(256)) * (1 << 17)
for address in scattered_addresses():
    collapse(address)
assert block == bytearray(range(256)) * (1 << 17)
print(open("/proc/self/smaps_rollup").read())
"""
can_collapse = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (6, 1),
    reason="Linux has MADV_COLLAPSE since 6.1",
)


def huge(rollup: str) -> int:
    """Return the bytes in huge pages, from /proc/PID/smaps_rollup."""
    match = re.search(r"AnonHugePages: +(\d+) kB", rollup)
    assert match
    return int(match[1]) * 1024


def huge_of(pid: int) -> int:
    return huge(Path(f"/proc/{pid}/smaps_rollup").read_text())


def test_private_memory_of_no_file_is_what_can_be_in_huge_pages() -> None:
    assert [*could_be_huge(MAPS)] == [
        0x55D001000000,
        0x7F0000200000,
    ]  # the second begins in 0x7f0000100000


@can_collapse
def test_memory_is_the_same_in_huge_pages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK], capture_output=True, text=True, check=True, timeout=60
    )
    assert huge(done.stdout) >= 28 * 2**20  # of the block's 32 MB


def test_a_kernel_without_huge_pages_changes_nothing() -> None:
    subprocess.run([sys.executable, "-c", BLOCK, "refused"], check=True, timeout=60)
