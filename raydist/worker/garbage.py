"""Python's garbage collector in a training: its pauses, and common collections. (rank side)

A full collection takes about 0.1 s per million objects. By default each rank collects when its own
counters trigger it, so that n ranks pause n times, and the others wait each time. If they collect
at the same step, they pause once.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

WARM_UP = 3
"""Steps after which the existing objects are frozen: the model, optimizer and data exist by then,
and stay alive."""
PUT_OFF = 1000
"""Collections of the middle generation before Python makes a full one by itself; its default is 10.
A program that stops making steps still gets its garbage collected: the collector is never
switched off."""
NEWEST = 64
"""Steps over which the fraction of the pauses is measured."""
NOTE_EVERY = 8
"""Steps between two notes."""


class PauseMeter:
    """The fraction of this process's time that the garbage collector takes."""

    def __init__(self, note: Callable[[float], None]) -> None:
        self._note = note
        self._paused_s = 0.0
        self._began = 0.0
        self._marks: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        """(time, seconds of all pauses until then) at each step."""
        self._steps = 0

    def callback(self, phase: str, info: Mapping[str, Any]) -> None:
        """Measure a collection; gc.callbacks calls it."""
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._paused_s += time.perf_counter() - self._began

    def step(self) -> None:
        """Count an optimizer step."""
        now = time.perf_counter()
        self._marks.append((now, self._paused_s))
        self._steps += 1
        if self._steps % NOTE_EVERY == 0:
            then, paused = self._marks[0]
            self._note((self._paused_s - paused) / (now - then))


class CommonCollection:
    """Full collections after every `every` optimizer steps, which all ranks make together."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps = 0

    def step(self) -> None:
        """Count an optimizer step, and collect if it is due."""
        self._steps += 1
        if self._steps == WARM_UP:
            gc.collect()
            gc.freeze()
            gc.set_threshold(*gc.get_threshold()[:2], PUT_OFF)
        elif self._steps % self._every == 0:
            gc.collect()


def measure_pauses(note: Callable[[float], None]) -> None:
    """Measure the pauses of this process from now on. `note`: takes their fraction, 0 to 1."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    meter = PauseMeter(note)
    gc.callbacks.append(meter.callback)
    register_optimizer_step_post_hook(lambda *_: meter.step())


def collect_together(every: int) -> None:
    """Collect after every `every` optimizer steps of this process from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    collection = CommonCollection(every)
    register_optimizer_step_post_hook(lambda *_: collection.step())
