"""Heartbeats -> which ranks are silent for longer than their own steps explain. (pure)"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from raydist.config import Hang

LEARN = 3
"""Steps that a rank must have done before its pace is known."""
UNKNOWN_S = 60.0
"""Seconds of silence after which to look where no pace is known. To look costs nothing, and ends nobody by itself."""
SLOW = frozenset({"start", "evaluate", "save"})
"""Phases that have nothing to do with the time of a step."""

Beat = tuple[int, str, float]
"""(step, phase, seconds since the epoch on the rank's own clock), as node.wire.read_beat tells it."""


@dataclass
class Pulse:
    """What is known of one rank."""

    beat: Beat = (0, "", 0.0)
    heard: float = 0.0
    """When it last wrote its heartbeat, on the driver's clock."""
    stepped: float = 0.0
    """When its last step ended, on its own clock."""
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds of a step, each as the mean of those between two heartbeats."""
    learnt: int = 0
    """Steps that these are the times of."""


@dataclass
class Pace:
    """The pulses of all ranks."""

    settings: Hang
    pulses: dict[int, Pulse] = field(default_factory=dict)
    again: float = 0.0
    """Silence in seconds after which to look again, once it was looked in vain."""

    def note(self, rank: int, beat: Beat, now: float) -> None:
        """Take in a heartbeat, written at `now` seconds of the driver's clock."""
        pulse = self.pulses.setdefault(rank, Pulse(heard=now))
        if beat == pulse.beat:
            return
        step, _, at = beat
        if step > pulse.beat[0]:
            if pulse.stepped:
                pulse.steps.append((at - pulse.stepped) / (step - pulse.beat[0]))
                pulse.learnt += step - pulse.beat[0]
            pulse.stepped = at
        pulse.beat, pulse.heard = beat, now
        self.again = 0.0

    def forget(self, rank: int) -> None:
        """This rank has ended."""
        self.pulses.pop(rank, None)

    def allowed(self, pulse: Pulse) -> float:
        """Seconds that this rank may be silent before somebody looks."""
        known = pulse.learnt >= LEARN and pulse.beat[1] not in SLOW
        pace = self.settings.after_s + self.settings.steps * statistics.median(pulse.steps) if known else UNKNOWN_S
        return min(self.settings.limit_s, pace)

    def silence(self, now: float) -> float:
        """The longest silence in seconds."""
        return max((now - pulse.heard for pulse in self.pulses.values()), default=0.0)

    def over(self, now: float) -> bool:
        """Whether somebody who has a heartbeat is silent for too long, whatever the reason. A script may have none."""
        return any(now - pulse.heard > self.settings.limit_s for pulse in self.pulses.values() if pulse.beat[2])

    def silent(self, now: float) -> bool:
        """Whether it is time to look at all ranks."""
        late: Iterable[Pulse] = (p for p in self.pulses.values() if now - p.heard > max(self.allowed(p), self.again))
        return any(late)

    def looked(self, now: float) -> None:
        """Somebody has looked, and all may be well: the next time after twice the silence, and once at the limit."""
        silence, limit = self.silence(now), self.settings.limit_s
        self.again = min(2 * silence, limit) if silence < limit else 2 * silence
