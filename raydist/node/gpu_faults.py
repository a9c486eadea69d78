"""Determines by NVML whether the GPU of a silent or failed rank is broken. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping

from raydist.node import nvml


async def find_fault(env: Mapping[str, str], within_s: float, lost_only: bool = False) -> str:
    """Return what `gpu_fault` does; empty if NVML does not answer in time, or has no answer."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def ask() -> None:
        text = gpu_fault(env, lost_only)
        with contextlib.suppress(RuntimeError):  # the agent has closed meanwhile
            loop.call_soon_threadsafe(found.set_result, text)

    # A daemon: NVML may wait for a broken GPU forever, and this process must be able to end.
    threading.Thread(target=ask, name="raydist-nvml", daemon=True).start()
    await asyncio.wait({found}, timeout=within_s)
    return found.result() if found.done() else ""


def gpu_fault(env: Mapping[str, str], lost_only: bool = False) -> str:
    """Return what is wrong with the GPUs of a rank that has these variables; empty if nothing is.

    `lost_only`: without memory errors, which may be older than the run.
    """
    names = own_gpus(env)
    library = nvml.open_nvml() if names else None
    if library is None:
        return ""
    try:
        faults = [fault_of(name, *nvml.count_errors(library, name), lost_only) for name in names]
    finally:
        library.nvmlShutdown()
    return "; ".join(filter(None, faults))


def fault_of(name: str, code: int, errors: int, lost_only: bool) -> str:
    """Return what is wrong with a GPU for which NVML has returned this code and these errors."""
    if code == nvml.LOST:
        return f"NVML reports that GPU {name} is lost: it has fallen off the bus"
    if code or lost_only or not errors:  # a GPU of a workstation counts no errors
        return ""
    counted = "1 uncorrectable ECC error" if errors == 1 else f"{errors} uncorrectable ECC errors"
    return f"NVML has counted {counted} of GPU {name} since its driver was loaded"


def own_gpus(env: Mapping[str, str]) -> list[str]:
    """Return the numbers or the uuids of a rank's GPUs; empty if the rank has none.

    With scale.gpus=2 the first ones of all ranks of the node come first (network.binding).
    """
    local, ranks = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(local)]
    names = [each.strip() for each in visible.split(",") if each.strip()]
    if local < len(names) and len(names) % ranks == 0:
        return names[local::ranks]
    return [names[local % len(names)]] if names else []
