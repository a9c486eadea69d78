"""How many steps lie between snapshots, from what a snapshot costs. (rank side)"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

import torch

from raydist.settings.config import Job
from raydist.state.device import Device, Mark
from raydist.worker.backends import Comm

SHARE = 0.01
"""The fraction of a step's time that snapshots may take, unless `snapshot.every` is set."""
FIRST_LOOK = 4
"""Steps after which the cost of a snapshot is first evaluated; then after 8, 16, 32, … steps."""
FETCHING = 3
"""The first snapshots, which fetch and page-lock the memory of their slots: they cost more than
later ones."""
CHECKED = 4
"""Steps between snapshots, at least, if a restart is to repeat steps (`train.check_resume`)."""
COSTS, MEASURED = 8, 64
"""Limits on the snapshots and steps whose times are kept."""

Span = tuple[Mark, Mark]
"""The begin and the end of something, in the queue of a device."""


class SnapshotInterval:
    """Has a snapshot kept every few steps: as `snapshot.every` says, or as their cost allows.

    A GPU copies a snapshot while it waits, or alongside the next step until that changes the state.
    A copy alongside costs nothing if it is done by then. As state.snapshot says, there must be a
    step without a snapshot after it; so snapshots after each step are not copied alongside.
    """

    def __init__(
        self,
        every: int | None,
        comm: Comm,
        device: Device,
        wait_for_copy: Callable[[], object] = lambda: None,
        copy_s: Callable[[], float] = lambda: 0.0,
        least: int = 1,
    ) -> None:
        """Begin with a snapshot after every `least` steps, unless `every` is set.

        `wait_for_copy`: waits for the background work of the previous snapshot, which is not part
        of the cost of a snapshot if snapshots are spaced. `copy_s`: the seconds for which this work
        ran alongside the steps.
        """
        self.every = every or least
        self.alongside = self.every > 1
        """Whether snapshots are copied alongside the next step, on ranks that can do so."""
        self._least = least if every is None else None
        """The smallest interval that may be chosen; None: it is fixed."""
        self._comm = comm
        self._device = device
        self._wait_for_copy = wait_for_copy
        self._copy_s = copy_s
        self._timing = Timing(device.mark())
        self._next = 0
        """The first step after which the next snapshot may be kept."""
        self._copying = False
        """Whether the last one may still be copied, alongside the step after it."""
        self._look = FIRST_LOOK

    def go_on(self) -> None:
        """Exclude the time since the last step from the measured steps."""
        if self._least is not None:
            self._timing.since = self._device.mark()

    def step(self, step: int, keep: Callable[[bool], object], can_wait: bool = False) -> None:
        """Count a step; call `keep`, which keeps a snapshot of it, if one is due.

        `can_wait`: nothing changes the state before `catch_up`, so it may be copied until then; the
        argument of `keep` says whether it is.
        """
        due = step % self.every == 0 and step >= self._next
        began = self._device.mark() if self._least is not None else None
        if began is not None:
            self._timing.add_step(began)
        if due:
            if began is not None:
                self._wait_for_copy()
                began = self._device.mark()
            # A rank that has two states relies on the first one of the others.
            self._copying = can_wait and self.alongside and self._next > 0
            # The same on all ranks, also if `every` changes.
            self._next = step + (2 if self.alongside else 1)
            keep(self._copying)
            if began is not None:
                self._timing.add_snapshot(began, self._device.mark(), self._copying)
        if began is not None and self._timing.count == self._look:
            self._reckon(can_wait)
        self.go_on()

    def catch_up(self, wait: Callable[[], object]) -> None:
        """Before the state is changed: call `wait`, which has the device end the copies alongside.

        The time for which the device waits is a part of the cost of the snapshot.
        """
        if not self._copying:
            return
        self._copying = False
        if self._least is None:
            wait()
            return
        began = self._device.mark()
        wait()
        self._timing.add_wait(began, self._device.mark())

    def _reckon(self, can_wait: bool) -> None:
        """Set the interval from the measured cost, the same on all ranks."""
        self._device.mark().wait()
        cost, took = self._timing.cost_s(), self._timing.step_s()
        mine = [cost / took if cost else 0.0, self._copy_s() / took if took else 0.0, can_wait]
        rows = self._comm.gather(torch.tensor(mine, dtype=torch.float64))
        shares, copies, able = ([float(row[column]) for row in rows] for column in range(3))
        least = self._least or 1
        if self._timing.costs:
            self.every = max(least, 2 if self.alongside else 1, spacing(shares, copies))
        # What one of them costs says nothing about the other.
        if self.alongside != (alongside := self.every > 1 and all(able)):
            self.alongside = alongside
            self._timing.forget_costs()
        self._look *= 2
        self._timing.steps.clear()


class Timing:
    """The times of steps and snapshots, in the queue of a device."""

    def __init__(self, since: Mark) -> None:
        self.since = since
        """The end of the last step."""
        self.count = 0
        self.steps: deque[Span] = deque(maxlen=MEASURED)
        self.costs: deque[list[Span]] = deque(maxlen=COSTS)
        """For each snapshot, when it was kept, and when the device waited for its copy."""
        self._kept_count = 0
        self._unfinished_copy: Span | None = None
        """When a snapshot was kept whose copy is not waited for yet."""

    def add_step(self, end: Mark) -> None:
        self.steps.append((self.since, end))
        self.count += 1

    def add_snapshot(self, began: Mark, end: Mark, copying: bool) -> None:
        """Add a snapshot; `copying`: `add_wait` follows."""
        self._kept_count += 1
        if self._kept_count <= FETCHING:
            return
        if copying:
            self._unfinished_copy = began, end
        else:
            self.costs.append([(began, end)])

    def add_wait(self, began: Mark, end: Mark) -> None:
        if self._unfinished_copy is not None:
            self.costs.append([self._unfinished_copy, (began, end)])
            self._unfinished_copy = None

    def forget_costs(self) -> None:
        self.costs.clear()
        self._unfinished_copy = None

    def cost_s(self) -> float:
        """Return the median of the seconds that a snapshot cost; 0.0: none was measured."""
        costs = [sum(map(seconds, spans)) for spans in self.costs]
        return statistics.median(costs) if costs else 0.0

    def step_s(self) -> float:
        """Return the median of the seconds of a step; 0.0 without any."""
        return statistics.median(map(seconds, self.steps)) if self.steps else 0.0


def seconds(span: Span) -> float:
    """Return the seconds between two marks."""
    began, end = span
    return end.seconds_since(began)


def least_steps(job: Job) -> int:
    """Return the steps between snapshots, at least, unless `snapshot.every` is set."""
    return CHECKED if job.train.check_resume else 1


def spacing(shares: Sequence[float], copies: Sequence[float] = (0.0,)) -> int:
    """Return the steps between snapshots, at least 1.

    `shares`: the cost of a snapshot on each rank as a fraction of a step. `copies`: the number of
    steps that each rank's background copy takes; a lower limit, because the next snapshot would
    wait for the copy.
    """
    return max(1, math.ceil(max(shares) / SHARE), math.ceil(max(copies)))
