"""Environment variables as data; values that planner and agents must agree on. (either side)"""

from __future__ import annotations

from typing import NamedTuple

RANK_FOLDER = "<the rank's folder on its node>"
"""Placeholder in a variable's value.

The rank's agent replaces it by the folder that it created on its node.
"""

CACHE_FOLDER = "<your cache on the node>"
"""Placeholder like RANK_FOLDER.

Variables with it are left out if the agent has no safe folder (node.cache_folder).
"""

RAS_PORT = "<a free port of the node>"
"""Placeholder like RANK_FOLDER, for the port at which NCCL's RAS answers the rank's agent."""

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Thresholds in bytes of glibc's malloc.

A block of at least the first size is taken from the kernel; the top of the heap above the second is
returned to it. Both are the values at which glibc's own adaptation stops (mallopt(3)). That
adaptation may stop earlier, by chance; then each step returns the memory that the next step needs:
up to 1900 page faults a step instead of 65, which costs a small CNN a tenth of its speed
(bench/README.md).
"""


class EnvVar(NamedTuple):
    """One environment variable of a rank, and why it has this value."""

    name: str
    value: str
    reason: str
