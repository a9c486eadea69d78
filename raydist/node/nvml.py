"""The GPUs of this machine by NVML, with ctypes: Ray and nvidia-ml-py need not be there. (actor)"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, TypeVar

LIBRARY = "libnvidia-ml.so.1"
LOST = 15
"""NVML_ERROR_GPU_IS_LOST."""
TIMEOUT = 10
"""NVML_ERROR_TIMEOUT: there was no event."""
SENSOR, UNCORRECTED, VOLATILE, XIDS = 0, 1, 0, 8
"""The sensor of a GPU itself; a kind of memory errors, and their counter since the driver was
loaded; a type of events (nvml.h)."""
WHOLE = 0xFFFFFFFF
"""In place of the number of a MIG instance: the whole GPU."""


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


class Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


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


def record_xids(nvml: Any, name: str) -> ctypes.c_void_p | None:
    """Have NVML record a GPU's Xids from now on, and return the set for `nvmlEventSetWait_v2`.

    None if there is no such GPU, or this driver or this user can't.
    """
    code, gpu = find_gpu(nvml, name)
    events = ctypes.c_void_p()
    if code or not hasattr(nvml, "nvmlEventSetWait_v2"):
        return None
    if nvml.nvmlEventSetCreate(ctypes.byref(events)):
        return None
    if nvml.nvmlDeviceRegisterEvents(gpu, ctypes.c_ulonglong(XIDS), events):
        nvml.nvmlEventSetFree(events)
        return None
    return events


def read_instance(nvml: Any, name: str) -> int:
    """Return the number of a MIG instance on its GPU; WHOLE for a GPU."""
    instance, found = ctypes.c_void_p(), ctypes.c_uint(WHOLE)
    if name.startswith("MIG-") and not nvml.nvmlDeviceGetHandleByUUID(
        name.encode(), ctypes.byref(instance)
    ):
        nvml.nvmlDeviceGetGpuInstanceId(instance, ctypes.byref(found))
    return found.value
