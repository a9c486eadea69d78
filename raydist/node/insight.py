"""What a stuck rank can still tell: Python's stacks by a signal, its last collectives from a thread. (rank side)"""

from __future__ import annotations

import faulthandler
import json
import sys
from typing import Any

from raydist.node.wire import STACKS_SIGNAL

LAST = 8
"""Collectives that are told of each backend."""
TOLD = (
    "process_group",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "state",
    "retired",
)

_opened: list[Any] = []


def answer_signal(path: str) -> None:
    """From now on STACKS_SIGNAL appends the stacks of all threads to a file.

    The handler is C: it answers from inside a collective too. It does not outlive an exec.
    """
    _opened.append(open(path, "a"))  # noqa: SIM115 - as long as the process
    faulthandler.register(STACKS_SIGNAL, file=_opened[-1], all_threads=True)


def collectives() -> list[dict[str, Any]]:
    """The newest entries of torch's flight recorder, the oldest first; it is on by default, for gloo on a CPU too."""
    if "torch.distributed" not in sys.modules:
        return []
    from torch._C import _distributed_c10d as c10d

    found: list[dict[str, Any]] = []
    for backend in ("gloo", "nccl"):
        try:
            trace = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False, backend=backend))
        except Exception:  # an older torch, or one without that backend
            continue
        found += [{key: entry.get(key) for key in TOLD} for entry in trace.get("entries", ())[-LAST:]]
    return found
