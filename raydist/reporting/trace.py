"""Events of a run -> a trace for Perfetto: launch, steps, saves, failures. (pure)

chrome://tracing reads it too. The format is the Trace Event Format, as https://ui.perfetto.dev
reads it: `X` is a span, `i` an instant, `M` a name. A process is a host, a thread is a rank; the
run itself is process 1. Times are in microseconds since the run began, on the driver's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from raydist.reporting.result import strict_json
from raydist.shared import kinds
from raydist.shared.kinds import Event

SpanJson = dict[str, object]
RUN, PHASES, FAILURES, SAVES = 1, 1, 2, 3
"""The run's process, and its threads. 0 is not an id: Perfetto takes it for the idle process."""


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
        self._open_failure: kinds.Failure | None = None
        for thread, name in ((PHASES, "launch"), (FAILURES, "failures"), (SAVES, "checkpoints")):
            self._name("thread_name", RUN, thread, name)

    def add(self, event: Event) -> None:
        """Process one event."""
        match event:
            case kinds.Run():
                self.__init__()  # type: ignore[misc]  # the folder had an earlier run
                self._began = event.t
                self._name("process_name", RUN, 0, f"run {event.name}")
            case kinds.HasSlots():
                self._place(event)
            case kinds.StartsAttempt():
                self._since = {}
                self._steps = {}
            case kinds.Phase():
                self._span(event.name, event.t - event.s, event.s, RUN, PHASES)
            case kinds.Begin():
                self._since[event.rank] = event.t
                self._steps[event.rank] = event.resumed or 0
            case kinds.Report():
                self._on_report(event)
            case kinds.Spent():
                self._span(event.what, event.t - event.s, event.s, *self._seat(event.rank))
                self._since[event.rank] = event.t
            case kinds.Joined():
                self._mark("joined", event.t, *self._seat(event.rank))
            case kinds.Ended():
                self._mark(f"ended: {event.how}", event.t, *self._seat(event.rank))
            case kinds.Saved():
                begin, args = event.t - event.s, {"path": event.path}
                self._span(f"step {event.step}", begin, event.s, RUN, SAVES, args=args)
            case kinds.Failure():
                cause = event.cause
                if self._open_failure is not None:  # it failed again before its next step
                    self._failure(self._open_failure, cause["at"])
                self._open_failure = event
                text = f"{cause['how']} at step {cause['step']}"
                self._mark(text, cause["at"], *self._seat(cause["rank"]))
            case kinds.Restarted() if self._open_failure is not None:
                self._failure(self._open_failure, self._open_failure.cause["at"] + event.s)
            case kinds.Result():
                if self._open_failure is not None:
                    self._failure(self._open_failure, event.t)
                self._mark(event.status, event.t, RUN, PHASES)
            case kinds.Hang():
                self._mark(f"silent: {event.text}", event.t, RUN, PHASES)
            case kinds.Warning():
                self._mark(f"warning: {event.text}", event.t, RUN, PHASES)
            case kinds.Slow() | kinds.Notice():
                self._mark(event.text, event.t, RUN, PHASES)

    def _place(self, event: kinds.HasSlots) -> None:
        """Record where the ranks are."""
        for slot in event.slots:
            host = slot["host"]
            if host not in self._hosts:
                self._hosts[host] = len(self._hosts) + 2
                self._name("process_name", self._hosts[host], 0, host)
            if self._seats.get(slot["rank"]) != host:
                self._name(
                    "thread_name", self._hosts[host], slot["rank"] + 1, f"rank {slot['rank']}"
                )
            self._seats[slot["rank"]] = host

    def _on_report(self, event: kinds.Report) -> None:
        rank = event.rank
        step = event.step
        before = self._steps.get(event.rank)
        if step is None or step == before:
            return
        since = self._since.get(rank)
        if since is not None and before is not None and step > before:
            # for ranks other than 0, not every report arrives
            name = f"step {step}" if step == before + 1 else f"steps {before + 1}-{step}"
            self._span(name, since, event.t - since, *self._seat(rank), args=event.values)
        self._since[rank] = event.t
        self._steps[rank] = step

    def _failure(self, failed: kinds.Failure, end: float) -> None:
        """Add a span from the failure's beginning to the next step, or to the end of the run."""
        text, at = failed.text, failed.cause["at"]
        self._span(text.partition("\n")[0], at, end - at, RUN, FAILURES, args={"text": text})
        self._open_failure = None

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
                "args": strict_json(args or {}),
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
