"""Looks at all ranks when one is silent for longer than its steps explain, and says what holds them up. (driver)"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from raydist import stuck
from raydist.config import Hang
from raydist.events import Events
from raydist.group import Gang
from raydist.pace import Beat, Pace
from raydist.stuck import Look, Verdict

WAKE_S = 0.25
"""Seconds between two questions whether somebody is silent."""
ANSWER_S = 5.0
"""Longest wait for what the seats find; one that says nothing is left out."""


class Sentry:
    """One attempt's. `tell` is called from another thread, with the verdict of each look."""

    def __init__(self, gang: Gang, settings: Hang, events: Events, logs: Path, tell: Callable[[Verdict], None]) -> None:
        self._gang = gang
        self._settings = settings
        self._events = events
        self._logs = logs
        self._tell = tell
        self._pace = Pace(settings)
        self._looking = False
        self._said = ""
        self._due = 0.0

    def note(self, rank: int, beat: Beat, quiet: float) -> None:
        """A rank's heartbeat, as its seat has just read it, `quiet` seconds old. Looks at everybody if it is time."""
        now = time.monotonic()
        self._pace.note(rank, beat, now - quiet)
        if now >= self._due and not self._looking:
            self._due = now + WAKE_S
            if self._pace.silent(now):
                self._look()

    def beat(self, rank: int) -> Beat:
        """The last heartbeat of a rank that was heard of."""
        pulse = self._pace.pulses.get(rank)
        return pulse.beat if pulse else (0, "", 0.0)

    @property
    def silence(self) -> float:
        """The longest silence of a rank, in seconds."""
        return self._pace.silence(time.monotonic())

    def gone(self, rank: int) -> None:
        """This rank has ended."""
        self._pace.forget(rank)

    def weigh(self, verdict: Verdict) -> bool:
        """Say what was found, if it is new; whether the run must be ended for it."""
        now = time.monotonic()
        silence = self._pace.silence(now)
        over = self._pace.over(now)
        verdict = verdict.final if over else verdict
        self._looking = False
        if not (verdict.certain or self._pace.silent(now)):
            return False  # it went on while it was looked at
        self._pace.looked(now)
        if verdict.text and (verdict.text != self._said or over):
            self._said = verdict.text
            for look in verdict.looks:
                (self._logs / f"rank-{look.rank}.stacks").write_text(look.stack, encoding="utf-8")
            self._events.say("hang", text=verdict.text, ranks=verdict.culprits, certain=verdict.certain, s=silence)
        return over or (self._settings.end and verdict.certain)

    def _look(self) -> None:
        self._looking = True
        calls = {rank: self._gang.call(rank, "examine") for rank in self._pace.pulses}
        beats = {rank: pulse.beat for rank, pulse in self._pace.pulses.items()}
        threading.Thread(target=self._gather, args=(calls, beats), name="raydist-sentry", daemon=True).start()

    def _gather(self, calls: Mapping[int, Future[Any]], beats: Mapping[int, Beat]) -> None:
        wait(calls.values(), timeout=ANSWER_S)
        answers = {rank: call.result() for rank, call in calls.items() if call.done() and not call.exception()}
        self._tell(
            stuck.judge([self._seen(rank, beats[rank], found) for rank, found in sorted(answers.items()) if found])
        )

    def _seen(self, rank: int, beat: Beat, found: dict[str, Any]) -> Look:
        return Look(rank, self._gang.plan.seats[rank].node.host, step=beat[0], phase=beat[1], **found)
