"""The GPUs of this machine by NVML, with ctypes: Ray and nvidia-ml-py need not be there. (actor)"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, TypeVar

LIBRARY = "libnvidia-ml.so.1"
LOST = 15
"""NVML_ERROR_GPU_IS_LOST."""
SENSOR, UNCORRECTED, VOLATILE = 0, 1, 0
"""The sensor of a GPU itself; a kind of memory errors, and their counter since the driver was
loaded (nvml.h)."""


class Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


Kind = TypeVar("Kind", Memory, Utilization, ctypes.c_uint)


def open_nvml() -> Any:
    """Return NVML, initialised; None without an NVIDIA driver."""
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL(LIBRARY)
        if nvml.nvmlInit_v2() == 0:
            return nvml
    return None


def count_devices(nvml: Any) -> int:
    found = ctypes.c_uint()
    return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(found)) else found.value


def find_gpu(nvml: Any, name: str) -> tuple[int, ctypes.c_void_p]:
    """Return NVML's error code, and the handle of the GPU with this number or uuid if that is 0.

    That of a MIG instance is its GPU's.
    """
    gpu = ctypes.c_void_p()
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(gpu)), gpu
    code = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(gpu))
    if not code and name.startswith("MIG-"):
        code = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu, ctypes.byref(gpu))
    return code, gpu


def read_memory(nvml: Any, gpu: ctypes.c_void_p) -> Memory | None:
    return _read(nvml, "nvmlDeviceGetMemoryInfo", Memory(), gpu)


def read_utilization(nvml: Any, gpu: ctypes.c_void_p) -> Utilization | None:
    return _read(nvml, "nvmlDeviceGetUtilizationRates", Utilization(), gpu)


def read_milliwatts(nvml: Any, gpu: ctypes.c_void_p) -> int | None:
    found = _read(nvml, "nvmlDeviceGetPowerUsage", ctypes.c_uint(), gpu)
    return None if found is None else found.value


def read_celsius(nvml: Any, gpu: ctypes.c_void_p) -> int | None:
    found = _read(nvml, "nvmlDeviceGetTemperature", ctypes.c_uint(), gpu, SENSOR)
    return None if found is None else found.value


def _read(nvml: Any, function: str, into: Kind, *args: Any) -> Kind | None:
    """Return NVML's answer; None if this GPU, or this driver, does not report it."""
    ask = getattr(nvml, function, None)
    return None if ask is None or ask(*args, ctypes.byref(into)) else into


def count_errors(nvml: Any, name: str) -> tuple[int, int]:
    """Return NVML's error code, and the number of uncorrectable memory errors if that is 0."""
    code, gpu = find_gpu(nvml, name)
    errors = ctypes.c_ulonglong()
    code = code or nvml.nvmlDeviceGetTotalEccErrors(
        gpu, UNCORRECTED, VOLATILE, ctypes.byref(errors)
    )
    return code, errors.value
