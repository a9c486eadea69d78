"""Figures of a run for Prometheus, served by Ray's node agents. (driver)

Ray's `/api/prometheus/sd` lists the agents. Ray's agent drops a gauge that was not set for two
report intervals (20 s), and an alert needs it for longer. So all gauges are set again each second
while the run continues, and none after its result: an existing gauge belongs to a running run.
Counters stay until Ray ends, including those of a driver that has left: there are few of them.
docs/monitoring.md explains each figure; deploy/monitoring/ has a board and alerts for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from raydist.recovery.straggler import own_shares
from raydist.reporting.points import numbers
from raydist.reporting.progress import Progress
from raydist.reporting.result import Figures
from raydist.shared import ending, kinds
from raydist.shared.kinds import Event

AGAIN_S = 1.0
"""Seconds after which all gauges are set again.

This is Ray's shortest report interval (`metrics_report_interval_ms`).
"""
REPORT_S = 10.0
"""Seconds between two of Ray's reports by default: a longer run has been seen."""
VALUES = 100
"""Maximum number of names of `value`, each of which is a series.

A job may create a name for each step.
"""
CAUSES = ("killed", "oom", "raised", "exited", "hung", "lost", "drained", "ended")
"""How the rank that failed first ended (shared.outcome.End.how), and whether memory ran out."""
GAUGES = {
    "step": ("newest step", ()),
    "steps": ("total number of steps, if the loop reports it", ()),
    "steps_per_second": ("over the last half minute", ()),
    "samples_per_second": (
        "of all ranks, over the last half minute, if the loop counts samples",
        (),
    ),
    "step_timestamp_seconds": (
        "when the newest step was reported, or the loop began, in seconds since the epoch",
        (),
    ),
    "value": ("newest value of each name that rank 0 reported", ("name",)),
    "goodput_ratio": ("share of the time since the start in steps that counted", ()),
    "slow_ratio": (
        "share of a step in which the others wait for this rank, once it is reported as slow",
        ("rank", "host"),
    ),
    "hang_seconds": (
        "seconds for which ranks were silent at the last alarm; 0 after the next step",
        (),
    ),
    "kept_timestamp_seconds": (
        "when the newest state was kept, or the loop began, in seconds since the epoch",
        ("where",),
    ),
    "port_received_bytes": (
        "of each NIC and HCA port, since its driver was loaded",
        ("host", "port"),
    ),
    "port_sent_bytes": ("of each NIC and HCA port, since its driver was loaded", ("host", "port")),
}
COUNTERS = {
    "runs": ("runs that have ended", ("status",)),
    "restarts": ("failures that were followed by a restart", ("cause",)),
}

Series = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a gauge, and its labels."""
PROGRESS: tuple[Series, ...] = (
    ("step_timestamp_seconds", ()),
    ("kept_timestamp_seconds", (("where", "disk"),)),
)
"""The gauges whose age shows that a run makes no progress, or keeps none."""


class ValueNames:
    """The names of `value` that have a series: the first VALUES of them."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._value_names = set[str]()
        self._warned = False

    def admit(self, name: str) -> bool:
        """Report whether this name has a series; warn of the first one that has none."""
        if len(self._value_names) < VALUES:
            self._value_names.add(name)
        elif name not in self._value_names and not self._warned:
            self._warned = True
            self._warn(
                f"Prometheus gets at most {VALUES} names of reported values: {name!r} is left out"
            )
        return name in self._value_names


class Metrics(AbstractContextManager["Metrics"]):
    """A reader of events that sets the figures.

    Without Ray nobody would serve the figures: the reader then does nothing.
    """

    def __init__(self, run: str, figures: Figures, warn: Callable[[str], None]) -> None:
        """Define the figures.

        `run`: the label of all series. `figures`: reads each event before this reader does. `warn`:
        prints a warning.
        """
        self._run = run
        self._figures = figures
        self._made: dict[str, Any] = {}
        self._gauges: dict[Series, float] = {}
        """The newest value of each gauge, which the thread sets again."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="raydist-metrics", daemon=True)
        self._progress = Progress()
        self._names = ValueNames(warn)
        self._failed = CAUSES[0]
        self._kept: int | None = None
        """The step of the newest snapshot in this loop; each report has it."""
        self._slow: dict[int, str] = {}
        """The ranks reported as slow since the last restart, and their hosts."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, kinds.Cluster) and event.address:
            self._begin()
        elif self._made:
            self._read(event)

    def _read(self, event: Event) -> None:
        hung = self._progress.hangs
        self._progress.read(event)
        if hung and not self._progress.hangs:
            self._set("hang_seconds", 0)
        match event:
            case kinds.Begin(rank=0):
                self._kept = None
                # From now on it is late: a first step or checkpoint may never come.
                for series in PROGRESS:
                    if series not in self._gauges:
                        self._set(series[0], event.t, **dict(series[1]))
            case kinds.Report(rank=0):
                self._on_report(event)
            case kinds.Saved() if self._figures.spent.paused_at is None:
                # The last state of a run that waits in the queue is written after its Pause.
                self._set("kept_timestamp_seconds", event.t, where="disk")
            case kinds.Hang():
                self._set("hang_seconds", event.s)
                self._stand_still()
            case kinds.Slow():
                self._on_slow(event)
            case kinds.Pace():
                self._on_pace(event)
            case kinds.Failure():
                self._failed = "oom" if event.cause.get("oom") else event.cause["how"]
            case kinds.StartsAttempt():
                self._on_attempt(event)
            case kinds.Nodes():
                self._on_nodes(event)
            case kinds.Result():
                self._end()
                self._count("runs", status=event.status)
                if event.status != "finished" or self._figures.wall_s > REPORT_S:
                    ending.need_cleanup()

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        from ray.util import metrics

        for kind, names in ((metrics.Gauge, GAUGES), (metrics.Counter, COUNTERS)):
            for name, (what, tags) in names.items():
                self._made[name] = kind(f"raydist_{name}", what, ("run", *tags))
        self._set("hang_seconds", 0)
        self._thread.start()

    def _end(self) -> None:
        """Stop setting gauges: the driver is about to leave Ray, or continues without this run."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _repeat(self) -> None:
        over = False
        while not over:
            over = self._over.wait(AGAIN_S)
            with self._lock:
                gauges = list(self._gauges.items())
            for (name, labels), value in gauges:
                self._made[name].set(value, {"run": self._run, **dict(labels)})

    def _set(self, name: str, value: float, /, **labels: str) -> None:
        with self._lock:
            self._gauges[name, tuple(labels.items())] = value

    def _count(self, name: str, /, **labels: str) -> None:
        self._made[name].inc(1, {"run": self._run, **labels})

    def _on_report(self, event: kinds.Report) -> None:
        for name, value in numbers(event.values).items():
            if self._names.admit(name):
                self._set("value", value, name=name)
        if event.step is not None:
            self._set_step(event)

    def _set_step(self, event: kinds.Report) -> None:
        steps_per_s, samples_per_s = self._progress.rates()
        found = {
            "step": event.step,
            "steps": self._progress.totals.get("steps"),
            "step_timestamp_seconds": event.t,
            "steps_per_second": steps_per_s,
            "samples_per_second": samples_per_s,
            "goodput_ratio": self._figures.known_goodput,
        }
        for name, value in found.items():
            if value is not None:
                self._set(name, value)
        if event.kept and event.kept != self._kept:
            self._kept = event.kept
            self._set("kept_timestamp_seconds", event.t, where="memory")

    def _on_slow(self, event: kinds.Slow) -> None:
        for each in event.ranks:
            if "share" in each:  # a rank without `share` has a slow garbage collector
                self._slow[each["rank"]] = each["host"]
                self._set("slow_ratio", each["share"], rank=str(each["rank"]), host=each["host"])

    def _on_pace(self, event: kinds.Pace) -> None:
        """Update how slow the reported ranks are now, from each `pace`.

        A rank is reported as slow once; `pace` also shows if it no longer is.
        """
        if self._slow:
            shares = own_shares(
                {
                    int(rank): (int(step), own_s, step_s)
                    for rank, (step, own_s, step_s) in event.ranks.items()
                }
            )
            for rank in self._slow.keys() & shares.keys():
                self._set("slow_ratio", shares[rank], rank=str(rank), host=self._slow[rank])

    def _on_attempt(self, event: kinds.StartsAttempt) -> None:
        if isinstance(event, kinds.Restart):
            self._count("restarts", cause=self._failed)
            ending.need_cleanup()
        elif isinstance(event, kinds.Pause):
            # No step and no checkpoint is due until the next loop begins.
            with self._lock:
                for series in PROGRESS:
                    self._gauges.pop(series, None)
        self._stand_still()
        for rank, host in self._slow.items():
            self._set("slow_ratio", 0, rank=str(rank), host=host)
        self._slow.clear()

    def _stand_still(self) -> None:
        """Show that no steps are made now."""
        for name in ("steps_per_second", "samples_per_second"):
            if (name, ()) in self._gauges:
                self._set(name, 0)

    def _on_nodes(self, event: kinds.Nodes) -> None:
        if (goodput := self._figures.known_goodput) is not None:
            self._set("goodput_ratio", goodput)
        for host, load in event.nodes.items():
            for port, (received, sent) in load["ports"].items():
                self._set("port_received_bytes", received, host=host, port=port)
                self._set("port_sent_bytes", sent, host=host, port=port)
