"""Events of a run -> the series that Ray's agent gets. tests/deploy/test_monitoring.py reads them
from a real agent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.recovery.straggler import Pauses, as_event
from raydist.reporting.metrics import VALUES, Metrics
from raydist.reporting.result import Figures
from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.shared.outcome import Slow


class Watched:
    """The figures of a run, as those that its events set."""

    def __init__(self, folder: Path) -> None:
        figures = Figures()
        self.warnings: list[str] = []
        self.metrics = Metrics("name/1", figures, lambda text: self.events.warn(text))
        self.events = Events(folder / "events.jsonl", (figures.add, self.metrics, self._note))
        self.events.add(kinds.Cluster(address="10.0.0.1:6379", nodes=1, started=False))

    def _note(self, event: Event) -> None:
        if isinstance(event, kinds.Warning):
            self.warnings.append(event.text)

    def report(self, step: int, **values: Any) -> None:
        self.events.add(kinds.Report(rank=0, step=step, values=values))

    def gauges(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the series of this name, by the values of their labels."""
        return {tuple(value for _, value in labels): at for (one, labels), at in self.metrics._gauges.items()
                if one == name}  # fmt: skip


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    one = Watched(tmp_path)
    with one.metrics, one.events:
        yield one


def test_pauses_of_the_collector_end_no_figures(watched: Watched) -> None:
    pauses = Pauses(["n0", "n1"])
    slow = next(found for second in range(1, 60) if (found := pauses.note(1, 0.2, float(second))))
    watched.events.add(slow)
    watched.report(7, loss=1.0)
    assert watched.warnings == []
    assert watched.gauges("step") == {(): 7}
    assert watched.gauges("slow_ratio") == {}


def test_a_slow_rank_is_slow_until_it_is_not_or_the_run_was_restarted(watched: Watched) -> None:
    watched.events.add(as_event([Slow(1, "n1", own=0.3, others=0.1, step=0.4)]))
    assert watched.gauges("slow_ratio") == {("1", "n1"): pytest.approx(0.5)}
    watched.events.add(
        kinds.Pace(ranks={"0": (9, 0.1, 0.2), "1": (9, 0.15, 0.2), "2": (9, 0.1, 0.2)})
    )
    assert watched.gauges("slow_ratio") == {("1", "n1"): pytest.approx(0.25)}
    watched.events.add(
        kinds.Pace(ranks={"0": (9, 0.1, 0.2), "1": (9, 0.1, 0.2), "2": (9, 0.1, 0.2)})
    )
    assert watched.gauges("slow_ratio") == {("1", "n1"): 0}
    watched.events.add(
        kinds.Pace(ranks={"0": (9, 0.1, 0.2), "1": (9, 0.2, 0.2), "2": (9, 0.1, 0.2)})
    )
    watched.events.add(kinds.Hang(s=7.0, ranks=[1], certain=False, text="x"))
    watched.events.add(
        kinds.Failure(cause={"how": "killed"}, text="", reason="", reached=9, others=[])
    )
    watched.events.add(kinds.Restart(number=1, text=""))
    assert watched.gauges("slow_ratio") == {("1", "n1"): 0}
    assert watched.gauges("hang_seconds") == {(): 0}


def test_a_program_that_reports_no_step_hangs_until_it_makes_one(watched: Watched) -> None:
    def pace(*steps: int) -> float:
        watched.events.add(kinds.Pace(ranks={str(r): (s, 0, 0) for r, s in enumerate(steps)}))
        return watched.gauges("hang_seconds")[()]

    pace(7, 7)
    watched.events.add(kinds.Hang(s=70.0, ranks=[1], certain=False, text="x"))
    assert pace(9, 9) == 70  # those before it, of a large run
    assert pace(9, 9) == 70
    assert pace(10, 9) == 0
    assert watched.gauges("goodput_ratio") == {}  # unknown


def test_a_run_without_a_first_step_or_checkpoint_is_late_from_its_beginning(
    watched: Watched,
) -> None:
    watched.events.add(kinds.Begin(rank=0, steps=9))
    (began,) = watched.gauges("step_timestamp_seconds").values()
    assert watched.gauges("kept_timestamp_seconds") == {("disk",): began}
    watched.report(1, loss=1.0)
    watched.events.add(kinds.Restart(number=1, text=""))
    (stepped,) = watched.gauges("step_timestamp_seconds").values()
    watched.events.add(kinds.Begin(rank=0, steps=9))
    assert watched.gauges("step_timestamp_seconds") == {(): stepped}
    assert watched.gauges("kept_timestamp_seconds") == {("disk",): began}


def test_only_a_new_snapshot_makes_the_state_in_memory_newer(watched: Watched) -> None:
    """Each report has the step of the newest one: the age of the state was always 0."""

    def kept(step: int, snapshot: int) -> float:
        report = kinds.Report(rank=0, step=step, values={"loss": 1.0}, kept=snapshot)
        watched.events.add(report)
        return watched.gauges("kept_timestamp_seconds")["memory",]

    watched.events.add(kinds.Begin(rank=0, steps=9))
    first = kept(2, 1)
    assert kept(3, 1) == first
    assert kept(4, 3) > first


def test_a_run_that_waits_in_the_queue_is_not_late(watched: Watched) -> None:
    watched.report(1, loss=1.0)
    watched.events.add(kinds.Saved(rank=0, step=1, path="x"))
    watched.events.add(kinds.Pause(number=1, text=""))
    watched.events.add(kinds.Saved(rank=0, step=2, path="y"))  # its last state
    assert watched.gauges("step_timestamp_seconds") == {}
    assert watched.gauges("kept_timestamp_seconds") == {}
    watched.events.add(kinds.Begin(rank=0, steps=9))
    assert watched.gauges("step_timestamp_seconds").keys() == {()}
    assert watched.gauges("kept_timestamp_seconds").keys() == {("disk",)}


def test_a_run_that_stands_still_has_no_rates(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    for stands in (
        kinds.Hang(s=7.0, ranks=[1], certain=False, text="x"),
        kinds.Restart(number=1, text=""),
    ):
        for step in (1, 2, 3):
            now += 10
            watched.report(step, loss=1.0, samples=8 * step)
        assert watched.gauges("steps_per_second") == {(): pytest.approx(0.1)}
        watched.events.add(stands)
        assert watched.gauges("steps_per_second") == {(): 0}
        assert watched.gauges("samples_per_second") == {(): 0}
    before = watched.gauges("goodput_ratio")[()]
    now += 60
    watched.events.add(kinds.Nodes(nodes={}))
    assert watched.gauges("goodput_ratio")[()] < before


def test_names_of_values_are_limited_with_one_warning(watched: Watched) -> None:
    for step in range(3 * VALUES):
        watched.report(step, loss=float(step), **{f"loss_of_{step}": 1.0})
    assert len(watched.gauges("value")) == VALUES
    assert watched.gauges("value")["loss",] == 3 * VALUES - 1
    (warned,) = watched.warnings
    assert f"'loss_of_{VALUES - 1}'" in warned


def test_ports_of_a_node_are_its_own_counts(watched: Watched) -> None:
    for count in (1000, 9000):
        watched.events.add(kinds.Nodes(nodes={"n1": {"ports": {"mlx5_0:1": (count, 2 * count)}}}))
    assert watched.gauges("port_received_bytes") == {("n1", "mlx5_0:1"): 9000}
    assert watched.gauges("port_sent_bytes") == {("n1", "mlx5_0:1"): 18000}


@pytest.mark.parametrize("ends", ["result", "exception"])
def test_nothing_sets_gauges_after_the_end_of_a_run(watched: Watched, ends: str) -> None:
    """A finished trial of a sweep makes no step, while its driver continues."""
    watched.report(1, loss=1.0)
    assert watched.metrics._thread.is_alive()
    if ends == "result":
        watched.events.add(kinds.Result(status="finished"))
    else:
        watched.metrics.__exit__()
    assert not watched.metrics._thread.is_alive()
