"""A device whose work finishes when the test says so, and host threads that run ahead of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from raydist.state.device import CopyPair, Mark


class Killed(BaseException):
    """Raised in the thread of a host to end it."""


class LaggingQueue:
    """One queue of a `Lagging`."""

    def __init__(self) -> None:
        self.items: deque[tuple[Callable[[], Any], Callable[[], bool]]] = deque()
        self.queued = self.ended = 0
        self.clock = 0.0

    def launch(
        self, work: Callable[[], Any], s: float = 0.0, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue work that takes `s` seconds and begins once it is `ready`."""

        def run() -> None:
            work()
            self.clock += s

        self.items.append((run, ready))
        self.queued += 1

    def wait_for(self, other: LaggingQueue) -> None:
        """Have what is queued later begin after all that the other queue has now."""
        at: list[float] = []
        other.launch(lambda: at.append(other.clock))

        def catch_up() -> None:
            self.clock = max(self.clock, *at)

        self.launch(catch_up, ready=lambda: bool(at))

    def advance(self) -> bool:
        """Do the next piece of work; return whether one was ready."""
        if not self.items or not self.items[0][1]():
            return False
        self.items.popleft()[0]()
        self.ended += 1
        return True


class LaggingMark:
    """A position in a queue of a `Lagging`."""

    def __init__(self, device: Lagging, queue: LaggingQueue) -> None:
        self._device, self._queue = device, queue
        self._clock = [0.0]
        queue.launch(lambda: self._clock.append(queue.clock))
        self._number = queue.queued

    def done(self) -> bool:
        return self._queue.ended >= self._number

    def wait(self) -> None:
        while not self.done():
            self._device.pause()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, LaggingMark)
        assert self.done()
        return self._clock[-1] - earlier._clock[-1]


class Lagging:
    """A device (raydist.state.device) that works only when it is told to advance.

    `pause` is called while a host waits for it. `on_host` are the tensors that are not on it, such
    as Adam's `step`.
    """

    def __init__(
        self,
        pause: Callable[[], Any] | None = None,
        copy_s: float = 0.0,
        on_host: Sequence[torch.Tensor] = (),
    ) -> None:
        self.pause = pause or self.advance
        self.queue, self.copies = LaggingQueue(), LaggingQueue()
        self.registered: dict[int, int] = {}
        self.register_calls = 0
        self.room = 1 << 40
        self._copy_s = copy_s
        self._on_host = {tensor.data_ptr() for tensor in on_host}

    def launch(
        self, work: Callable[[], Any], s: float = 0.0, ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue work of the training."""
        self.queue.launch(work, s, ready)

    def advance(self) -> bool:
        """Do the next piece of work of either queue; return whether one was ready."""
        return self.queue.advance() or self.copies.advance()

    def lags(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in self._on_host

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        if self.lags(source):
            self.launch(lambda: into.copy_(source))
        else:
            into.copy_(source)

    def copy_state(self, pairs: Sequence[CopyPair], word: torch.Tensor, value: int) -> Mark:
        self.copies.wait_for(self.queue)
        for into, source in pairs:
            if self.lags(source):
                self.copies.launch(partial(into.copy_, source), self._copy_s)
            else:
                into.copy_(source)
        self.copies.launch(lambda: word.fill_(value))
        return LaggingMark(self, self.copies)

    def catch_up(self) -> None:
        self.queue.wait_for(self.copies)

    def mark(self) -> Mark:
        return LaggingMark(self, self.queue)

    def register(self, memory: torch.Tensor) -> bool:
        self.register_calls += 1
        if sum(self.registered.values()) + memory.numel() > self.room:
            return False
        assert memory.data_ptr() not in self.registered, "this address is page-locked already"
        self.registered[memory.data_ptr()] = memory.numel()
        return True

    def unregister(self, memory: torch.Tensor) -> None:
        assert self.registered.pop(memory.data_ptr()) == memory.numel()


class TurnHost:
    """A thread that runs only in its turns and ends a turn by `pause`, so that a test can try any
    order of several threads."""

    def __init__(self, program: Callable[[TurnHost], None]) -> None:
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self._thread.start()

    def _run(self, program: Callable[[TurnHost], None]) -> None:
        try:
            self._turn.acquire()
            if not self._killed:
                program(self)
        except Killed:
            pass
        except BaseException as error:
            self.failed = error
        self._killed = True
        self._back.release()

    def pause(self) -> None:
        """Wait for the next turn; called by the program."""
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    def run_turn(self) -> None:
        """Let the program run to its next pause."""
        if not self._killed:
            self._turn.release()
            self._back.acquire()
        if self.failed is not None:
            raise self.failed

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._turn.release()
        self._thread.join(10)
