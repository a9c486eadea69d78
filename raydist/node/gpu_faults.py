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
    """Return what is wrong with the GPU of a rank that has these variables; empty if nothing is.

    `lost_only`: without memory errors, which may be older than the run.
    """
    name = own_gpu(env)
    library = nvml.open_nvml() if name else None
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


def own_gpu(env: Mapping[str, str]) -> str:
    """Return the number or the uuid of a rank's GPU; empty if the rank has none."""
    local = int(env.get("LOCAL_RANK", "0"))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(local)
    names = [each.strip() for each in visible.split(",") if each.strip()]
    return names[local % len(names)] if names else ""
