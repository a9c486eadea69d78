"""Reports every few seconds how fast ranks and how busy nodes are: `pace`, `nodes`. (driver)"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass

from raydist.cluster.placement import Plan
from raydist.launch.limits import LOAD_S, longest
from raydist.messages.agent import GetLoad, NodeLoad
from raydist.messages.request import Transport
from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.shared.kinds import Event

EVERY_S = 10.0
"""Seconds between two events of a kind, in a run of a few nodes."""
FIRST_S = 2.0
"""Seconds until the first event; each later interval is twice the previous one, up to EVERY_S."""
BYTES_PER_S = 100.0
"""Bytes of each kind per second of a run: both together are 17 MB a day, however many ranks there
are."""

Pace = tuple[int, float, float]
"""(newest step, seconds of the rank's own work in a step, seconds of a step); 0 where they are not
timed."""


@dataclass
class Rhythm:
    """When the next event of a kind is due. Times are seconds of any clock."""

    due: float
    every_s: float = FIRST_S

    def note(self, now: float, size: int) -> None:
        """Note that an event of `size` bytes was emitted at `now`."""
        self.every_s = max(min(2 * self.every_s, EVERY_S), size / BYTES_PER_S)
        self.due = now + self.every_s


class Vitals(AbstractContextManager["Vitals"]):
    """The events `pace` and `nodes` of one attempt.

    A thread emits them inside the `with` block. Its failure ends no run.
    """

    def __init__(
        self, events: Events, pace: Callable[[], Mapping[int, Pace]], plan: Plan, call: Transport
    ) -> None:
        """`pace`: returns that of each rank that has made a step.

        `call`: asks the first agent of each node for its load.
        """
        self._events = events
        self._pace = pace
        self._call = call
        self._leads = {slot.rank: slot.node.host for slot in plan.leads}
        self._calls: dict[int, Future[NodeLoad]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> Vitals:
        threading.Thread(target=self._watch, name="raydist-vitals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # an event that is being emitted is complete before the run continues
            self._closed.set()

    def _watch(self) -> None:
        first = time.monotonic() + FIRST_S
        makers: dict[str, Callable[[], Event | None]] = {"pace": self._ranks, "nodes": self._nodes}
        due = {kind: Rhythm(first) for kind in makers}
        while due and not self._closed.wait(
            max(0.0, min(each.due for each in due.values()) - time.monotonic())
        ):
            kind = min(due, key=lambda name: due[name].due)
            try:
                event = makers[kind]()
            except Exception as error:
                del due[kind]
                why = f"{type(error).__name__}: {error}"
                event = kinds.Warning(text=f"no more {kind} events: {why}")
            else:
                size = len(json.dumps(event.to_json())) if event else 0
                due[kind].note(time.monotonic(), size)
            with self._lock:
                if event and not self._closed.is_set():
                    self._events.add(event)

    def _ranks(self) -> kinds.Pace | None:
        ranks = {
            str(rank): (step, rounded(own), rounded(whole))
            for rank, (step, own, whole) in sorted(self._pace().items())
        }
        return kinds.Pace(ranks=ranks) if ranks else None

    def _nodes(self) -> kinds.Nodes | None:
        """Return the load of each node that answers.

        A node that has not answered the last request gets no other.
        """
        for rank in self._leads:
            if rank not in self._calls or self._calls[rank].done():
                self._calls[rank] = self._call(rank, GetLoad())
        done, _ = wait(self._calls.values(), longest(LOAD_S, len(self._calls)))
        answers = {
            rank: call.result()
            for rank, call in self._calls.items()
            if call in done and not call.exception()
        }
        nodes = {self._leads[rank]: load for rank, load in answers.items()}
        return kinds.Nodes(nodes=nodes) if nodes else None


def rounded(seconds: float) -> float:
    """Round to four digits."""
    return float(f"{seconds:.4g}")
