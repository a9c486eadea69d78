"""How long to wait before ranks are stopped, and for agents that do not answer. (pure)"""

from __future__ import annotations

from raydist.launch.limits import SILENT_S as SILENT_S
from raydist.messages.agent import DYING_S as DYING_S
from raydist.recovery.blame import is_victim
from raydist.shared.outcome import End

VICTIM_S = 0.5
"""Seconds that a failure which another rank may have caused waits for that rank's own failure."""
MPIRUN_S = 2.0
"""The same for a rank that mpirun ended: mpirun ends all of them, so a longer wait seldom costs
time, and the rank that called MPI_Abort may be the last to end."""
GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL when a signal stops the run; `ray job stop` allows three
seconds in all."""
PROGRAM_S = 30.0
"""The same for a program that is started again later, with another number of nodes or once it has
made way: it may save its state on SIGTERM. torchrun's agent waits as long when nodes join
(PContext.close)."""
MAKE_WAY_S = 60.0
"""Seconds in which ranks that make way for another run reach the end of their step, or their next
checkpoint. Then they are stopped where they are, and continue from their last snapshot."""
ANSWER_S = (0.5, 1.0)
"""Seconds between two replies of one agent, unless its rank ends: at the start of a run, and later,
when the ranks need the CPU themselves (a reply costs 3 ms of it, nearly all in Ray)."""
AGENT_S = 10.0
"""Seconds after a reply is due within which an agent, or a fork server, must answer."""
SUSPECT_S = 1.0
"""Seconds after a reply is due after which a node of which no agent has answered is suspect. That
costs only a few connections: a busy node accepts them (recovery.cut_monitor)."""
NODE_S = 30.0
"""Seconds within which a node reports how a rank ended: a Ray worker may have to start there, and
has a low priority (Ray's worker_niceness is 15)."""
UNHEARD = 3
"""A run of which no agent answers any more is ended after this multiple of the limit, because its
ranks may well continue."""
ANSWERS_PER_S, MOST_ANSWERS_PER_S = 300.0, 1000.0
"""Replies that the driver handles per second; with more ranks each agent answers less often. 1,024
ranks then cost it a tenth of a core, of which more than half is Ray's part of the calls (bench
driver). It handles more of them before an agent answers less often than every SELDOM_S."""
SELDOM_S = 10.0


def culprit_wait(end: End) -> float | None:
    """Return the seconds after this end within which all ranks are stopped; None if not a failure.

    A failure that another rank may have caused leaves that rank time to fail by itself.
    """
    if not end.failed:
        return None
    if end.how == "ended":
        return MPIRUN_S
    return VICTIM_S if is_victim(end) else 0.0


def answer_interval(running_s: float, ranks: int) -> float:
    """Return the seconds that an agent may collect news before it answers.

    `running_s`: seconds since the ranks have met.
    """
    first, later = ANSWER_S
    return max(min(later, max(first, running_s / 20)), fair_interval(ranks))


def fair_interval(ranks: int) -> float:
    """Return the seconds between two answers of an agent with which the driver copes."""
    return min(ranks / ANSWERS_PER_S, max(SELDOM_S, ranks / MOST_ANSWERS_PER_S))


def longest_interval(ranks: int) -> float:
    """Return the longest `answer_interval` of a run of that many ranks."""
    return max(ANSWER_S[1], fair_interval(ranks))


def late_answer(ranks: int) -> float:
    """Return the seconds that an agent answers later than with few ranks.

    The limits of a hang assume few ranks.
    """
    return longest_interval(ranks) - ANSWER_S[1]


def suspect_after(ranks: int) -> float:
    """Return the seconds after which a node of which no agent has answered is suspect."""
    return SUSPECT_S + longest_interval(ranks)


def agent_limit(ranks: int) -> float:
    """Return the seconds after which an agent that has not answered a call is silent."""
    return AGENT_S + longest_interval(ranks)
