"""(phase of an attempt, what happens) -> the next phase, and what to do: a table. (pure)"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from raydist.cluster.drain import DrainNotice
from raydist.launch.limits import longest
from raydist.recovery import deadlines
from raydist.recovery.classify import AttemptRecord
from raydist.recovery.hang_verdict import ConfirmedHang
from raydist.recovery.resize import NodesJoined
from raydist.shared.errors import Stopped
from raydist.shared.outcome import End, StopReason


@dataclass(frozen=True)
class Phase:
    """What an attempt has in every phase."""

    record: AttemptRecord = field(default_factory=AttemptRecord)
    due: float = math.inf
    """The deadline at which something is done although nothing else happens, in seconds on the
    monotonic clock."""


@dataclass(frozen=True)
class Running(Phase):
    """All ranks run, and nothing is known that would stop them."""


@dataclass(frozen=True)
class Finishing(Phase):
    """A rank has finished, and the others are about to: they make way for no further nodes.

    A rank that has ended agrees on no common step, and the others would pause until it does. If
    nodes are drained, or another run needs the room, the others are stopped at the deadline.
    """

    wanted_by: str = ""
    """The run that needs the room, for a person; empty for none."""


@dataclass(frozen=True)
class Quiescing(Phase):
    """The ranks are asked to stop at a point where no step is lost; others will continue.

    If nodes are drained, the ranks are stopped at the deadline wherever they are.
    """

    growth: str = ""
    """The growth of the cluster, for a person; empty if no nodes have joined."""
    wanted_by: str = ""
    """The run that needs the room, for a person; empty for none."""


@dataclass(frozen=True)
class Failing(Phase):
    """A rank has failed. Until the deadline another one that may have caused it can fail itself."""


@dataclass(frozen=True)
class Stopping(Phase):
    """All ranks were sent a stop. At the deadline those whose agents do not answer are lost."""

    since: float = 0.0
    """An agent that has not answered since then is lost at the deadline."""
    final: float = math.inf
    """When a rank is lost even if its agent answers: its process can't be killed."""


@dataclass(frozen=True)
class RankRaised:
    """A rank has raised an exception; its process has not ended yet."""


@dataclass(frozen=True)
class MakeWay:
    """Another run needs the room, and comes first."""

    wanted_by: str
    """That run, for a person."""


@dataclass(frozen=True)
class Quiesced:
    """The ranks can be stopped now without losing a step."""


@dataclass(frozen=True)
class TimePassed:
    """Nothing but time has passed."""


Happening = (
    Stopped
    | ConfirmedHang
    | DrainNotice
    | NodesJoined
    | MakeWay
    | End
    | RankRaised
    | Quiesced
    | TimePassed
)


@dataclass(frozen=True)
class Stop:
    """An order to stop all ranks."""

    reason: StopReason
    text: str
    """The reason for a person."""
    grace_s: float = 0.0
    """Seconds between SIGTERM and SIGKILL; 0: SIGKILL at once."""


@dataclass(frozen=True)
class RequestQuiesce:
    """Have the ranks stop after a common step."""


@dataclass(frozen=True)
class DeclareLost:
    """Declare ranks lost whose agents have not answered since then."""

    since: float
    stuck: bool
    """Whether the other ranks are lost too: their processes can't be killed."""


Action = Stop | RequestQuiesce | DeclareLost


def advance(
    phase: Phase, happening: Happening, now: float, ranks: int = 0
) -> tuple[Phase, Action | None]:
    """Return the phase that follows, and what to do; None: nothing.

    `now`: seconds on the monotonic clock. `ranks`: their number; agents of many ranks may take
    longer.
    """
    record, due = phase.record, phase.due
    if isinstance(happening, TimePassed) and now < due:
        # Also if a signal came just before: all ranks get its grace period.
        return phase, None
    match phase, happening:
        case _, Stopped():
            # Also after another stop, which may have left the ranks no time to save.
            stop = Stop(StopReason.SIGNAL, str(happening), deadlines.GRACE_S)
            return _stop(replace(record, stopped=happening), stop, now, ranks)
        case Stopping(), TimePassed():
            # The ranks whose agents still answer get more time to end.
            later = max(now, min(now + longest(deadlines.SILENT_S, ranks), phase.final))
            lost = DeclareLost(phase.since, stuck=now >= phase.final)
            return replace(phase, due=later, since=now), lost
        case Stopping(), _:
            # It was under way when the stop was sent, or follows from it.
            return phase, None
        case _, ConfirmedHang():
            stop = Stop(StopReason.HANG, "ranks hang")
            return _stop(replace(record, hang=happening), stop, now, ranks)
        case _, End() if (seconds := deadlines.culprit_wait(happening)) is not None:
            return Failing(record, min(due, now + seconds)), None
        case Running(), End():
            return Finishing(record), None
        case Quiescing(), RankRaised():
            # Nodes that are drained may take a rank's peers with them: it remains a drain unless
            # the rank's process ends by itself.
            return replace(phase, due=min(due, now + deadlines.VICTIM_S)), None
        case _, RankRaised():
            # The process may hang while it exits: the stop does not wait for its end.
            return Failing(record, min(due, now + deadlines.VICTIM_S)), None
        case ((Running() | Quiescing()), DrainNotice()):
            growth = phase.growth if isinstance(phase, Quiescing) else ""
            record = replace(record, drain=happening)
            return Quiescing(record, min(due, now + happening.share_s), growth), RequestQuiesce()
        case Finishing(), DrainNotice():
            record = replace(record, drain=happening)
            return replace(phase, record=record, due=min(due, now + happening.share_s)), None
        case Quiescing(wanted_by=by), NodesJoined() if by:
            return phase, None
        case ((Running() | Quiescing()), NodesJoined(text)):
            return Quiescing(record, due, text), RequestQuiesce()
        case Running(), MakeWay(wanted_by):
            due = min(due, now + deadlines.MAKE_WAY_S)
            return Quiescing(record, due, wanted_by=wanted_by), RequestQuiesce()
        case ((Quiescing() | Finishing()), MakeWay(wanted_by)):
            due = min(due, now + deadlines.MAKE_WAY_S)
            return replace(phase, due=due, wanted_by=wanted_by), None
        case ((Quiescing() | Finishing()), (Quiesced() | TimePassed())) if record.drain:
            stop = Stop(StopReason.DRAIN, "its nodes are drained", record.drain.share_s)
            return _stop(record, stop, now, ranks)
        case ((Quiescing() | Finishing()), (Quiesced() | TimePassed())) if by := phase.wanted_by:
            grace_s = deadlines.PROGRAM_S if record.program else deadlines.GRACE_S
            stop = Stop(StopReason.MAKE_WAY, f"makes way for {by}", grace_s)
            return _stop(replace(record, makes_way=by), stop, now, ranks)
        case Quiescing(growth=growth), Quiesced():
            # The ranks of a job have their state in memory by now.
            grace_s = deadlines.PROGRAM_S if record.program else 0.0
            stop = Stop(StopReason.RESIZE, f"the size changes: {growth}", grace_s)
            return _stop(replace(record, resize=growth), stop, now, ranks)
        case _, TimePassed():
            return _stop(record, Stop(StopReason.FAILURE, "a rank failed"), now, ranks)
    return phase, None


def _stop(record: AttemptRecord, stop: Stop, now: float, ranks: int) -> tuple[Phase, Action | None]:
    killed = now + stop.grace_s
    due = killed + longest(deadlines.SILENT_S, ranks)
    final = max(due, killed + deadlines.DYING_S)
    return Stopping(record, due, since=now, final=final), stop
