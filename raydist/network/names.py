"""Environment variables as data, and the values that planner and agents must agree on. (either
side)"""

from __future__ import annotations

from typing import NamedTuple

RANK_FOLDER = "<the rank's folder on its node>"
"""Placeholder in a variable's value. The agent of the rank replaces it by the folder that it made
on its own node."""

CACHE_FOLDER = "<your cache on the node>"
"""Placeholder as RANK_FOLDER. Variables with it are left out where the agent has no safe folder
(node.cache_folder)."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""glibc's malloc takes a block of at least the first size (bytes) from the kernel, and returns the
top of the heap above the second. Both are the values at which glibc's own adaptation stops
(mallopt(3)). That adaptation may stop earlier, by chance; then each step returns the memory that
the next step asks for: up to 1900 page faults a step instead of 65, which costs a small CNN a tenth
of its speed (bench/README.md)."""


class EnvVar(NamedTuple):
    """One environment variable of a rank, and why it has this value."""

    name: str
    value: str
    reason: str
