"""A rank's own work apart from its waiting for others, step by step, whoever wrote the loop. (rank side)

What makes all ranks equally late must not make all look equally slow: only time in which a rank waits for nobody is
counted. Ranks are level when gradients are averaged, that is when the optimizer's step begins. From there on data,
forward pass and whatever else lies between count as work, up to the end of the forward pass:

    DistributedDataParallel   its exchange of buffers before the forward pass is left out; in its backward pass waiting
                              and work are one, and none of it counts
    Horovod                   all counts but `synchronize`, where it waits for the others

On a GPU the marks are events of the stream: what counts is the time of the GPU, starved moments among it. A compiled
model, FSDP, and loops without either of the two leave no marks, and nothing is told of them.
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

NEWEST = 64
"""Steps over which a rank's work is the median: one that saves or evaluates in between is not slow."""
TELL = 8
"""Steps between two notes: a median takes 4 us."""

Tell = Callable[[int, float, float], None]
"""Takes (steps seen, seconds of own work in one, seconds of one)."""


class Stopwatch:
    """Seconds of own work of each step."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._since: Any = None
        """The mark since which work counts; None while the rank waits, or before the first step."""
        self._waited = False
        self._spans: list[tuple[Any, Any]] = []
        self._begin: Any = None
        self._known: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        self._coming: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque(maxlen=NEWEST)
        self._steps = 0

    def rest(self, waited: bool = True) -> None:
        """What comes now is waiting. `waited`: for the others' gradients."""
        if self._since is not None:
            self._spans.append((self._since, mark()))
            self._since = None
        self._waited |= waited

    def go(self) -> None:
        """What comes now is work."""
        if self._begin is not None and self._since is None:
            self._since = mark()

    def level(self) -> None:
        """The others' gradients are here: a step is over, the next begins."""
        if not self._waited:
            return
        now = mark()
        if self._begin is not None:
            self._coming.append((self._begin, now, self._spans))
        self._begin = self._since = now
        self._spans, self._waited = [], False
        while self._coming and over(self._coming[0][1]):
            self._note(*self._coming.popleft())

    def _note(self, begin: Any, end: Any, spans: list[tuple[Any, Any]]) -> None:
        self._known.append((sum(between(*span) for span in spans), between(begin, end)))
        self._steps += 1
        if self._steps % TELL == 0:
            own, whole = zip(*self._known, strict=True)
            self._tell(self._steps, statistics.median(own), statistics.median(whole))


def mark() -> Any:
    """This moment: of the GPU where there is one in use, else of the clock."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    return time.perf_counter()


def over(at: Any) -> bool:
    """Whether the GPU has come to this mark."""
    return isinstance(at, float) or bool(at.query())


def between(one: Any, other: Any) -> float:
    """Seconds between two marks; none between marks of different kinds, at the first use of a GPU."""
    if isinstance(one, float) or isinstance(other, float):
        return other - one if isinstance(one, float) and isinstance(other, float) else 0.0
    return float(one.elapsed_time(other)) / 1000


def watch(tell: Tell) -> None:
    """From here on the steps of this process are timed."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stopwatch = Stopwatch(tell)
    register_optimizer_step_pre_hook(lambda *_: stopwatch.level())
    _around(DistributedDataParallel, "_pre_forward", stopwatch.rest, stopwatch.go)
    _around(DistributedDataParallel, "_post_forward", stopwatch.rest, None)
    if horovod := sys.modules.get("horovod.torch.optimizer"):
        _around(horovod._DistributedOptimizer, "synchronize", stopwatch.rest, stopwatch.level)


def _around(kind: Any, name: str, before: Callable[..., None], after: Callable[[], None] | None) -> None:
    """Have these called around a method, where this version of the library has it, and no compiler is tracing."""
    plain = getattr(kind, name, None)
    if plain is None:
        return

    @wraps(plain)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not waits(self, name):
            return plain(self, *args, **kwargs)
        before(name != "_pre_forward")
        result = plain(self, *args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(kind, name, timed)


def waits(module: Any, name: str) -> bool:
    """Whether what comes is part of a step whose gradients travel: no evaluation, no accumulation."""
    return name == "synchronize" or (torch.is_grad_enabled() and module.require_backward_grad_sync)
