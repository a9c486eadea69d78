"""How long a rank waits for its data, and what to change if that is long. (rank side)"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from raydist.worker import context
from raydist.worker.backends import Comm

SHARES = (5, 10, 25, 50)
"""The thresholds, in percent of the time, at which a wait for data is reported; at or below the
first nothing is reported."""
FIRST_LOOK = 16
"""Steps after which the ranks first compare their waits; then after 32, 64, … The first batches are
not counted."""
LEAST_S = 10.0
"""Minimum seconds that must be measured: a shorter time is not worth a line."""
ADVICE = {
    "map": (
        "data.workers=2 loads batches while the model trains",
        "data.workers={more} loads more of them at a time",
    ),
    "stream": (
        "data.workers=1 reads ahead while the model trains",
        "a StatefulDataLoader of it may have more workers",
    ),
    "loader": ("give the loader more workers (num_workers)",) * 2,
    "ray": ("leave more CPUs to Ray Data, or do less for each row",) * 2,
}
"""Kind of source -> what to change without workers, and with some."""


class DataWait:
    """The seconds for which one rank waits for its data."""

    def __init__(self, comm: Comm, device: torch.device, workers: int) -> None:
        self._comm = comm
        self._device = device
        self._workers = workers
        self.begin()

    def begin(self) -> None:
        """Begin to count, on all ranks at the same step."""
        self._waited = 0.0
        self._since = time.perf_counter()
        self._count = 0
        self._look = FIRST_LOOK
        self._warned = False

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the same batches, and count the time to get each."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.add(time.perf_counter() - began)
            yield batch

    def add(self, s: float) -> None:
        """Count a wait of the rank. It does not count if the GPU still computes."""
        if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
            self._waited += s

    def step(self, kind: str) -> None:
        """Count a step, and report the rank that waits longest, once.

        `kind`: that of the source. A collective after some steps.
        """
        self._count += 1
        if self._warned or self._count < self._look:
            return
        now = time.perf_counter()
        self._look = 2 * self._look
        mine = torch.tensor([self._waited, now - self._since], dtype=torch.float64)
        rows = [(float(row[0]), float(row[1])) for row in self._comm.gather(mine)]
        if self._count > FIRST_LOOK and (found := finding(rows, kind, self._workers)):
            self._warned = True  # on all ranks, because they have the same rows
            if context.rank().rank == found[0]:
                context.warn(found[1])
        self._waited = 0.0
        self._since = now


def finding(rows: Sequence[tuple[float, float]], kind: str, workers: int) -> tuple[int, str] | None:
    """Return the rank that waits most and the line for it, if it waits long.

    `rows`: (seconds waited, seconds) of each rank. The fractions are rough, so that an attempt
    after a restart gives the same text, which is shown once.
    """
    waited, all_s = max(rows)
    if all_s < LEAST_S or waited <= all_s * SHARES[0] / 100:
        return None
    rank = rows.index((waited, all_s))
    share = max(each for each in SHARES if waited > all_s * each / 100)
    who = f"rank {rank} waits" if len(rows) > 1 else "the training waits"
    what = ADVICE[kind][workers > 0].format(more=2 * workers)
    return rank, f"{who} for data more than {share}% of the time: {what}"
