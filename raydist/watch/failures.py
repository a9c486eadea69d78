"""Events of a run -> its failures: what broke first, what it cost, where the time went, what was done. (pure)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raydist.shared.events import Event

PARTS = ("detect", "kill", "save", "place", "fork", "rendezvous", "restore", "first step")
"""Where the time between a failure and the next step goes; `save`: to the disk, where its memory is left behind."""


@dataclass
class Failure:
    """One failure, with what has become of it so far."""

    number: int
    """From 1 in its run."""
    page: str
    """The file in the run folder that tells of it to a person; beside it the same as JSON."""
    t: float
    """Seconds since the epoch when all ranks had ended."""
    cause: Mapping[str, Any]
    """The end of the rank that broke first, as blame.End has it."""
    text: str
    """What broke first, and what followed, in words."""
    reason: str
    """Why that rank is held to be the first."""
    reached: int
    """The last step that any rank had noted."""
    others: list[Mapping[str, Any]] = field(default_factory=list)
    """The ranks that failed because of it, or with it."""
    attempt: int = 0
    slot: Mapping[str, Any] = field(default_factory=dict)
    """The place of the rank: host, ip, gpus."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each of PARTS, as far as it came."""
    s: float | None = None
    """Seconds from the failure to the next step that had not been done."""
    repeated: int | None = None
    """Steps that were done again, or are to be done again after the end of the run."""
    restart: Mapping[str, Any] = field(default_factory=dict)
    """The event `restart`, if there was another attempt."""
    resized: tuple[int, int] | None = None
    """The nodes before and after, where there were more or fewer."""
    moved: dict[int, str] = field(default_factory=dict)
    """The ranks that got another node, each with its host."""
    renewed: dict[int, str] = field(default_factory=dict)
    """The ranks that lost their actor, and got a new one on the same host."""
    resumed: int | None = None
    """The step that the next attempt went on from."""
    checkpoint: str = ""
    """The newest checkpoint of a run that ended with this failure."""
    why_last: str = ""
    """Why there was no other attempt."""
    status: str = "running"
    """What has become of it: running, restarted, or how the run ended: failed, stopped, finished."""

    @property
    def at(self) -> float:
        """Seconds since the epoch when it broke."""
        return float(self.cause["at"])

    def to_json(self) -> dict[str, Any]:
        """All of it, plain."""
        return {
            "number": self.number, "page": self.page, "at": self.at, "attempt": self.attempt, "status": self.status,
            "cause": dict(self.cause), "slot": dict(self.slot), "reason": self.reason, "text": self.text,
            "others": [dict(one) for one in self.others], "reached": self.reached, "resumed": self.resumed,
            "repeated": self.repeated, "s": self.s, "parts": {name: round(s, 4) for name, s in self.parts.items()},
            "moved": list(self.moved), "renewed": list(self.renewed), "checkpoint": self.checkpoint,
            "why_last": self.why_last,
        }  # fmt: skip


@dataclass
class Failures:
    """The failures of a run, event by event."""

    found: list[Failure] = field(default_factory=list)
    changed: Failure | None = None
    """The failure whose page the last event has changed."""
    before: int = 0
    """Pages in this folder, of runs before."""
    slots: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    before_it: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """The slots at the last failure."""
    silent: float = 0.0
    """When ranks fell silent that were then found to hang."""
    stopped: float = 0.0
    """When the others were told to end, in this attempt."""
    marks: dict[str, float] = field(default_factory=dict)
    """When each of PARTS was over, in this attempt."""
    saved: tuple[int, str] = (0, "")
    """The step and the path of the newest checkpoint."""

    @property
    def open(self) -> Failure | None:
        """The failure that is not over yet."""
        return self.found[-1] if self.found and self.found[-1].status == "running" else None

    def add(self, happened: Event) -> None:
        """Read one event."""
        self.changed = self._fold(happened)

    def _fold(self, happened: Event) -> Failure | None:
        t, now = happened["t"], self.open
        match happened["kind"]:
            case "run":
                self.found, self.saved, self.before = [], (0, ""), happened.get("pages", 0)
            case "plan" | "resize" | "takeover":
                if now and "before" in happened:
                    now.resized = (happened["before"], happened["nodes"])
                self._seat(happened)
            case "stop":
                self.stopped = t
            case "failure":
                return self._begin(happened)
            case "saved":
                self.saved = max(self.saved, (happened["step"], happened["path"]))
                if now and now.restart and now.cause["how"] == "drained" and "place" not in self.marks:
                    self.marks["save"] = t
            case "restart" if now:
                now.restart, self.marks = happened, {}
            case "placed":
                self.marks["place"] = t
                self._seat(happened)
                if now:
                    self._moved(now, happened.get("moved", ()))
            case "began" | "joined":
                self.marks["fork" if happened["kind"] == "began" else "rendezvous"] = t
            case "begin" if happened.get("rank") == 0:
                self.marks["restore"] = t
                if now and now.restart:
                    now.resumed = happened.get("resumed")
            case "restarted" if now:
                return self._restarted(now, happened)
            case "result" if self.found:
                return self._over(self.found[-1], happened)
        return None

    def _seat(self, happened: Event) -> None:
        """Who sits where from here on, where it tells."""
        if "slots" in happened:
            self.slots = {slot["rank"]: slot for slot in happened["slots"]}

    def _moved(self, failure: Failure, ranks: Iterable[int]) -> None:
        """These ranks got another slot: on another node, or where they were."""
        for rank in ranks:
            new, old = self.slots.get(rank, {}), self.before_it.get(rank, {})
            stayed = "node" in new and new["node"] == old.get("node")
            (failure.renewed if stayed else failure.moved)[rank] = new.get("host", "")

    def _begin(self, happened: Event) -> Failure:
        cause, t = happened["cause"], happened["t"]
        if (before := self.open) is not None:
            before.status = "restarted"  # and broke again before it had done a step
        detected = max(cause["at"], min(self.stopped or t, t))
        self.stopped, self.before_it = 0.0, self.slots
        number = len(self.found) + 1
        made = Failure(
            number=number, page=f"blame-{self.before + number}.txt", t=t, cause=cause, text=happened["text"],
            reason=happened["reason"], reached=happened["reached"], others=list(happened["others"]),
            attempt=happened.get("attempt", 0), slot=self.slots.get(cause["rank"], {}),
            parts={"detect": detected - cause["at"], "kill": max(0.0, t - detected)},
        )  # fmt: skip
        self.found.append(made)
        return made

    def _restarted(self, failure: Failure, happened: Event) -> Failure:
        failure.s, failure.repeated, failure.status = happened["s"], happened["repeated"], "restarted"
        before, end = failure.t, failure.at + happened["s"]
        for part in PARTS[2:]:
            if part == "first step" or part in self.marks:
                now = min(max(before, self.marks.get(part, end)), end)
                failure.parts[part], before = now - before, now
        return failure

    def _over(self, failure: Failure, result: Event) -> Failure | None:
        """The run is over. Only what it ended with is told anew."""
        if failure.status != "running":
            return None
        failure.status = "restarted" if result["status"] == "finished" else result["status"]
        failure.why_last = result.get("why_last", "")
        if failure.restart:  # there was no place for another attempt, or it was stopped
            failure.why_last = failure.why_last or result.get("failure", "").partition("\n")[0]
        if failure.status == "restarted":  # its job did no step
            return failure
        step, failure.checkpoint = self.saved
        failure.repeated = max(0, failure.reached - step)
        waited = failure.restart and "place" not in self.marks
        failure.parts["place" if waited else "save"] = max(0.0, result["t"] - failure.t)
        return failure
