"""Events of a run -> where its time went: steps that counted, launch, restarts, evaluation, saves, the rest. (pure)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raydist.events import Event
from raydist.failures import Failures

NAMES = {"evaluate": "evaluation", "save": "saves", "data": "waiting for data"}
"""What a loop counts beside its steps, in words."""


@dataclass
class Spent:
    """The time of a run, event by event. Of the ranks only 0 counts."""

    failures: Failures = field(default_factory=Failures)
    launch_s: float = 0.0
    earlier_s: float = 0.0
    """Seconds in the steps of attempts that ended in a restart."""
    repeated_s: float = 0.0
    """Those of them in steps that were done again later."""
    counted_s: float | None = None
    """Seconds in the steps of this attempt, as the loop itself counted."""
    beside: dict[str, float] = field(default_factory=dict)
    """Seconds beside steps, of attempts that ended in a restart."""
    steps: tuple[Event, ...] = ()
    """The first and the last report of a step in this attempt."""
    now: dict[str, float] = field(default_factory=dict)
    """Seconds beside steps, of this attempt."""
    between_s: float = 0.0
    """Those of them that lie between the two reports."""
    waiting_s: float = 0.0
    """And those since the last report."""
    step_mean_s: float = 0.0
    """Seconds of a step of the attempt before."""

    def add(self, happened: Event) -> None:
        """Take in one event."""
        self.failures.add(happened)
        first = happened.get("rank", 0) == 0
        match happened["kind"]:
            case "phase" if not self.failures.found:  # later ones are part of a restart
                self.launch_s += happened["s"]
            case "report" if first and "step" in happened:
                self._step(happened)
            case "spent" if first:
                self.now[happened["what"]] = self.now.get(happened["what"], 0.0) + happened["s"]
                self.waiting_s += happened["s"] if self.steps else 0.0
            case "done" if first and "step" in (happened.get("spent") or {}):
                self.counted_s = float(happened["spent"]["step"])
                self.now = {what: s for what, s in happened["spent"].items() if what != "step"}
            case "restart" | "regroup":
                self._again()
            case "restarted":
                self.repeated_s += min(self.earlier_s, happened["repeated"] * self.step_mean_s)

    def _step(self, report: Event) -> None:
        # a second report of one step is an evaluation: it was no training step that took so long
        if not self.steps or report["step"] != self.steps[-1]["step"]:
            self.steps = (*self.steps[:1], report)
            self.between_s, self.waiting_s = self.between_s + self.waiting_s, 0.0

    def _again(self) -> None:
        """The attempt is over."""
        done = self.steps[-1]["step"] - self.steps[0]["step"] if self.steps else 0
        self.step_mean_s = self._attempt_s() / done if done > 0 else 0.0
        self.earlier_s += self._attempt_s()
        for what, s in self.now.items():
            self.beside[what] = self.beside.get(what, 0.0) + s
        self.steps, self.now, self.counted_s, self.between_s, self.waiting_s = (), {}, None, 0.0, 0.0

    def _attempt_s(self) -> float:
        """Seconds in steps of this attempt; where no loop counted them (a user's own, or cut off), between reports."""
        return max(0.0, apart(self.steps) - self.between_s) if self.counted_s is None else self.counted_s

    @property
    def step_s(self) -> float:
        """Seconds in training steps that counted: done once, or for the last time."""
        return max(0.0, self.earlier_s - self.repeated_s) + self._attempt_s()

    def parts(self, wall_s: float, end: float) -> dict[str, float]:
        """Where the seconds of a run went that ended at `end`; what nobody has counted is `rest`."""
        beside = {what: self.beside.get(what, 0.0) + self.now.get(what, 0.0) for what in {**self.beside, **self.now}}
        known = {
            "steps": min(wall_s, self.step_s),
            "launch": self.launch_s,
            "failures": sum(self.lasted(end)),
            "steps done again": self.repeated_s,
            **{NAMES.get(what, what): s for what, s in beside.items()},
        }
        return {**known, "rest": max(0.0, wall_s - sum(known.values()))}

    def lasted(self, end: float) -> list[float]:
        """Seconds of each failure: until the next step, the next failure, or the end."""
        found = self.failures.found
        nexts = [*(failure.at for failure in found), end][1:]
        return [
            max(0.0, later - each.at) if each.s is None else each.s for each, later in zip(found, nexts, strict=True)
        ]

    @property
    def recovery(self) -> dict[str, float]:
        """Where the time of failures and restarts went: seconds of detect, kill, place, fork, …, over all failures."""
        total: dict[str, float] = {}
        for failure in self.failures.found:
            for part, s in failure.parts.items():
                total[part] = total.get(part, 0.0) + s
        return total


@dataclass
class Arrival:
    """How a launch ends: all ranks meet, then one of them does a step."""

    world_size: int
    began: float
    """Seconds since the epoch when the ranks were told to start."""
    met: float | None = None
    """When the last of them had joined, once all have."""
    joined: dict[int, float] = field(default_factory=dict)
    """When each rank did."""
    stepped: float | None = None
    """When the first report of a step was made; a loop that waits for nobody makes it before the others are there."""

    def add(self, happened: Event) -> dict[str, float]:
        """Take in one event; the seconds of each part of the launch that is over with it."""
        before = self.met, self.stepped
        if happened["kind"] == "joined":
            self.joined[happened["rank"]] = happened["t"]
        elif happened["kind"] == "report" and "step" in happened and self.stepped is None:
            self.stepped = happened["t"]
        if self.met is None and len(self.joined) == self.world_size:
            self.met = max(self.began, *self.joined.values())
        if self.met is None or (self.met, self.stepped) == before:
            return {}
        over = {} if before[0] else {"rendezvous": self.met - self.began}
        return over if self.stepped is None else {**over, "first step": max(0.0, self.stepped - self.met)}


def apart(pair: Sequence[Event]) -> float:
    """Seconds between the first and the last of these."""
    return max(0.0, pair[-1]["t"] - pair[0]["t"]) if pair else 0.0
