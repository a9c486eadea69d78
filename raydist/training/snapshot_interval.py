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


class SnapshotInterval:
    """Has a snapshot kept every few steps: as `snapshot.every` says, or as their cost allows."""

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
        self._least = least if every is None else None
        """The smallest interval that may be chosen; None: it is fixed."""
        self._comm = comm
        self._device = device
        self._wait_for_copy = wait_for_copy
        self._copy_s = copy_s
        self._costs: deque[tuple[Mark, Mark]] = deque(maxlen=COSTS)
        """The begin and the end, in the queue of the device, of the last snapshots; `_steps` has
        those of the last steps."""
        self._steps: deque[tuple[Mark, Mark]] = deque(maxlen=MEASURED)
        self._count = 0
        self._kept_count = 0
        self._look = FIRST_LOOK
        self._since = device.mark()

    def go_on(self) -> None:
        """Exclude the time since the last step from the measured steps."""
        if self._least is not None:
            self._since = self._device.mark()

    def step(self, step: int, keep: Callable[[], object]) -> None:
        """Count a step; call `keep`, which keeps a snapshot of it, if one is due."""
        if self._least is None:
            if step % self.every == 0:
                keep()
            return
        began = self._device.mark()
        self._steps.append((self._since, began))
        if step % self.every == 0:
            self._wait_for_copy()
            began = self._device.mark()
            keep()
            self._kept_count += 1
            if self._kept_count > FETCHING:
                self._costs.append((began, self._device.mark()))
        self._count += 1
        if self._count == self._look:
            self._reckon()
        self.go_on()

    def _reckon(self) -> None:
        """Set the interval from the measured cost, the same on all ranks."""
        self._device.mark().wait()
        cost, took = median_s(self._costs), median_s(self._steps)
        mine = [cost / took if cost else 0.0, self._copy_s() / took if took else 0.0]
        rows = self._comm.gather(torch.tensor(mine, dtype=torch.float64))
        cheap = spacing([float(row[0]) for row in rows], [float(row[1]) for row in rows])
        self.every = max(self._least or 1, cheap)
        self._look *= 2
        self._steps.clear()


def least_steps(job: Job) -> int:
    """Return the steps between snapshots, at least, unless `snapshot.every` is set."""
    return CHECKED if job.train.check_resume else 1


def median_s(spans: Sequence[tuple[Mark, Mark]]) -> float:
    """Return the median of the seconds between these marks; 0.0 without any."""
    return statistics.median(end.seconds_since(begin) for begin, end in spans) if spans else 0.0


def spacing(shares: Sequence[float], copies: Sequence[float] = (0.0,)) -> int:
    """Return the steps between snapshots, at least 1.

    `shares`: the cost of a snapshot on each rank as a fraction of a step. `copies`: the number of
    steps that each rank's background copy takes; a lower limit, because the next snapshot would
    wait for the copy.
    """
    return max(1, math.ceil(max(shares) / SHARE), math.ceil(max(copies)))
