"""What it costs to stop a run: the work since its newest state, and its save. (pure)"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raydist.shared import kinds
from raydist.shared.kinds import Event


@dataclass(frozen=True)
class StopCost:
    """What the ranks of a run lose if it makes way, as its driver knows it."""

    ranks: int = 1
    save_s: float = 0.0
    """Seconds that its last checkpoint took; 0: it has written none."""
    state_at: float = 0.0
    """When it had the newest state that it can continue from, in seconds since the epoch. 0: it
    stops after any step, and loses none."""

    def rank_seconds(self, now: float) -> int:
        """Return the cost: ranks times seconds. `now`: seconds since the epoch.

        A whole number: less than that is noise.
        """
        lost_s = max(0.0, now - self.state_at) if self.state_at else 0.0
        return round(self.ranks * (lost_s + self.save_s))


def cost_after(cost: StopCost, event: Event, script: bool) -> StopCost:
    """Return the cost of a stop after this event of the run.

    `script`: the run is a program, which is not stopped after a step.
    """
    match event:
        case kinds.HasPlan():
            return replace(cost, ranks=event.world_size)
        case kinds.Began(rank=0):
            # Whatever it continues from, an attempt loses only what it has done itself.
            return replace(cost, state_at=event.t)
        case kinds.Begin(rank=0) if not script:
            return replace(cost, state_at=0.0)
        case kinds.Saved():
            # The event of a state that another process has written has no duration.
            state_at = event.t if cost.state_at else 0.0
            return replace(cost, state_at=state_at, save_s=event.s or cost.save_s)
    return cost
