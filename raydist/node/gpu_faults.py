"""Determines by NVML whether a GPU of a silent or failed rank is broken. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence

from raydist.node import nvml


async def find_fault(gpus: Sequence[str], within_s: float, lost_only: bool = False) -> str:
    """Return what `gpu_fault` says of these GPUs; empty if NVML does not answer in time."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def ask() -> None:
        text = "; ".join(filter(None, (gpu_fault(gpu, lost_only) for gpu in gpus)))
        with contextlib.suppress(RuntimeError):  # the agent has closed meanwhile
            loop.call_soon_threadsafe(found.set_result, text)

    # A daemon: NVML may wait for a broken GPU forever, and this process must be able to end.
    threading.Thread(target=ask, name="raydist-nvml", daemon=True).start()
    await asyncio.wait({found}, timeout=within_s)
    return found.result() if found.done() else ""


def gpu_fault(name: str, lost_only: bool = False) -> str:
    """Return what is wrong with the GPU of this number or uuid; empty if nothing is.

    `lost_only`: without memory errors, which may be older than the run.
    """
    library = nvml.open_nvml()
    if library is None:
        return ""
    try:
        code, errors = nvml.count_errors(library, name)
    finally:
        library.nvmlShutdown()
    if code == nvml.LOST:
        return f"NVML reports that GPU {name} is lost: it has fallen off the bus"
    if code or lost_only or not errors:  # a GPU of a workstation counts no errors
        return ""
    counted = "1 uncorrectable ECC error" if errors == 1 else f"{errors} uncorrectable ECC errors"
    return f"NVML has counted {counted} of GPU {name} since its driver was loaded"


def own_gpus(env: Mapping[str, str], count: int = 1) -> list[str]:
    """Return the numbers or the uuids of a rank's GPUs; none if the rank has none.

    `env`: its variables. `count`: GPUs of each rank. network.binding lists one of each rank of the
    node, then a second one of each, and so on.
    """
    local, ranks = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    places = range(local, local + count * ranks, ranks)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(place) for place in places]
    names = [each.strip() for each in visible.split(",") if each.strip()]
    return [*dict.fromkeys(names[place % len(names)] for place in places)] if names else []
