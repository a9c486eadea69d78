"""Events of a run -> what its page shows, in sections of plain JSON. (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypedDict

from raydist.reporting.curves import Curve, add_report
from raydist.reporting.failures import Failure
from raydist.reporting.progress import Progress
from raydist.reporting.result import Figures
from raydist.shared.events import Event
from raydist.watch.web.lanes import LANES, Lanes

RATE_S = 1.0
"""Minimum time between two points of the curve of the rate."""
RATE = "steps/s"
MARKS = 300
"""Maximum number of marks of a kind that are kept: beyond it, every second one is dropped."""
WARNINGS = 50
QUIET_S = 60.0
"""Seconds without an event after which the page says that there is no news."""

CALM = ("", "started", "runs", "finished", "stopped")
"""States of a rank that need no attention."""

Section = Mapping[str, Any]


@dataclass(frozen=True)
class RankShown:
    """What the page shows of one rank."""

    host: str
    pid: int = 0
    own_s: float = 0.0
    step_s: float = 0.0
    state: str = ""


class CurveMark(TypedDict):
    """Something that happened at a step, drawn into every curve."""

    kind: str
    """restart, save or evaluation."""
    step: int
    t: float
    text: str


@dataclass
class Model:
    """The fold of a run's events."""

    figures: Figures = field(default_factory=Figures)
    progress: Progress = field(default_factory=Progress)
    curves: dict[str, Curve] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    ranks: dict[int, RankShown] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    """By rank, the newest step. It changes with every report."""
    marks: dict[str, list[CurveMark]] = field(default_factory=dict)
    nodes: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """By host, its newest load, with the bytes per second of each port."""
    run: Event = field(default_factory=dict)
    result: Event = field(default_factory=dict)
    waits: str = ""
    """What the run waits for, or does outside of steps."""
    attempt: int = 1
    reported: int = 0
    """Number of reports of rank 0."""
    longest_s: float = 0.0
    """The longest time between two events."""
    _loads: dict[str, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    _rated: float = 0.0

    def add(self, event: Event) -> None:
        """Process one event."""
        kind, rank = event["kind"], event.get("rank")
        if kind == "run":  # another run in the same folder continues its curves
            vars(self).update(
                vars(Model(run=event, curves=self.curves, lanes=self.lanes, waits="for Ray"))
            )
        if kind == "report" and rank:  # most events of a large run: only the step counts
            self.steps[rank] = event.get("step") or 0
            return
        self.longest_s = max(self.longest_s, event["t"] - (self.figures.ended or event["t"]))
        self.figures.add(event)
        getattr(self, f"_on_{kind}", _pass)(event)

    def warn(self, text: str) -> None:
        """Show a warning of the page itself."""
        self.figures.warned.setdefault(text, Counter())[None] += 1

    def _row(self, rank: int) -> RankShown:
        if rank not in self.ranks:
            host = self.figures.failures.slots.get(rank, {}).get("host", "")
            self.ranks[rank] = RankShown(host)
        return self.ranks[rank]

    def _note(self, rank: int, **facts: Any) -> None:
        """Update facts about a rank."""
        self.ranks[rank] = replace(self._row(rank), **facts)

    def _on_cluster(self, event: Event) -> None:
        self.waits = "for a place on the nodes"

    def _on_wait(self, event: Event) -> None:
        self.waits = event["text"]

    def _on_plan(self, event: Event) -> None:
        self.waits = "for the actors"
        self._seat()

    def _on_placed(self, event: Event) -> None:
        self._seat()

    _on_resize = _on_takeover = _on_placed

    def _seat(self) -> None:
        """Give the ranks the slots of the newest plan."""
        slots = self.figures.failures.slots
        self.ranks = {rank: self._row(rank) for rank in slots}
        for rank, slot in slots.items():
            self._note(rank, host=slot.get("host", ""))

    def _on_phase(self, event: Event) -> None:
        after = {
            "connect": "for a place on the nodes",
            "place": "for the actors",
            "actors": "until torch is imported",
            "warm-up": "until all ranks have met",
            "rendezvous": "for the first step",
        }
        self.waits = after.get(event["name"], "")

    def _on_began(self, event: Event) -> None:
        self._note(event["rank"], host=event["host"], pid=event["pid"], state="started")

    def _on_joined(self, event: Event) -> None:
        self._note(event["rank"], pid=event["pid"], state="runs")

    def _on_begin(self, event: Event) -> None:
        self._note(event["rank"], state="runs")
        if event["rank"] == 0:
            self.progress.begin(event)

    def _on_report(self, event: Event) -> None:
        step, t = event.get("step"), event["t"]
        self.reported += 1
        self.waits = ""
        self.progress.report(event)
        at = self.reported if step is None else step
        self.steps[0] = at
        add_report(self.curves, event, at)
        rate, _ = self.progress.rates()
        if rate > 0 and t - self._rated >= RATE_S:
            self._rated = t
            self.curves.setdefault(RATE, Curve()).add(at, t, rate)

    def _on_spent(self, event: Event) -> None:
        if event.get("rank") == 0 and event["what"] == "evaluate":
            self._mark(
                "evaluation",
                self.progress.step or 0,
                event["t"],
                f"evaluated in {event['s']:.2f} s",
            )

    def _on_saved(self, event: Event) -> None:
        self._mark(
            "save", event["step"], event["t"], f"saved in {event['s']:.2f} s: {event['path']}"
        )

    def _on_pace(self, event: Event) -> None:
        self.lanes.add(event["t"], event["ranks"])
        for rank, (step, own, whole) in event["ranks"].items():
            row, before = self._row(int(rank)), self.steps.get(int(rank), 0)
            state = "runs" if row.state == "hangs" and step > before else row.state
            self._note(int(rank), own_s=own, step_s=whole, state=state)
            self.steps[int(rank)] = step

    def _on_work(self, event: Event) -> None:
        for rank, (own, whole) in event["ranks"].items():
            self._note(int(rank), own_s=own, step_s=whole)

    def _on_nodes(self, event: Event) -> None:
        for host, load in event["nodes"].items():
            t, before = self._loads.get(host, (0.0, {}))
            self._loads[host] = (event["t"], load)
            self.nodes[host] = {
                **load,
                "ports": port_rates(load["ports"], before.get("ports", {}), event["t"] - t),
            }

    def _on_hang(self, event: Event) -> None:
        self.waits = event["text"]
        for rank in event["ranks"]:
            self._note(rank, state="hangs")

    def _on_slow(self, event: Event) -> None:
        for each in event["ranks"]:
            self._note(each["rank"], state="slow")

    def _on_notice(self, event: Event) -> None:
        self.waits = event["text"]

    def _on_stop(self, event: Event) -> None:
        self.waits = f"until all ranks have ended: {event['reason']}"

    def _on_raised(self, event: Event) -> None:
        self._note(event["rank"], state=f"raised {event['type']}")

    def _on_ended(self, event: Event) -> None:
        if not self._row(event["rank"]).state.startswith("raised"):
            self._note(event["rank"], state=event.get("how") or "ended")

    def _on_failure(self, event: Event) -> None:
        cause = event["cause"]
        self.waits = "for the decision about a restart"
        self._note(cause["rank"], state=f"failed: {cause['how']}")

    def _on_restart(self, event: Event) -> None:
        self.attempt += 1
        self.waits = "for the restart"
        self._mark("restart", event.get("step") or 0, event["t"], event["text"].partition("\n")[0])

    def _on_result(self, event: Event) -> None:
        self.result, self.waits = event, ""

    def _mark(self, kind: str, step: int, t: float, text: str) -> None:
        marks = self.marks.setdefault(kind, [])
        marks.append({"kind": kind, "step": step, "t": t, "text": text})
        if len(marks) > MARKS:
            del marks[1:-1:2]

    def sections(self) -> dict[str, Section]:
        """Return all sections except the curves, by name."""
        shown = self._shown_ranks()
        return {
            "state": self._state(),
            "ranks": {
                "ranks": {
                    rank: (self.steps.get(rank, 0), *astuple(self.ranks[rank])) for rank in shown
                }
            },
            "lanes": {
                "times": [round(t, 1) for t in self.lanes.times],
                "shares": {
                    rank: self.lanes.shares[rank] for rank in shown if rank in self.lanes.shares
                },
            },
            "marks": {"marks": [mark for marks in self.marks.values() for mark in marks]},
            "failures": {
                "failures": [failure_row(failure) for failure in self.figures.failures.found]
            },
            "nodes": {"nodes": self.nodes},
            "launch": {
                "launch": {name: round(s, 3) for name, s in self.figures.launch.items()},
                "spent": self._spent(),
            },
            "warnings": {"warnings": list(self.figures.warned)[-WARNINGS:]},
        }

    def _shown_ranks(self) -> list[int]:
        """Return the ranks that the page shows.

        Those in trouble come first, then those with the most own work.
        """
        rows = self.ranks

        def order(rank: int) -> tuple[bool, float, int]:
            return rows[rank].state in CALM, -rows[rank].own_s, rank

        return sorted(rows, key=order)[:LANES]

    def _spent(self) -> dict[str, float]:
        """Return the seconds of each part of the run so far."""
        figures = self.figures
        spent = self.result.get("spent") or figures.spent.parts(figures.wall_s, figures.ended)
        return {name: round(s, 2) for name, s in spent.items() if s >= 0.005}

    def _state(self) -> Section:
        figures, progress, over = self.figures, self.progress, bool(self.result)
        return {
            "name": self.run.get("name", ""),
            "dir": self.run.get("dir", ""),
            "began": figures.began,
            "status": self.result.get("status", "running"),
            "attempt": self.attempt,
            "step": progress.step,
            "steps": progress.totals.get("steps"),
            "position": progress.position(),
            "health": progress.health(),
            "evaluation": progress.evaluation(),
            "left": [] if over else progress.left(),
            "waits": self.waits,
            "world_size": figures.world_size,
            "goodput": round(self.result.get("goodput", figures.goodput), 4),
            "wall_s": round(figures.wall_s, 1),
            "checkpoint": figures.saved,
            "failure": self.result.get("failure", ""),
            "slow": figures.slow.get("text", ""),
            "network": figures.network,
            "quiet_s": self.quiet_s,
        }

    @property
    def quiet_s(self) -> float:
        """The seconds without an event after which the page reports it.

        It is three times the longest silence, at least QUIET_S.
        """
        return max(QUIET_S, 3 * self.longest_s)


def port_rates(
    now: Mapping[str, Any], before: Mapping[str, Any], s: float
) -> dict[str, list[float] | None]:
    """Return the bytes per second [received, sent] of each port over the last `s` seconds.

    None if they are unknown.
    """
    return {
        name: [
            max(0.0, round((new - old) / s)) for new, old in zip(counts, before[name], strict=True)
        ]
        if name in before and s > 0
        else None
        for name, counts in now.items()
    }


def failure_row(failure: Failure) -> Section:
    """Return what the page shows of a failure; its own page has the rest."""
    cause = failure.cause
    return {
        "number": failure.number,
        "page": failure.page,
        "at": failure.at,
        "rank": cause["rank"],
        "host": cause.get("host", ""),
        "step": cause.get("step", 0),
        "how": cause["how"],
        "text": failure.text.partition("\n")[0],
        "reason": failure.reason,
        "status": failure.status,
        "s": failure.s,
        "repeated": failure.repeated,
    }


def _pass(event: Event) -> None:
    """Ignore kinds that the page does not show."""
