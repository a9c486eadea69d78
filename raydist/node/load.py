"""How busy this machine is: CPU, memory, GPUs by NVML, bytes of its network ports. (actor)"""

from __future__ import annotations

import time
from typing import Any

from raydist.messages.agent import GpuLoad, NodeLoad
from raydist.node import nvml
from raydist.node.counters import read_counters

FIRST_S = 0.2
"""Seconds over which the first CPU share is taken; each later one is the mean since the previous
reading."""
MAX_PORTS = 16
"""Maximum reported ports, those with the most bytes: a host of containers has hundreds of virtual
interfaces."""


class LoadReader:
    """Reads the load of this machine repeatedly."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._cpu: tuple[float, float] | None = None
        """Seconds (idle, total) of the cores at the last reading; psutil keeps its own per thread.
        """

    def read(self) -> NodeLoad:
        """Return CPU share of all cores, memory, GPUs and ports.

        It blocks: 0.2 s the first time, later some milliseconds.
        """
        import psutil

        if self._cpu is None:
            self._nvml = nvml.open_nvml()
            self._cpu = cpu_seconds()
            time.sleep(FIRST_S)
        before, self._cpu = self._cpu, cpu_seconds()
        memory = psutil.virtual_memory()
        return {
            "cpu": round(1 - (self._cpu[0] - before[0]) / max(1e-3, self._cpu[1] - before[1]), 3),
            "memory": (memory.total - memory.available, memory.total),
            "gpus": gpu_loads(self._nvml) if self._nvml else [],
            "ports": read_ports(),
        }


def cpu_seconds() -> tuple[float, float]:
    """Return the seconds (idle, total) of all cores since the machine booted."""
    import psutil

    times = psutil.cpu_times()
    # Linux counts them in user and nice too.
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return times.idle + getattr(times, "iowait", 0.0), sum(times) - guest


def read_ports() -> dict[str, tuple[int, int]]:
    """Return (bytes received, bytes sent) of the ports that are up, by name."""
    ports = {
        name: (port["received"], port["sent"])
        for name, port in read_counters().items()
        if port["active"] and port["received"] is not None and port["sent"] is not None
    }
    busiest = sorted(ports, key=lambda name: -sum(ports[name]))[:MAX_PORTS]
    return {name: ports[name] for name in sorted(busiest)}


def gpu_loads(library: Any) -> list[GpuLoad]:
    """Return the load of each GPU, in NVML's order.

    What a GPU does not report, for example under MIG, is None.
    """
    found: list[GpuLoad] = []
    for index in range(nvml.count_devices(library)):
        # A GPU that has fallen off the bus has no handle, and reports nothing.
        _, gpu = nvml.find_gpu(library, str(index))
        memory = nvml.read_memory(library, gpu)
        busy = nvml.read_utilization(library, gpu)
        milliwatts = nvml.read_milliwatts(library, gpu)
        found.append(
            {
                "util": None if busy is None else busy.gpu / 100,
                "memory": None if memory is None else (memory.used, memory.total),
                "power_w": None if milliwatts is None else round(milliwatts / 1000),
                "temp_c": nvml.read_celsius(library, gpu),
            }
        )
    return found
