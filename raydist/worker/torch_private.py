"""All private parts of torch that raydist uses, with the fallback for a torch without them. (rank side)"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import cast

from raydist.worker.protocol import Collective

RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The flight recorder of each backend: functions of torch._C._distributed_c10d, Python's way to FlightRecorder.hpp.

torch 2.15 has a third argument, `backend`, in the first one. Called without it, all versions return the same.
"""


def flight_recorder(backend: str) -> list[Collective] | None:
    """The collectives in the recorder of a backend, the oldest first; None if this torch has no such recorder.

    The recorder is on by default, for gloo on a CPU too (torch 2.8 and newer).
    """
    from torch._C import _distributed_c10d

    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, RECORDERS[backend], None)
    if dump is None:
        return None
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []
    return [cast("Collective", {key: entry.get(key) for key in Collective.__annotations__}) for entry in entries]
