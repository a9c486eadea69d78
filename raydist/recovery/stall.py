"""Heartbeats -> whether a rank is silent for longer than its own steps explain. (pure)"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from raydist.settings.config import Hang

LEARN = 3
"""Steps after which the pace of a rank is known."""
UNKNOWN_S = 60.0
"""Seconds of silence after which the ranks are examined while a rank's pace is unknown. This alone
ends no rank."""
SLOW = frozenset({"start", "evaluate", "save"})
"""Phases whose length does not depend on the time of a step."""

HELD = "debugger"
"""The phase of a rank that waits in the debugger."""

Beat = tuple[int, str, float]
"""(step, phase, seconds since the epoch on the rank's own clock), as worker.heartbeat.read_beat
returns it."""


@dataclass
class RankBeats:
    """What the heartbeats of one rank show."""

    beat: Beat = (0, "", 0.0)
    heard_at: float = 0.0
    """When it last wrote its heartbeat, on the driver's clock."""
    stepped_at: float = 0.0
    """When its last step ended, on its own clock."""
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds of a step, each the mean of the steps between two heartbeats."""
    learnt: int = 0
    """Steps that `steps` has counted."""


@dataclass
class StallCheck:
    """Determines which ranks are silent. Times are seconds on the driver's monotonic clock."""

    settings: Hang
    late_s: float = 0.0
    """Additional seconds beyond `hang.after_s` that a heartbeat may take to arrive; not 0 with many
    ranks."""
    program: bool = False
    """Whether the ranks run a program (script=): before its first step its silence says nothing."""
    ranks: dict[int, RankBeats] = field(default_factory=dict)
    again: float = 0.0
    """Seconds of silence after which to examine again, once an examination found nothing."""

    def note(self, rank: int, beat: Beat, now: float) -> None:
        """Record a heartbeat that was written at `now`."""
        beats = self.ranks.setdefault(rank, RankBeats(heard_at=now))
        if beat == beats.beat:
            return
        if beats.beat[1] == HELD:  # meanwhile the others could make no progress
            for other in self.ranks.values():
                other.heard_at = max(other.heard_at, now)
        step, _, at = beat
        if step > beats.beat[0]:
            if beats.stepped_at:
                beats.steps.append((at - beats.stepped_at) / (step - beats.beat[0]))
                beats.learnt += step - beats.beat[0]
            beats.stepped_at = at
        beats.beat = beat
        beats.heard_at = now
        self.again = 0.0

    def forget(self, rank: int) -> None:
        """Remove a rank that has ended."""
        self.ranks.pop(rank, None)

    def beats(self) -> dict[int, Beat]:
        """Return the last heartbeat of each running rank."""
        return {rank: beats.beat for rank, beats in self.ranks.items()}

    def patience_s(self, beats: RankBeats) -> float:
        """Return the seconds that this rank may be silent before all ranks are examined."""
        known = beats.learnt >= LEARN and beats.beat[1] not in SLOW
        step = (
            self.settings.after_s + self.settings.steps * statistics.median(beats.steps)
            if known
            else UNKNOWN_S
        )
        return min(self.settings.limit_s, step)

    @property
    def held(self) -> bool:
        """Whether a person holds a rank in the debugger: the silence of all ranks means nothing."""
        return any(beats.beat[1] == HELD for beats in self.ranks.values())

    def learning(self) -> bool:
        """Return whether a rank has reported too few steps for its silence to mean a hang."""
        return any(beats.learnt < LEARN for beats in self.ranks.values())

    def silence(self, now: float) -> float:
        """Return the longest silence in seconds."""
        return max((now - beats.heard_at for beats in self.ranks.values()), default=0.0)

    def over(self, now: float) -> bool:
        """Return whether a rank was silent beyond `hang.limit_s`.

        Ranks without a heartbeat do not count; nor do those of a program that have reported no
        step, and that may have saved a checkpoint.
        """
        return not self.held and any(
            now - beats.heard_at > self.settings.limit_s
            for beats in self.ranks.values()
            if (beats.beat[0] if self.program else beats.beat[2])
        )

    def silent(self, now: float) -> bool:
        """Return whether it is time to examine all ranks."""
        return not self.held and any(
            now - beats.heard_at > max(self.patience_s(beats) + self.late_s, self.again)
            for beats in self.ranks.values()
        )

    def note_examination(self, now: float) -> None:
        """Note that the ranks were examined.

        The next time is after twice the silence, but once more at the limit.
        """
        silence, limit = self.silence(now), self.settings.limit_s
        self.again = min(2 * silence, limit) if silence < limit else 2 * silence
