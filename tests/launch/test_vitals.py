"""Events about ranks and nodes during training: their content, interval and number in a large
run."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import placement
from raydist.cluster.placement import Plan
from raydist.launch import vitals
from raydist.launch.vitals import Pace, Rhythm, Vitals
from raydist.messages.request import Request
from raydist.node.load import LoadReader, gpu_loads
from raydist.shared.events import Events
from raydist.shared.kinds import EventJson
from tests.cluster.test_placement import node
from tests.records import Seen, event
from tests.recovery.fake_group import job
from tests.waiting import wait_until

DAY_S = 86400.0
GPU = {"util": 0.97, "memory": (71234567890, 85899345920), "power_w": 687, "temp_c": 61}
PORTS = {f"mlx5_{i}:1": (12345678901234, 12345678901234) for i in range(8)} | {
    "eth0": (123456789012, 12345678901)
}
LOAD = {"cpu": 0.123, "memory": (123456789012, 2199023255552), "gpus": [GPU] * 8, "ports": PORTS}
PATIENCE_S = 10.0


@pytest.fixture
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FIRST_S": 0.01,
        "EVERY_S": 0.01,
        "LOAD_S": 0.05,
        "BYTES_PER_S": 1e9,
    }.items():
        monkeypatch.setattr(vitals, name, value)


def plan(nodes: int, per_node: int = 1) -> Plan:
    there = [node(i, cpu=per_node) for i in range(1, nodes + 1)]
    small = placement.assign_ranks(placement.resources_for(job(nodes), there), there)
    assert small.world_size == nodes
    return small


class VitalsRun:
    """A Vitals over so many nodes with the given paces and answers, and the events that it
    reports."""

    def __init__(self, folder: Path, nodes: int, paces: Any, answers: Any) -> None:
        self.seen = Seen()
        self.events = Events(folder / "events.jsonl", (self.seen,))
        self.calls: list[int] = []
        self._answers = answers
        self.vitals = Vitals(self.events, paces, plan(nodes), self._call)

    def _call(self, rank: int, request: Request[Any]) -> Future[Any]:
        self.calls.append(rank)
        reply: Future[Any] = Future()
        self._answers(rank, reply)
        return reply

    def wait_for(self, *kinds: str) -> dict[str, EventJson]:
        """Return the first event of each of these kinds."""
        wait_until(
            lambda: {event["kind"] for event in self.seen} >= set(kinds),
            lambda: f"{kinds}, only {self.seen}",
        )
        return {kind: next(event for event in self.seen if event["kind"] == kind) for kind in kinds}


def answer(rank: int, reply: Future[Any]) -> None:
    if rank == 1:
        reply.set_exception(OSError("the node is gone"))
    elif rank != 2:  # which is silent
        reply.set_result(LOAD)


@pytest.mark.usefixtures("_short_intervals")
def test_both_are_told_of_what_answers(tmp_path: Path) -> None:
    run = VitalsRun(tmp_path, 4, lambda: {3: (7, 0.0123456, 0.5), 0: (8, 0.0, 0.0)}, answer)
    with run.vitals:
        events = run.wait_for("pace", "nodes")
    assert events["pace"]["ranks"] == {"0": [8, 0.0, 0.0], "3": [7, 0.01235, 0.5]}
    assert list(events["nodes"]["nodes"]) == ["node-1", "node-4"]
    assert events["nodes"]["nodes"]["node-1"]["gpus"][0]["memory"] == [71234567890, 85899345920]


@pytest.mark.usefixtures("_short_intervals")
def test_a_silent_node_is_asked_once_and_nothing_is_said_after_the_end(tmp_path: Path) -> None:
    run = VitalsRun(tmp_path, 3, dict, answer)
    with run.vitals:
        wait_until(lambda: run.calls.count(0) >= 3, "three calls to rank 0")
    assert run.calls.count(2) == 1
    count = len(run.seen)
    time.sleep(0.2)
    assert len(run.seen) == count
    assert {event["kind"] for event in run.seen} == {"nodes"}


@pytest.mark.usefixtures("_short_intervals")
def test_a_failure_is_one_warning_and_the_other_kind_goes_on(tmp_path: Path) -> None:
    def broken() -> dict[int, Pace]:
        raise RuntimeError("no such thing")

    run = VitalsRun(tmp_path, 1, broken, answer)
    with run.vitals:
        events = run.wait_for("warning", "nodes")
        wait_until(lambda: run.calls.count(0) >= 4, "four calls to rank 0")
    assert events["warning"]["text"] == "no more pace events: RuntimeError: no such thing"
    assert [event["kind"] for event in run.seen].count("warning") == 1


@pytest.mark.parametrize(("nodes", "per_node", "every_s"), [(1, 2, 10), (2, 8, 22), (128, 8, 1500)])
def test_a_day_of_a_large_run_is_small(
    tmp_path: Path, nodes: int, per_node: int, every_s: float
) -> None:
    facts: dict[str, dict[str, Any]] = {
        "pace": {"ranks": dict.fromkeys(range(nodes * per_node), (1234567, 0.01234, 0.1234))},
        "nodes": {"nodes": {f"gpu-node-{i:03}": LOAD for i in range(nodes)}},
    }
    path, longest = tmp_path / "events.jsonl", 0.0
    for kind, fields in facts.items():
        with Events(tmp_path / kind) as events:
            events.add(event(kind, **fields))
        size, rhythm = (tmp_path / kind).stat().st_size, Rhythm(2.0)
        with path.open("ab") as file:
            while rhythm.due < DAY_S:
                file.write(b"x" * size)
                rhythm.note(rhythm.due, size)
        longest = max(longest, rhythm.every_s)
    assert path.stat().st_size < 20e6
    assert longest == pytest.approx(every_s, rel=0.3)


def test_this_machine_has_a_load() -> None:
    reader = LoadReader()
    with (
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(1) as other,
    ):  # an agent's readings are in any thread
        first = one.submit(reader.read).result()
        busy_until = time.process_time() + 0.3
        while time.process_time() < busy_until:
            pass
        second = other.submit(reader.read).result()
    assert 0 < second["cpu"] <= 1
    for load in (first, second):
        assert 0 < load["memory"][0] < load["memory"][1]
        assert all(received >= 0 and sent >= 0 for received, sent in load["ports"].values())


class Nvml:
    """What NVML answers on a machine with two GPUs, of which the second tells only its memory. A result
    is an error code; the answer goes into what the last argument refers to."""

    def nvmlDeviceGetCount_v2(self, into: Any) -> int:
        into._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, into: Any) -> int:
        into._obj.value = index + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, gpu: Any, into: Any) -> int:
        into._obj.used, into._obj.total = 9 + gpu.value, 100
        return 0

    def nvmlDeviceGetUtilizationRates(self, gpu: Any, into: Any) -> int:
        into._obj.gpu = 93
        return NOT_SUPPORTED if gpu.value == 2 else 0

    def nvmlDeviceGetPowerUsage(self, gpu: Any, into: Any) -> int:
        into._obj.value = 512400
        return NOT_SUPPORTED if gpu.value == 2 else 0

    def nvmlDeviceGetTemperature(self, gpu: Any, sensor: int, into: Any) -> int:
        into._obj.value = 55
        return NOT_SUPPORTED if gpu.value == 2 else 0


NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED."""


def test_a_gpu_that_does_not_tell_everything_tells_the_rest() -> None:
    assert gpu_loads(Nvml()) == [
        {"util": 0.93, "memory": (10, 100), "power_w": 512, "temp_c": 55},
        {"util": None, "memory": (11, 100), "power_w": None, "temp_c": None},
    ]
