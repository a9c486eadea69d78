"""A run's turn: which other runs count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raydist.cluster.queue import others, store, turn
from raydist.cluster.queue.entry import Entry, WayRequest
from raydist.cluster.queue.order import Cluster
from raydist.settings.config import Job, Queue
from tests.cluster.queue.test_order import NOW, node, runs, waits


class Clock:
    """A clock that the test turns on."""

    now = NOW

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (turn, others):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(turn, "seen_cluster", lambda job: Cluster([node(1, 0), node(2, 0)]))
    return clock


def urgent(monkeypatch: pytest.MonkeyPatch, found: store.Everything) -> turn.QueuedTurn:
    """Return the turn of an urgent run that sees these entries in the store."""
    own: Any = turn.QueuedTurn(Job(queue=Queue(enabled=True)), None)  # type: ignore[arg-type]
    own._entry = waits("urgent", priority=100)
    monkeypatch.setattr(store, "read_all", lambda: found)
    return own  # type: ignore[no-any-return]


def beaten(entry: Entry) -> Entry:
    return replace(entry, beat=entry.beat + 1)


def test_nobody_counts_on_a_run_whose_driver_is_silent(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    silent, other = runs("silent", 1, placed=2.0), runs("other", 2, placed=1.0)
    found = store.Everything([silent, other], {})
    own = urgent(monkeypatch, found)
    assert own._look().asks.keys() == {"silent/0"}
    found.requests["silent/0"] = WayRequest("urgent of ana@login")
    assert own._look().asks == {}
    clock.now += others.SILENT_S
    found.entries[1] = beaten(other)
    assert own._look().asks.keys() == {"other/0"}
    found.entries[:] = [beaten(silent), beaten(beaten(other))]
    assert own._look().asks == {}


def test_a_silent_run_in_line_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    first = waits("first", priority=200)
    monkeypatch.setattr(turn, "seen_cluster", lambda job: Cluster([node(1, 8)]))
    own = urgent(monkeypatch, store.Everything([first], {}))
    assert not own._look().start
    clock.now += others.SILENT_S
    assert own._look().start


@pytest.mark.parametrize("part", [False, True])
def test_room_just_given_back_is_waited_for(
    part: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Ray shows it as free up to 0.1 s after the run's entry is gone, or has fewer nodes."""
    first, other = runs("first", 1, placed=2.0), runs("other", 2, placed=1.0)
    first = replace(first, held={"n1": 1, "n3": 1})
    found = store.Everything([first, other], {})
    own = urgent(monkeypatch, found)
    assert own._look().asks.keys() == {"first/0"}
    found.entries[:] = [*([replace(first, held={"n3": 1})] if part else []), other]
    assert own._look().asks == {}
    clock.now += others.FREED_S
    assert own._look().asks.keys() == {"other/0"}
