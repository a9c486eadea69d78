"""Events of a run -> what its page shows, in sections of plain JSON. (pure)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypedDict

from raydist.reporting.curves import Curve, add_report
from raydist.reporting.failures import Failure
from raydist.reporting.points import series
from raydist.reporting.progress import Progress
from raydist.reporting.result import Figures
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.watch.web.lanes import LANES, Lanes
from raydist.watch.web.node_figures import NodeFigures

RATE_S = 1.0
"""Minimum time between two points of the curve of the rate."""
RATE = "steps/s"
MARKS = 300
"""Maximum number of marks of a kind that are kept: beyond it, every second one is dropped."""
WARNINGS = 50
CHECKPOINTS = 100
"""Maximum number of checkpoints that are shown: the newest ones."""
QUIET_S = 60.0
"""Seconds without an event after which the page shows `no events`."""

AFTER_PHASE = {
    "connect": "for a place on the nodes",
    "place": "for the actors",
    "actors": "until torch is imported",
    "warm-up": "until all ranks have met",
    "rendezvous": "for the first step",
}
"""What a run waits for after each phase of its launch."""

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
    """restart, save, evaluation or operated."""
    step: int
    t: float
    text: str
    file: str
    """The file in the run folder with the whole answer to a command; else empty."""


class SavedShown(TypedDict):
    """A checkpoint."""

    step: int
    t: float
    s: float
    """Seconds that it took."""
    path: str


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
    nodes: NodeFigures = field(default_factory=NodeFigures)
    checkpoints: dict[str, SavedShown] = field(default_factory=dict)
    """By path."""
    run: kinds.Run | None = None
    cluster: kinds.Cluster | None = None
    result: kinds.Result | None = None
    waits: str = ""
    """What the run waits for, or does outside of steps."""
    resume_check: str = ""
    """What came of the comparison after the last restart or resume (`train.check_resume`)."""
    slow: str = ""
    """Which ranks slow the others, in this attempt."""
    attempt: int = 1
    report_count: int = 0
    """Number of reports of rank 0."""
    began: float | None = None
    """Time of the first event in the folder: where the time axis of all charts begins."""
    earlier_step: int = 0
    """The newest step of earlier runs in the folder."""
    longest_s: float = 0.0
    """The longest time between two events."""
    _rated_at: float = 0.0
    _hang: str = ""
    """The text of the newest hang."""
    _hung_at: dict[int, int] = field(default_factory=dict)
    """By rank, its newest step when it was said to hang."""

    def add(self, event: Event) -> None:
        """Process one event."""
        if isinstance(event, kinds.Run):  # another run in the same folder continues its curves
            nodes = self.nodes.for_next_run()
            anew = Model(
                run=event,
                curves=self.curves,
                lanes=self.lanes,
                nodes=nodes,
                waits="for Ray",
                began=self.began,
                earlier_step=self._newest_step(),
            )
            vars(self).update(vars(anew))
        self.began = event.t if self.began is None else self.began
        if isinstance(event, kinds.Report) and event.rank:
            self.steps[event.rank] = event.step or 0  # most events of a large run: the step counts
            return
        self.longest_s = max(self.longest_s, event.t - (self.figures.ended_at or event.t))
        self.figures.add(event)
        self._update_waits(event)
        match event:
            case kinds.OfRank():
                self._add_of_rank(event)
            case kinds.HasSlots():
                self._seat()
            case kinds.StartsAttempt():
                self.attempt += 1
                self.slow = ""
                self.progress.read(event)
                step = event.step if isinstance(event, kinds.Restart) else self.progress.step or 0
                self._mark("restart", step, event.t, event.text.partition("\n")[0])
            case kinds.Pace():
                self._on_pace(event)
            case kinds.Checked():
                # if a step differs, a warning says it
                self.resume_check = event.text if event.differs is None else ""
            case kinds.Work():
                for rank, (own, whole) in event.ranks.items():
                    self._note(int(rank), own_s=own, step_s=whole)
            case kinds.Nodes():
                self.nodes.add(event)
            case kinds.Hang():
                self.progress.read(event)
                self._hang = event.text
                for culprit in event.ranks:
                    self._note(culprit, state="hangs")
                    self._hung_at[culprit] = self.steps.get(culprit, 0)
            case kinds.Slow():
                self.slow = event.text
                for each in event.ranks:
                    self._note(each["rank"], state="slow")
            case kinds.Failure():
                self._note(event.cause["rank"], state=f"failed: {event.cause['how']}")
            case kinds.Operated():
                text = f"{event.command}: {event.text}"
                self._mark("operated", self.progress.step or 0, event.t, text, event.file)
            case kinds.Result():
                self.result = event

    def _update_waits(self, event: Event) -> None:
        """Note what the run waits for from now on."""
        match event:
            case kinds.Cluster():
                self.cluster = event
                self.waits = "for a place on the nodes"
            case kinds.Wait() | kinds.Hang() | kinds.Notice():
                self.waits = event.text
            case kinds.Plan():
                self.waits = "for the actors"
            case kinds.Phase():
                self.waits = AFTER_PHASE.get(event.name, "")
            case kinds.Report() | kinds.Restarted() | kinds.Result():
                self.waits = ""
            case kinds.Stop():
                self.waits = f"until all ranks have ended: {event.reason}"
            case kinds.Failure():
                self.waits = "for the decision about a restart"
            case kinds.StartsAttempt():
                self.waits = "for the restart"

    def _add_of_rank(self, event: kinds.OfRank) -> None:
        """Process an event of one rank."""
        rank = event.rank
        match event:
            case kinds.Report():
                self._on_report(event)
            case kinds.Began():
                self._note(rank, host=event.host, pid=event.pid, state="started")
            case kinds.Joined():
                self._note(rank, pid=event.pid, state="runs")
            case kinds.Begin():
                self._note(rank, state="runs")
                self.progress.read(event)
            case kinds.Spent(rank=0, what="evaluate"):
                text = f"evaluated in {event.s:.2f} s"
                self._mark("evaluation", self.progress.step or 0, event.t, text)
            case kinds.Saved():
                text = f"saved in {event.s:.2f} s: {event.path}"
                self._mark("save", event.step, event.t, text)
                self._on_saved(event)
            case kinds.Raised():
                exits = f"exits with {event.code}" if event.code else ""
                self._note(rank, state=exits or f"raised {event.type}")
            case kinds.Ended() if not self._row(rank).state.startswith("raised"):
                self._note(rank, state=event.how or "ended")

    def warn(self, text: str) -> None:
        """Show a warning of the page itself."""
        self.figures.warnings.setdefault(text, Counter())[None] += 1

    def _row(self, rank: int) -> RankShown:
        if rank not in self.ranks:
            host = self.figures.failures.slots.get(rank, {}).get("host", "")
            self.ranks[rank] = RankShown(host)
        return self.ranks[rank]

    def _note(self, rank: int, **facts: Any) -> None:
        """Update facts about a rank."""
        self.ranks[rank] = replace(self._row(rank), **facts)

    def _seat(self) -> None:
        """Give the ranks the slots of the newest plan."""
        slots = self.figures.failures.slots
        self.ranks = {rank: self._row(rank) for rank in slots}
        for rank, slot in slots.items():
            self._note(rank, host=slot.get("host", ""))

    def _on_saved(self, event: kinds.Saved) -> None:
        self.checkpoints.pop(event.path, None)  # one that is saved again is the newest
        self.checkpoints[event.path] = {
            "step": event.step,
            "t": event.t,
            "s": event.s,
            "path": event.path,
        }
        if len(self.checkpoints) > CHECKPOINTS:
            del self.checkpoints[next(iter(self.checkpoints))]

    def _on_report(self, event: kinds.Report) -> None:
        step, t = event.step, event.t
        self.report_count += 1
        self.progress.read(event)
        at = self.steps[0] = self._newest_step() if step is None else step
        add_report(self.curves, event, at)
        rate, _ = self.progress.rates()
        if step is not None and rate > 0 and t - self._rated_at >= RATE_S:
            self._rated_at = t
            self.curves.setdefault(series(RATE, event.fit), Curve()).add(at, t, rate)

    def _newest_step(self) -> int:
        """Return the step to which values without one belong; a job may have none at all."""
        step = self.progress.step
        return self.earlier_step + self.report_count if step is None else step

    def _on_pace(self, event: kinds.Pace) -> None:
        self.lanes.add(event.t, event.ranks)
        self.progress.read(event)
        # What a program without reports is known by.
        stepped = any(step > 0 for step, *_ in event.ranks.values())
        if (self.waits == self._hang and not self.progress.hangs) or (
            self.waits == AFTER_PHASE["rendezvous"] and stepped
        ):
            self.waits = ""
        for rank, (count, own, whole) in event.ranks.items():
            step = int(count)
            row = self._row(int(rank))
            goes_on = step > self._hung_at.get(int(rank), 0)
            state = "runs" if row.state == "hangs" and goes_on else row.state
            self._note(int(rank), own_s=own, step_s=whole, state=state)
            self.steps[int(rank)] = step

    def _mark(self, kind: str, step: int, t: float, text: str, file: str = "") -> None:
        marks = self.marks.setdefault(kind, [])
        marks.append({"kind": kind, "step": step, "t": t, "text": text, "file": file})
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
            "nodes": {"nodes": self.nodes.present(self._hosts())},
            "checkpoints": {"checkpoints": [*self.checkpoints.values()][::-1]},
            "launch": {
                "launch": {name: round(s, 3) for name, s in self.figures.launch.items()},
                "spent": self._spent(),
            },
            "warnings": {"warnings": list(self.figures.warnings)[-WARNINGS:]},
        }

    def _hosts(self) -> set[str]:
        """Return the hosts that have ranks now."""
        return {row.host for row in self.ranks.values()}

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
        spent = self.result.spent if self.result else {}
        spent = spent or figures.spent.parts(figures.wall_s, figures.ended_at)
        return {name: round(s, 2) for name, s in spent.items() if s >= 0.005}

    def _state(self) -> Section:
        figures = self.figures
        progress = self.progress
        result = self.result
        return {
            "name": self.run.name if self.run else "",
            "dir": self.run.dir if self.run else "",
            "began": self.began,
            "run_began": self.run.t if self.run else None,
            "status": result.status if result else "running",
            "job": [self.cluster.job, self.cluster.dashboard] if self.cluster else ["", ""],
            "attempt": self.attempt,
            "step": progress.step,
            "steps": progress.totals.get("steps"),
            "position": progress.position(),
            "health": progress.health(),
            "evaluation": progress.evaluation(),
            "left": [] if result else progress.time_left(),
            "waits": self.waits,
            "checked": self.resume_check,
            "world_size": figures.world_size,
            "goodput": None if figures.known_goodput is None else round(figures.goodput, 4),
            "wall_s": round(figures.wall_s, 1),
            "checkpoint": figures.checkpoint,
            "failure": result.failure if result else "",
            "slow": self.slow,
            "network": figures.network,
            "quiet_s": self.quiet_s,
        }

    @property
    def quiet_s(self) -> float:
        """The seconds without an event after which the page reports it.

        It is three times the longest silence, at least QUIET_S.
        """
        return max(QUIET_S, 3 * self.longest_s)


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
