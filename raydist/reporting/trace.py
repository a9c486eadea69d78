"""Events of a run -> a trace for Perfetto: launch, steps, saves, failures. (pure)

chrome://tracing reads it too. The format is the Trace Event Format, as https://ui.perfetto.dev
reads it: `X` is a span, `i` an instant, `M` a name. A process is a host, a thread is a rank; the
run itself is process 1. Times are in microseconds since the run began. Each event has the clock of
its own host: between hosts spans are as far off as those clocks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raydist.shared.events import Event

SpanJson = dict[str, object]
RUN, PHASES, FAILURES, SAVES = 1, 1, 2, 3
"""The run's process, and its threads. 0 is not an id: Perfetto takes it for the idle process."""
PREFIX = {"hang": "silent: ", "slow": "", "notice": "", "warning": "warning: "}
"""Kinds with a `text` that are marks on the run's first thread."""


class Trace:
    """The spans of a trace, collected event by event."""

    def __init__(self) -> None:
        self.spans: list[SpanJson] = []
        self._began = 0.0
        self._hosts: dict[str, int] = {}
        self._seats: dict[int, str] = {}
        self._since: dict[int, float] = {}
        """When the current step of a rank began, by rank."""
        self._steps: dict[int, int] = {}
        self._failed: Event | None = None
        for thread, name in ((PHASES, "launch"), (FAILURES, "failures"), (SAVES, "checkpoints")):
            self._name("thread_name", RUN, thread, name)

    def add(self, event: Event) -> None:
        """Process one event."""
        if event["kind"] == "run":
            self.__init__()  # type: ignore[misc]  # the folder had an earlier run
            self._began = event["t"]
            self._name("process_name", RUN, 0, f"run {event['name']}")
        self._place(event)
        method = getattr(self, f"_on_{event['kind']}", None)
        if method is not None:
            method(event)
        elif event["kind"] in PREFIX:
            self._mark(PREFIX[event["kind"]] + event["text"], event["t"], RUN, PHASES)

    def _place(self, event: Event) -> None:
        """Record where the ranks are, and that they start over."""
        for slot in event.get("slots", ()):
            host = slot["host"]
            if host not in self._hosts:
                self._hosts[host] = len(self._hosts) + 2
                self._name("process_name", self._hosts[host], 0, host)
            if self._seats.get(slot["rank"]) != host:
                self._name(
                    "thread_name", self._hosts[host], slot["rank"] + 1, f"rank {slot['rank']}"
                )
            self._seats[slot["rank"]] = host
        if event["kind"] in ("restart", "regroup"):
            self._since, self._steps = {}, {}

    def _on_phase(self, event: Event) -> None:
        self._span(event["name"], event["t"] - event["s"], event["s"], RUN, PHASES)

    def _on_begin(self, event: Event) -> None:
        self._since[event["rank"]] = event["t"]
        self._steps[event["rank"]] = event.get("resumed") or 0

    def _on_report(self, event: Event) -> None:
        rank, step, before = event["rank"], event.get("step"), self._steps.get(event["rank"])
        if step is None or step == before:
            return
        since = self._since.get(rank)
        if since is not None and before is not None and step > before:
            # for ranks other than 0, not every report arrives
            name = f"step {step}" if step == before + 1 else f"steps {before + 1}-{step}"
            self._span(name, since, event["t"] - since, *self._seat(rank), args=event["values"])
        self._since[rank], self._steps[rank] = event["t"], step

    def _on_spent(self, event: Event) -> None:
        self._span(event["what"], event["t"] - event["s"], event["s"], *self._seat(event["rank"]))
        self._since[event["rank"]] = event["t"]

    def _on_joined(self, event: Event) -> None:
        self._mark("joined", event["t"], *self._seat(event["rank"]))

    def _on_ended(self, event: Event) -> None:
        self._mark(f"ended: {event['how']}", event["t"], *self._seat(event["rank"]))

    def _on_saved(self, event: Event) -> None:
        begin, path = event["t"] - event["s"], event["path"]
        self._span(f"step {event['step']}", begin, event["s"], RUN, SAVES, args={"path": path})

    def _on_failure(self, event: Event) -> None:
        self._failed = event
        cause = event["cause"]
        self._mark(
            f"{cause['how']} at step {cause['step']}", cause["at"], *self._seat(cause["rank"])
        )

    def _on_restarted(self, event: Event) -> None:
        if self._failed is not None:
            self._failure(self._failed["cause"]["at"] + event["s"])

    def _on_result(self, event: Event) -> None:
        if self._failed is not None:
            self._failure(event["t"])
        self._mark(event["status"], event["t"], RUN, PHASES)

    def _failure(self, end: float) -> None:
        """Add a span from the failure's beginning to the next step, or to the end of the run."""
        assert self._failed is not None
        text, at = self._failed["text"], self._failed["cause"]["at"]
        self._span(text.partition("\n")[0], at, end - at, RUN, FAILURES, args={"text": text})
        self._failed = None

    def _seat(self, rank: int) -> tuple[int, int]:
        return self._hosts.get(self._seats.get(rank, ""), RUN), rank + 1

    def _span(
        self,
        name: str,
        begin: float,
        s: float,
        process: int,
        thread: int,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        times = {"ts": self._us(begin), "dur": max(0, round(s * 1e6))}
        self.spans.append(
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": thread,
                **times,
                "args": dict(args or {}),
            }
        )

    def _mark(self, name: str, t: float, process: int, thread: int) -> None:
        self.spans.append(
            {"ph": "i", "s": "t", "name": name, "pid": process, "tid": thread, "ts": self._us(t)}
        )

    def _name(self, what: str, process: int, thread: int, name: str) -> None:
        self.spans.append(
            {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
        )

    def _us(self, t: float) -> int:
        return max(0, round((t - self._began) * 1e6))


def trace_of(events: Iterable[Event]) -> dict[str, object]:
    """Return the content of a trace file for the last run in these events."""
    trace = Trace()
    for event in events:
        trace.add(event)
    return {"displayTimeUnit": "ms", "traceEvents": trace.spans}
