"""The device that snapshots are copied from: queue, marks, page-locked memory. (rank side)

A GPU works through a queue, and the host runs ahead of it. Therefore an operation that must follow
a copy goes into the same queue, and the host learns from a mark in it that everything before it is
done. A state is copied in a second queue, alongside the training. Nothing else in raydist copies
from a GPU or asks it for events: a test replaces the device by one whose work finishes when the
test chooses.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

import torch


class Mark(Protocol):
    """A position in the queue of a device."""

    def done(self) -> bool:
        """Report whether the device has finished everything that was queued before."""
        ...

    def wait(self) -> None:
        """Wait until that is finished. RuntimeError: an operation of the device failed."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds of the device between two marks; both must be done."""
        ...


CopyPair = tuple[torch.Tensor, torch.Tensor]
"""Where a tensor is copied to, and the tensor."""


class Device(Protocol):
    """What snapshots and reports need of a device."""

    def lags(self, tensor: torch.Tensor) -> bool:
        """Report whether work on this tensor is queued, so that a copy is not complete at once."""
        ...

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the memory of the host."""
        ...

    def copy_state(self, pairs: Sequence[CopyPair], word: torch.Tensor, value: int) -> Mark:
        """Copy tensors to the memory of the host, and then write `value` to `word`.

        It begins when the device has done what is queued now, and runs alongside what is queued
        later, which must not change the tensors before `catch_up`. Returns the mark of its end.

        `word`: int64 of shape [1], in the host's memory.
        """
        ...

    def catch_up(self) -> None:
        """Have all that is queued from now on wait for the copies of `copy_state`.

        The host does not wait.
        """
        ...

    def mark(self) -> Mark:
        """Mark the end of what is queued now."""
        ...

    def register(self, memory: torch.Tensor) -> bool:
        """Page-lock host memory (uint8), so that copies to it do not block the host.

        Return False if that failed.
        """
        ...

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`.

        It must precede the unmapping of the memory: later memory may get the same address.
        """
        ...


class HostMark:
    """A moment in time: the host does its work at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: everything is done."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self.at - earlier.at


class HostDevice:
    """The CPU."""

    def lags(self, tensor: torch.Tensor) -> bool:
        return False

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def copy_state(self, pairs: Sequence[CopyPair], word: torch.Tensor, value: int) -> Mark:
        for into, source in pairs:
            into.copy_(source)
        word.fill_(value)
        return HostMark()

    def catch_up(self) -> None:
        """Do nothing: the copies are done."""

    def mark(self) -> Mark:
        return HostMark()

    def register(self, memory: torch.Tensor) -> bool:
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Do nothing: `register` did nothing."""


class CudaMark:
    """An event on a stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class CudaDevice:
    """The GPU of a rank. A tensor may be on another one: a model may be spread over several."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copy_streams: dict[torch.device, torch.cuda.Stream] = {}
        """The stream of each GPU for copies of states."""

    def lags(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source, non_blocking=True)

    def copy_state(self, pairs: Sequence[CopyPair], word: torch.Tensor, value: int) -> Mark:
        last = self._begin_copies(self._device)
        with torch.cuda.stream(last):
            made = torch.full((1,), value, dtype=torch.int64, device=self._device)
        for device in {source.device for _, source in pairs}:
            own = [(into, source) for into, source in pairs if source.device == device]
            if device.type != "cuda":
                for into, source in own:
                    into.copy_(source)
                continue
            stream = self._begin_copies(device)
            with torch.cuda.stream(stream):
                for into, source in own:
                    into.copy_(source, non_blocking=True)
                    # The memory of a tensor that is deleted is reused only after its copy.
                    source.record_stream(stream)
            last.wait_stream(stream)
        with torch.cuda.stream(last):
            word.copy_(made, non_blocking=True)
        return CudaMark(last)

    def _begin_copies(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies from a GPU, which waits for all that is queued there."""
        if device not in self._copy_streams:
            self._copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._copy_streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def catch_up(self) -> None:
        for device, stream in self._copy_streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def mark(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device))

    def register(self, memory: torch.Tensor) -> bool:
        # A new thread starts on GPU 0, and would create a context there.
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
            if int(code) == 0:
                return True
            # CUDA keeps the error, and the next kernel raises it, wherever that is. Therefore it is
            # raised and cleared here.
            with contextlib.suppress(RuntimeError):
                torch.full((1,), 0, device=self._device)
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            code = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
        if int(code) != 0:
            raise RuntimeError(f"cudaHostUnregister failed with error {int(code)}")


def device_of(device: torch.device) -> Device:
    """Return the Device for a torch.device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()
