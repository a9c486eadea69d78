"""Figures of a run for Prometheus: Ray's node agents serve them, and its `/api/prometheus/sd` lists those. (driver)

Ray repeats each gauge while the driver lives, and forgets it some 20 s after: what is there is a run that goes on.
docs/monitoring.md says what each is for; deploy/monitoring/ has a board and alerts of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raydist.shared.events import Event
from raydist.watch.points import numbers
from raydist.watch.progress import Progress
from raydist.watch.result import Figures

EVERY_S = 1.0
"""Shortest time between two settings of the gauges that change with each step."""
CAUSES = ("killed", "oom", "raised", "exited", "hung", "lost", "drained", "ended")
"""How the rank ended that failed first (shared.outcome.End.how), and whether memory ran out."""
GAUGES = {
    "step": ("newest step", ()),
    "steps": ("steps in all, if the loop says so", ()),
    "steps_per_second": ("over the last half minute", ()),
    "samples_per_second": ("of all ranks, over the last half minute, if the loop counts samples", ()),
    "step_time_seconds": ("when the newest step was reported, since the epoch", ()),
    "value": ("newest value of each name that rank 0 reported", ("name",)),
    "goodput_ratio": ("share of the time since the start in steps that counted", ()),
    "restarts": ("failures that were followed by a restart", ("cause",)),
    "slow_ratio": ("share of a step that others wait for this rank; 0 once it restarted", ("rank", "host")),
    "hang_seconds": ("how long ranks have been silent, at the last alarm; 0 after the next step", ()),
    "kept_time_seconds": ("when the newest state was kept, since the epoch", ("where",)),
}
COUNTERS = {
    "runs": ("runs that have ended", ("status",)),
    "port_received_bytes": ("of each NIC and HCA port, since the run began", ("host", "port")),
    "port_sent_bytes": ("of each NIC and HCA port, since the run began", ("host", "port")),
}


class Metrics:
    """A reader of events. Without Ray there is nobody who would serve the figures: it does nothing then."""

    def __init__(self, run: str, figures: Figures) -> None:
        """`run`: the label of all series. `figures`: reads each event before this does."""
        self._run, self._figures = run, figures
        self._made: dict[str, Any] = {}
        self._progress, self._due = Progress(), -math.inf
        self._failed = CAUSES[0]
        self._restarts, self._slow = dict.fromkeys(CAUSES, 0), list[tuple[str, str]]()
        self._bytes: dict[tuple[str, str, str], int] = {}

    def __call__(self, event: Event) -> None:
        if event["kind"] == "cluster" and event["address"]:
            self._begin()
        elif self._made:
            getattr(self, f"_on_{event['kind']}", lambda event: None)(event)

    def _begin(self) -> None:
        from ray.util import metrics

        for kind, names in ((metrics.Gauge, GAUGES), (metrics.Counter, COUNTERS)):
            for name, (what, tags) in names.items():
                self._made[name] = kind(f"raydist_{name}", what, ("run", *tags))
        for cause in CAUSES:
            self._set("restarts", 0, cause=cause)  # without a zero a first restart is no change
        self._set("hang_seconds", 0)

    def _set(self, name: str, value: float, /, **tags: str) -> None:
        self._made[name].set(value, {"run": self._run, **tags})

    def _count(self, name: str, value: float, /, **tags: str) -> None:
        if value > 0:
            self._made[name].inc(value, {"run": self._run, **tags})

    def _on_begin(self, event: Event) -> None:
        if event.get("rank") == 0:
            self._progress.begin(event)

    def _on_report(self, event: Event) -> None:
        if event.get("rank") != 0:
            return
        kind = self._progress.report(event)
        if kind == "step" and event["t"] < self._due:
            return
        self._due = event["t"] + EVERY_S
        for name, value in numbers(event["values"]).items():
            self._set("value", value, name=name)
        if "step" in event:
            self._set_step(event)

    def _set_step(self, event: Event) -> None:
        steps_per_s, samples_per_s = self._progress.rates()
        found = {"step": event["step"], "steps": self._progress.totals.get("steps"), "step_time_seconds": event["t"],
                 "steps_per_second": steps_per_s, "samples_per_second": samples_per_s,
                 "goodput_ratio": self._figures.goodput, "hang_seconds": 0}  # fmt: skip
        for name, value in found.items():
            if value is not None:
                self._set(name, value)
        if event.get("kept"):
            self._set("kept_time_seconds", event["t"], where="memory")

    def _on_saved(self, event: Event) -> None:
        self._set("kept_time_seconds", event["t"], where="disk")

    def _on_hang(self, event: Event) -> None:
        self._set("hang_seconds", event["s"])

    def _on_slow(self, event: Event) -> None:
        for each in event["ranks"]:
            self._slow.append((str(each["rank"]), each["host"]))
            self._set("slow_ratio", each["share"], rank=str(each["rank"]), host=each["host"])

    def _on_failure(self, event: Event) -> None:
        self._failed = "oom" if event["cause"].get("oom") else event["cause"]["how"]

    def _on_restart(self, event: Event) -> None:
        self._restarts[self._failed] += 1
        self._set("restarts", self._restarts[self._failed], cause=self._failed)
        for rank, host in self._slow:
            self._set("slow_ratio", 0, rank=rank, host=host)
        self._slow.clear()

    def _on_nodes(self, event: Event) -> None:
        for host, load in event["nodes"].items():
            self._add_ports(host, load["ports"])

    def _add_ports(self, host: str, ports: Mapping[str, tuple[int, int]]) -> None:
        for port, both in ports.items():
            for name, total in zip(("port_received_bytes", "port_sent_bytes"), both, strict=True):
                before = self._bytes.get((name, host, port), total)
                self._bytes[name, host, port] = total
                self._count(name, total - before, host=host, port=port)

    def _on_result(self, event: Event) -> None:
        self._count("runs", 1, status=event["status"])
