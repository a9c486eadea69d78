"""The thread that makes a profile of a rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydist.shared import kinds
from raydist.worker import context, profiling, torch_private
from raydist.worker.profiling import Recording
from raydist.worker.torch_private import ProfilerTurn


@pytest.mark.parametrize("cuda", [True, False])
def test_a_profile_is_made_on_the_gpu_of_its_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: bool
) -> None:
    """Each rank of a node had a context on GPU 0, too. Without CUDA in torch no device is asked."""
    used: list[Any] = []

    def set_device(device: torch.device) -> None:
        used.append((threading.current_thread().name, device))

    gpu = torch.device("cuda", 3)

    def device(rank: context.Rank) -> torch.device:
        assert cuda
        return gpu

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(context.Rank, "device", property(device))
    monkeypatch.setattr(torch_private, "profile_all_threads", nullcontext)
    me = context.Rank(rank=3, local_rank=3, world_size=4, run_dir=tmp_path)
    context.enter(context.Context(rank=me, emit=lambda event: None, beat=lambda step, phase: None))
    try:
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        recording = Recording(tmp_path / "trace", "trace", False, ProfilerTurn(), told.put)
        assert told.get(timeout=60) == ""
        recording.drop()
    finally:
        context.enter(None)
    assert used == ([("raydist-profile", gpu)] if cuda else [])


def test_steps_that_the_profiler_has_missed_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of them would lack what they did."""
    ready = threading.Event()
    ready.set()

    @contextmanager
    def profile() -> Iterator[SimpleNamespace]:
        assert ready.wait(60)
        yield SimpleNamespace(
            add_metadata_json=lambda *_: None,
            export_chrome_trace=lambda path: Path(path).write_text("{}"),
        )

    monkeypatch.setattr(torch_private, "profile_all_threads", profile)
    monkeypatch.setattr(profiling, "START_S", 0.1)
    reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
    me = context.Rank(rank=1, local_rank=1, world_size=2, run_dir=tmp_path)
    context.enter(context.Context(rank=me, emit=reported.put, beat=lambda step, phase: None))
    try:
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        recording = Recording(tmp_path / "trace", "trace", False, ProfilerTurn(), told.put)
        assert told.get(timeout=60) == ""
        ready.clear()
        recording.begin(1, 2)
        recording.note_step(2)
        recording.note_step(3)
        ready.set()
        event = reported.get(timeout=60)
    finally:
        context.enter(None)
    assert isinstance(event, kinds.Profiled)
    assert (event.rank, event.path) == (1, "")
    assert "was not ready within 0.1 s" in event.error
