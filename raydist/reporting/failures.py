"""Events of a run -> its failures: root cause, cost, times, recovery. (pure)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.state.run_checkpoints import fit_of

PARTS = ("detect", "kill", "save", "place", "fork", "rendezvous", "restore", "first step")
"""The parts of the time from a failure to the next step.

`save`: the state is written to disk before the run moves.
"""


@dataclass
class Failure:
    """One failure, and what happened after it."""

    number: int
    """The number of the failure in its run, from 1."""
    page: str
    """The name of the failure's page in the run folder.

    The JSON file next to it has the same name.
    """
    t: float
    """When all ranks had ended, in seconds since the epoch."""
    cause: Mapping[str, Any]
    """The End of the rank that failed first, as a dict."""
    text: str
    """The root cause and the follow-on failures, as text."""
    reason: str
    """Why that rank is the root cause."""
    reached: int
    """The last step that any rank had reported."""
    others: list[Mapping[str, Any]] = field(default_factory=list)
    """The Ends of the other ranks that failed, as dicts."""
    attempt: int = 0
    slot: Mapping[str, Any] = field(default_factory=dict)
    """The rank's slot: host, ip, gpus."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of PARTS that has begun."""
    s: float | None = None
    """Seconds from the failure to the first new step, or until a program that reports none ran."""
    repeated: int | None = None
    """Steps that were repeated, or that a later run must repeat; None: unknown."""
    restart: kinds.Restart | None = None
    """The event `restart`, if there was another attempt."""
    resized: tuple[int, int] | None = None
    """The number of nodes before and after, if it changed."""
    moved: dict[int, str] = field(default_factory=dict)
    """The ranks that moved to another node: rank -> host."""
    renewed: dict[int, str] = field(default_factory=dict)
    """The ranks that got a new actor on the same host: rank -> host."""
    kept: tuple[int, ...] = ()
    """The ranks that kept their processes."""
    why_not_kept: str = ""
    """Why ranks that had not failed did not keep theirs, although `restart.in_place` is set."""
    resumed: int | None = None
    """The step from which the next attempt continued."""
    checkpoint: str = ""
    """The newest checkpoint of a run that ended with this failure.

    If the run has saved none, it is the one that the run itself continued from.
    """
    saved: int = 0
    """The step of that checkpoint."""
    own_checkpoint: bool = True
    """Whether the run has saved it."""
    why_last: str = ""
    """Why the run was not restarted."""
    status: str = "running"
    """running, restarted, or how the run ended: failed, stopped, finished."""

    @property
    def at(self) -> float:
        """When the rank failed, in seconds since the epoch."""
        return float(self.cause["at"])

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain JSON data."""
        return {
            "number": self.number,
            "page": self.page,
            "at": self.at,
            "attempt": self.attempt,
            "status": self.status,
            "cause": dict(self.cause),
            "slot": dict(self.slot),
            "reason": self.reason,
            "text": self.text,
            "others": [dict(one) for one in self.others],
            "reached": self.reached,
            "resumed": self.resumed,
            "repeated": self.repeated,
            "s": self.s,
            "parts": {name: round(s, 4) for name, s in self.parts.items()},
            "moved": list(self.moved),
            "renewed": list(self.renewed),
            "kept": list(self.kept),
            "why_not_kept": self.why_not_kept,
            "checkpoint": self.checkpoint,
            "why_last": self.why_last,
        }


@dataclass
class Failures:
    """The failures of a run, collected event by event."""

    found: list[Failure] = field(default_factory=list)
    changed_failure: Failure | None = None
    """The failure that the last event changed: its page must be rewritten."""
    before: int = 0
    """The number of pages in this folder from earlier runs."""
    slots: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    before_it: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The slots at the last failure."""
    silent_since: float = 0.0
    """When the ranks of a confirmed hang became silent."""
    stopped_at: float = 0.0
    """When the other ranks of this attempt were stopped."""
    marks: dict[str, float] = field(default_factory=dict)
    """When each of PARTS of this attempt ended."""
    newest_checkpoint: tuple[int, str] = (0, "")
    """The step and the path of the newest checkpoint of this run."""
    resumed_from: tuple[int, str] = (0, "")
    """The step and the path of the checkpoint that `resume=` named; empty for a new start."""

    @property
    def open(self) -> Failure | None:
        """The failure from which the run has not yet recovered."""
        return self.found[-1] if self.found and self.found[-1].status == "running" else None

    def add(self, happened: Event) -> None:
        """Process one event."""
        self.changed_failure = self._fold(happened)

    def _fold(self, happened: Event) -> Failure | None:
        t, now = happened.t, self.open
        match happened:
            case kinds.Run():
                self.found = []
                self.newest_checkpoint = self.resumed_from = (0, "")
                self.before = happened.pages
            case kinds.HasPlan():
                if now and isinstance(happened, kinds.Resize):
                    now.resized = (happened.before, happened.nodes)
                self._seat(happened)
            case kinds.Stop():
                self.stopped_at = t
            case kinds.Failure():
                return self._begin(happened)
            case kinds.Saved():
                # the steps of each raydist.fit of a job begin anew
                self.newest_checkpoint = max(
                    self.newest_checkpoint,
                    (happened.step, happened.path),
                    key=lambda each: (fit_of(Path(each[1])), each[0]),
                )
                if (
                    now
                    and now.restart
                    and now.cause["how"] == "drained"
                    and "place" not in self.marks
                ):
                    self.marks["save"] = t
            case kinds.Restart() if now:
                now.restart = happened
                self.marks = {}
            case kinds.Placed():
                self.marks["place"] = t
                self._seat(happened)
                if now:
                    self._moved(now, happened.moved)
            case kinds.Began():
                self.marks["fork"] = t
            case kinds.Joined():
                self.marks["rendezvous"] = t
            case kinds.Begin(rank=0):
                self.marks["restore"] = t
                if not (self.resumed_from[1] or self.newest_checkpoint[1]) and happened.checkpoint:
                    self.resumed_from = (happened.resumed or 0, happened.checkpoint)
                if now and now.restart:
                    now.resumed = happened.resumed
            case kinds.Restarted() if now:
                return self._restarted(now, happened)
            case kinds.Result() if self.found:
                return self._over(self.found[-1], happened)
        return None

    def _seat(self, happened: kinds.HasSlots) -> None:
        """Store the slots of the ranks, if the event has them."""
        if happened.slots:
            self.slots = {slot["rank"]: slot for slot in happened.slots}

    def _moved(self, failure: Failure, ranks: Iterable[int]) -> None:
        """Record which ranks moved to another node, and which got a new actor on the same one."""
        for rank in ranks:
            new, old = self.slots.get(rank, {}), self.before_it.get(rank, {})
            stayed = "node" in new and new["node"] == old.get("node")
            (failure.renewed if stayed else failure.moved)[rank] = new.get("host", "")

    def _begin(self, happened: kinds.Failure) -> Failure:
        cause, t = happened.cause, happened.t
        if (before := self.open) is not None:
            before.status = "restarted"  # it failed again before it had completed a step
        detected = max(cause["at"], min(self.stopped_at or t, t))
        self.stopped_at = 0.0
        self.before_it = self.slots
        number = len(self.found) + 1
        made = Failure(
            number=number,
            page=f"blame-{self.before + number}.txt",
            t=t,
            cause=cause,
            text=happened.text,
            reason=happened.reason,
            reached=happened.reached,
            others=list(happened.others),
            attempt=happened.attempt,
            slot=self.slots.get(cause["rank"], {}),
            parts={"detect": detected - cause["at"], "kill": max(0.0, t - detected)},
        )
        self.found.append(made)
        return made

    def _restarted(self, failure: Failure, happened: kinds.Restarted) -> Failure:
        failure.s = happened.s
        failure.repeated = happened.repeated if happened.step else None
        failure.status = "restarted"
        failure.kept = tuple(happened.kept)
        failure.why_not_kept = happened.why_not_kept
        before, end = failure.t, failure.at + happened.s
        for part in PARTS[2:]:
            if part in self.marks or (part == "first step" and happened.step):
                now = min(max(before, self.marks.get(part, end)), end)
                failure.parts[part] = now - before
                before = now
        return failure

    def _over(self, failure: Failure, result: kinds.Result) -> Failure | None:
        """Complete the last failure at the end of the run; return it if it was still open."""
        if failure.status != "running":
            return None
        failure.status = "restarted" if result.status == "finished" else result.status
        failure.why_last = result.why_last
        if failure.restart:  # no slot was free for another attempt, or it was stopped
            failure.why_last = failure.why_last or result.failure.partition("\n")[0]
        if failure.status == "restarted":  # its job completed no step
            return failure
        failure.own_checkpoint = bool(self.newest_checkpoint[1])
        failure.saved, failure.checkpoint = (
            self.newest_checkpoint if failure.own_checkpoint else self.resumed_from
        )
        # The last attempt may have failed before its first step. A lower step than the saved one
        # is of another raydist.fit, or of a program that reports none.
        furthest = max(each.reached for each in self.found)
        lost = furthest - failure.saved
        failure.repeated = lost if furthest and lost >= 0 else None
        waited = failure.restart and "place" not in self.marks
        failure.parts["place" if waited else "save"] = max(0.0, result.t - failure.t)
        return failure
