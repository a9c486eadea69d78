"""All private parts of torch that raydist uses, with the fallback for a torch without them. (rank side)"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from raydist.worker.protocol import Collective

if TYPE_CHECKING:
    from datetime import timedelta

    import torch

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


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside the block new tensors have no values, but a device: attention is that of a CPU, which meta's is not."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        from torch import device

        return device("meta")
    return FakeTensorMode()


def set_timeout(group: Any, limit: timedelta) -> None:
    """Set how long an operation of a process group may take; a mesh makes its groups with torch's own limit."""
    from torch.distributed import distributed_c10d

    # public since torch 2.15
    change = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(limit, group)


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Its state_dict with tensors on its device in place of numbers: a number would make the host wait for the GPU."""
    if not scaler.is_enabled() or (scale := scaler._scale) is None or (tracker := scaler._growth_tracker) is None:
        return scaler.state_dict()  # it was never used
    return {
        "scale": scale, "growth_factor": scaler.get_growth_factor(), "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(), "_growth_tracker": tracker,
    }  # fmt: skip
