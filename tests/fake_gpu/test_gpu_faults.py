"""What NVML says of the GPU of a rank that makes no progress."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raydist.node import gpu_faults, nvml
from tests.fake_gpu import FakeGpus, Gpu, requires_fake_gpus

pytestmark = [requires_fake_gpus, pytest.mark.slow, pytest.mark.timeout(900)]


def test_memory_errors_and_a_lost_gpu_are_reported_to_the_rank_that_has_it(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeGpus(tmp_path, libraries, 4)
    machine.change(1, Gpu(state="ecc"))
    machine.change(2, Gpu(state="lost"))
    machine.change(3, Gpu(state="ecc", mig=2))
    monkeypatch.setenv("FAKE_GPU", str(machine.folder))
    monkeypatch.setattr(nvml, "LIBRARY", str(libraries / "libnvidia-ml.so.1"))

    def fault(local: int, visible: str | None, lost_only: bool = False) -> str:
        env = {"LOCAL_RANK": str(local)}
        env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return asyncio.run(gpu_faults.find_fault(env, 60, lost_only))

    errors = "NVML has counted 1 uncorrectable ECC error of GPU {} since its driver was loaded"
    assert fault(1, None) == errors.format(1)
    assert fault(1, "3,1,0") == errors.format(1)
    assert fault(0, machine.uuid(1)) == errors.format(machine.uuid(1))
    assert fault(0, machine.uuid(3, 1)) == errors.format(machine.uuid(3, 1))
    assert fault(2, None) == "NVML reports that GPU 2 is lost: it has fallen off the bus"
    assert [fault(local, None, lost_only=True) for local in (1, 2)] == ["", fault(2, None)]
    assert [fault(0, visible) for visible in ("0,1", "", "-1", "GPU-none")] == [""] * 4


def test_without_a_driver_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml.so.none")
    assert asyncio.run(gpu_faults.find_fault({"LOCAL_RANK": "0"}, 60)) == ""
