"""What NVML says of the GPU of a rank that makes no progress."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from raydist.node import gpu_faults, nvml
from raydist.node.xid_watch import XidWatch
from raydist.node.xids import describe_xid
from tests.fake_gpu import FakeGpus, Gpu, requires_fake_gpus
from tests.waiting import wait_until

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
        return asyncio.run(gpu_faults.find_fault(gpu_faults.own_gpus(env), 60, lost_only))

    errors = "NVML has counted 1 uncorrectable ECC error of GPU {} since its driver was loaded"
    assert fault(1, None) == errors.format(1)
    assert fault(1, "3,1,0") == errors.format(1)
    assert fault(0, machine.uuid(1)) == errors.format(machine.uuid(1))
    assert fault(0, machine.uuid(3, 1)) == errors.format(machine.uuid(3, 1))
    assert fault(2, None) == "NVML reports that GPU 2 is lost: it has fallen off the bus"
    assert [fault(local, None, lost_only=True) for local in (1, 2)] == ["", fault(2, None)]
    both = asyncio.run(gpu_faults.find_fault(["0", "1", "2"], 60))
    assert both == f"{fault(1, None)}; {fault(2, None)}"
    assert [fault(0, visible) for visible in ("0,1", "", "-1", "GPU-none")] == [""] * 4


def test_xids_are_those_of_the_ranks_own_gpu_or_mig_instance(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None from before the rank was started; one that only follows from others is no warning."""
    machine = FakeGpus(tmp_path, libraries, 2, Gpu(mig=2))
    monkeypatch.setenv("FAKE_GPU", str(machine.folder))
    monkeypatch.setattr(nvml, "LIBRARY", str(libraries / "libnvidia-ml.so.1"))
    told: list[str] = []

    async def watch(visible: str) -> list[str]:
        """Report Xids until the last one has been noted; return all lines."""
        found = XidWatch(told.append)
        found.start({"CUDA_VISIBLE_DEVICES": visible})

        def noted() -> bool:
            whole = (0, 119, -1)  # of the whole GPU
            machine.report_xids((1, 95, -1), (0, 48, 0), (0, 45, 1), whole)
            return describe_xid(119, visible) in found.lines()

        await asyncio.to_thread(wait_until, noted, "Xids", 120)
        found.close()
        return found.lines()

    machine.report_xid(0, 79)
    machine.report_xid(0, 79, instance=1)
    for visible, own in (("0", [48, 45, 119]), (machine.uuid(0, 1), [45, 119])):
        told.clear()
        lines = [describe_xid(number, visible) for number in own]
        assert asyncio.run(watch(visible)) == lines
        assert told == [line for line in lines if "Xid 45" not in line]


def test_a_second_gpu_of_a_rank_has_xids_too(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeGpus(tmp_path, libraries, 4)
    monkeypatch.setenv("FAKE_GPU", str(machine.folder))
    monkeypatch.setattr(nvml, "LIBRARY", str(libraries / "libnvidia-ml.so.1"))

    async def watch() -> list[str]:
        found = XidWatch(lambda line: None, count=2)
        env = {"CUDA_VISIBLE_DEVICES": "0,2,1,3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        found.start(env)

        def noted() -> bool:
            for number in range(4):
                machine.report_xid(number, 48)
            return len(found.lines()) == 2

        await asyncio.to_thread(wait_until, noted, "Xids", 120)
        found.close()
        return found.lines()

    assert {*asyncio.run(watch())} == {describe_xid(48, gpu) for gpu in ("2", "3")}


@pytest.mark.parametrize("visible", ["0", "", "-1", "GPU-none"])
def test_without_the_right_to_events_or_a_gpu_there_are_no_xids(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    machine = FakeGpus(tmp_path, libraries, 1)
    machine.ask("no-events")
    monkeypatch.setenv("FAKE_GPU", str(machine.folder))
    monkeypatch.setattr(nvml, "LIBRARY", str(libraries / "libnvidia-ml.so.1"))
    assert watching_threads_end({"CUDA_VISIBLE_DEVICES": visible}) == []


def watching_threads_end(env: dict[str, str]) -> list[str]:
    """Return the lines of a watch once its thread has ended by itself."""

    async def watch() -> list[str]:
        found = XidWatch(lambda line: None)
        found.start(env)
        for thread in threading.enumerate():
            if thread.name == "raydist-xids":
                await asyncio.to_thread(thread.join, 120)
                assert not thread.is_alive()
        return found.lines()

    return asyncio.run(watch())


def test_without_a_driver_there_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnvidia-ml.so.none")
    assert asyncio.run(gpu_faults.find_fault(["0"], 60)) == ""
    assert watching_threads_end({"LOCAL_RANK": "0"}) == []
