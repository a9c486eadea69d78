"""Measures a rank's compute time per step apart from its waits, in any loop. (rank side)

A straggler makes the steps of all ranks equally long, so only time without a wait for others is
compute time. All ranks have caught up with each other when gradients are averaged, that is when the
optimizer's step begins. From there data loading, the forward pass and the code between them count,
up to the end of the forward pass:

    DistributedDataParallel   its broadcast of buffers before the forward pass does not count,
                              nor does its backward pass: computation and waits overlap there
    Horovod                   all counts except `synchronize`, which waits for other ranks

On a GPU the marks are CUDA events, so GPU time counts, idle time of the stream included. A compiled
model, FSDP, and loops without DDP and Horovod leave no marks, and are not timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from raydist.worker.torch_private import FORWARD_BEGINS, FORWARD_ENDS

NEWEST = 64
"""Steps over which the median is taken: one step that also saves or evaluates does not make a rank
slow."""
NOTE_EVERY = 8
"""Steps between two notes: a median takes 4 us."""

NoteComputeTime = Callable[[int, float, float], None]
"""Takes (steps timed, compute seconds of one step, seconds of one step)."""


class StepTimer:
    """Times the computation of each step."""

    def __init__(self, note: NoteComputeTime) -> None:
        self._note_median = note
        self._since: Any = None
        """The mark since which the rank computes; None while it waits, or before the first step."""
        self._waited = False
        self._spans: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self._times: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        """(compute seconds, seconds) of each step."""
        self._pending: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque(maxlen=NEWEST)
        self._steps = 0

    def pause(self, waited: bool = True) -> None:
        """Mark that the rank waits from here. `waited`: for gradients of other ranks."""
        if self._since is not None:
            self._spans.append((self._since, mark()))
            self._since = None
        self._waited |= waited

    def resume(self) -> None:
        """Mark that the rank computes from here."""
        if self._begin is not None and self._since is None:
            self._since = mark()

    def end_step(self) -> None:
        """End a step and begin the next, once gradients are averaged."""
        if not self._waited:
            return
        now = mark()
        if self._begin is not None:
            self._pending.append((self._begin, now, self._spans))
        self._begin = self._since = now
        self._spans = []
        self._waited = False
        while self._pending and reached(self._pending[0][1]):
            self._note(*self._pending.popleft())

    def _note(self, begin: Any, end: Any, spans: list[tuple[Any, Any]]) -> None:
        self._times.append(
            (sum(seconds_between(*span) for span in spans), seconds_between(begin, end))
        )
        self._steps += 1
        if self._steps % NOTE_EVERY == 0:
            compute_s, step_s = zip(*self._times, strict=True)
            self._note_median(self._steps, statistics.median(compute_s), statistics.median(step_s))


def mark() -> Any:
    """Return a mark of this moment: a CUDA event if this process uses a GPU, otherwise the time."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    return time.perf_counter()


def reached(mark: Any) -> bool:
    """Report whether the GPU has reached this mark."""
    return isinstance(mark, float) or bool(mark.query())


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two marks.

    They are 0 between a time and a CUDA event, at the first use of a GPU.
    """
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0
    return float(begin.elapsed_time(end)) / 1000


def time_steps_of_process(note: NoteComputeTime) -> list[str]:
    """Time all further steps of this process; return which parts for it torch or Horovod lack."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    timer = StepTimer(note)
    register_optimizer_step_pre_hook(lambda *_: timer.end_step())
    _wrap_method(DDP, FORWARD_BEGINS, timer.pause, timer.resume)
    _wrap_method(DDP, FORWARD_ENDS, timer.pause, None)
    lacks = [
        f"torch {torch.__version__} has no DistributedDataParallel.{name}"
        for name in (FORWARD_BEGINS, FORWARD_ENDS)
        if not hasattr(DDP, name)
    ]
    if horovod := sys.modules.get("horovod.torch.optimizer"):
        # its public DistributedOptimizer is a function that derives a class from this one
        optimizer = getattr(horovod, "_DistributedOptimizer", None)
        if hasattr(optimizer, "synchronize"):
            _wrap_method(optimizer, "synchronize", timer.pause, timer.end_step)
        else:
            lacks.append("horovod has no _DistributedOptimizer.synchronize")
    return lacks


def _wrap_method(
    class_: Any, name: str, before: Callable[..., None], after: Callable[[], None] | None
) -> None:
    """Call `before` and `after` around a method, except while a compiler traces.

    Does nothing if this version of the library does not have the method.
    """
    method = getattr(class_, name, None)
    if method is None:
        return

    @wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not waits_for_others(self, name):
            return method(self, *args, **kwargs)
        before(name != FORWARD_BEGINS)
        result = method(self, *args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(class_, name, timed)


def waits_for_others(module: Any, name: str) -> bool:
    """Report whether a call is part of a step that averages gradients.

    A call in an evaluation or an accumulation is not.
    """
    return name == "synchronize" or (torch.is_grad_enabled() and module.require_backward_grad_sync)
