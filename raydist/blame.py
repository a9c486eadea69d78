"""How the ranks of a run ended: who began it, who only suffered, and the text that a person reads. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class End:
    """How one rank ended."""

    rank: int
    host: str
    how: str
    """finished, raised (an exception), exited (a code), killed (a signal), lost (node or actor), hung (and was ended
    for it), drained (its node is about to be taken away), ended (by mpirun), stopped (by us)."""
    at: float
    """Seconds since the epoch."""
    step: int = 0
    """The last step that the rank noted."""
    phase: str = ""
    """What it was doing: data, forward, …"""
    code: int = 0
    """Exit code (0 for killed)."""
    signal: int = 0
    """The signal that killed it."""
    type: str = ""
    """Type of the exception, as in ValueError."""
    message: str = ""
    traceback: str = ""
    log: str = ""
    """Path of the rank's log where the driver is."""
    why: str = ""
    """What its node knows of the reason: whether the kernel or Ray ended it for want of memory, or nobody did."""
    preempted: bool = False
    """Lost, because the cluster took its node away, or left in time, because the cluster is about to."""

    @property
    def failed(self) -> bool:
        """It ended by itself, and not well."""
        return self.how not in ("finished", "stopped")

    @property
    def oom(self) -> bool:
        """It was ended for want of memory."""
        return self.why.startswith("out of memory")


SAID = 500
"""Characters of what native code said that are kept."""
ECHO_S = 0.5
"""Seconds within which an exit with a code may be the echo of a rank that was killed."""
TRACEBACK_LINES = 15
"""Lines of the end of a traceback that a person is shown; the whole of it is in the rank's log."""

NETWORK_TYPES = frozenset(
    {
        "DistNetworkError",
        "DistBackendError",
        "DistStoreError",
        "HorovodInternalError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "BrokenPipeError",
    }
)
"""Exceptions that the end of another rank causes (torch/distributed/__init__.py, horovod/common/exceptions.py)."""

NETWORK_WORDS = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Connection refused|Broken pipe|monitoredBarrier"
    r"|NCCL (error|watchdog|communicator was aborted)|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|[Ww]atchdog caught collective|collective operation timeout|Horovod has been shut down"
    r"|The client socket has (timed out|failed)|wait timeout after \d+ ?ms",
)
"""What gloo and the store (torch 2.15, seen by ending one of three ranks), NCCL and Horovod say when a peer is gone."""

DISAGREE = re.compile(
    r"data size doesn't match expected size|op\.preamble\.length"
    r"|Mismatched (?:[A-Z]+ tensor|data types|operations|reduction operation|prescale)"
)
"""What gloo (in an abort) and Horovod (as an error, on all ranks) say when ranks are not at the same collective."""

LAST_WORDS = re.compile(
    r"^ *what\(\): +(.+)|^(F\d{4} .+)|^((?:double free|(?:free|malloc|realloc|munmap_chunk)\(\)|corrupted ).*)",
    re.MULTILINE,
)
"""What C++, glog's checks and glibc write before they abort."""

MEANINGS = {
    signal.SIGKILL: "the kernel's out-of-memory killer (see dmesg there), or somebody's kill -9",
    signal.SIGSEGV: "native code touched memory that isn't its own; the end of the log shows where each thread was",
    signal.SIGBUS: "a memory-mapped file could not grow, most often because /dev/shm is full (docker: --shm-size)",
    signal.SIGABRT: "native code gave up: a failed check, or a collective that timed out; see the end of the log",
    signal.SIGILL: "an instruction that this CPU lacks: something was built for another machine",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGTERM: "somebody, or the cluster, asked it to end",
    signal.SIGINT: "somebody pressed Ctrl-C there",
    signal.SIGXCPU: "its limit of CPU time (ulimit -t) was reached",
}
"""What a signal usually means."""


def is_victim(end: End) -> bool:
    """Whether this end may well be another rank's fault: wait for that one to show before judging."""
    return _guilt(end) > 0


def first_cause(ends: Iterable[End]) -> End | None:
    """The end that began it all, or None if no rank failed.

    Culprits go before aborts, aborts before network errors: those who wait for a dead rank often notice before its own
    death is seen, so the clock only decides among equals.
    """
    failed = sorted((end for end in ends if end.failed), key=lambda end: (_guilt(end), end.at, end.rank))
    first = next(iter(failed), None)
    if first is not None and first.how == "exited":
        # MPI's ranks, and programs that catch the error, exit with a code a moment before the death behind it is seen.
        killed = (end for end in failed if end.how == "killed" and not _guilt(end) and end.at - first.at < ECHO_S)
        return next(killed, first)
    return min(_together(first, failed), key=lambda end: end.rank) if first is not None else None


def last_words(log: str) -> str:
    """Why native code aborted, from the end of its log; empty where it did not say."""
    found = list(LAST_WORDS.finditer(log))
    return next(filter(None, found[-1].groups())).strip()[:SAID] if found else ""


def disagree(end: End) -> bool:
    """Ranks were not at the same collective: the one that noticed need not be the one that is wrong."""
    return end.how in ("raised", "killed") and DISAGREE.search(end.message) is not None


def _together(first: End, ends: Iterable[End]) -> list[End]:
    """The ends that are one event with this one: the ranks of a node are lost at once, and heard of one by one."""
    return [end for end in ends if end is first or (end.how == first.how == "lost" and end.host == first.host)]


def _guilt(end: End) -> int:
    """0: nobody else does this to a rank. 1: an abort, its own check or a watchdog's. 2: a network error."""
    if disagree(end):
        return 0
    if end.how == "raised" and (end.type in NETWORK_TYPES or NETWORK_WORDS.search(end.message)):
        return 2
    return 2 if end.how == "ended" else int(end.how == "killed" and end.signal == signal.SIGABRT)


def failure_text(ends: Sequence[End]) -> str:
    """What a person reads: the first cause with its traceback's end and log, everybody else in a few lines."""
    first = first_cause(ends)
    if first is None:
        return ""
    others = [end for end in ends if end.failed and end is not first]
    same = [end for end in others if _kind(end) == _kind(first)]
    lines = [f"{where(first)} {cause(first)}"]
    lines += [f"  {line}" for line in first.traceback.strip().splitlines()[-TRACEBACK_LINES:]]
    lines += [f"  log: {first.log}"] if first.log else []
    lines += [f"  the same on {_name_ranks(same)}"] if same else []
    lines += _suspects(first, ends)
    lines += _follow_on([end for end in others if end not in same])
    return "\n".join(lines)


def reason(ends: Sequence[End]) -> str:
    """Why the first cause is held to be that, in one line."""
    first = first_cause(ends)
    if first is None:
        return ""
    others = [end for end in ends if end.failed and end is not first]
    victims = [end for end in others if _guilt(end) > _guilt(first)]
    if first.how == "hung":
        return "what each rank was found doing when they were silent: " + first.message.partition("\n")[0]
    if first.how == "drained":
        return "the cluster said so; nothing has failed"
    if disagree(first):
        return "its collective met a different one on another rank; only the job can tell which of the two is wrong"
    if is_victim(first):
        done = _finished_before(first, ends)
        known = f"{_name_ranks(done)} had finished before" if done else "no rank is known that began it"
        return f"{known}: all that failed say what the end of another rank causes"
    if not others:
        return "the only rank that failed; the others were ended because of it"
    if len(victims) == len(others):
        return f"{_name_ranks(victims)} failed as ranks do whose peer is gone; nobody does this one to a rank"
    if len(lost := _together(first, ends)) + len(victims) == len(others) + 1:
        return f"{_name_ranks(lost)} were lost at once, with the node or the actor that held them on {first.host}"
    rival = min((end for end in others if end not in victims), key=lambda end: (end.at, end.rank))
    if rival.at < first.at:
        return f"rank {rival.rank} was seen to exit first, as programs do whose peer was killed"
    rivals = len(others) + 1 - len(victims)
    return f"the first of {rivals} that may be at fault, {rival.at - first.at:.3f} s before rank {rival.rank}"


def told(first: End, ends: Sequence[End]) -> dict[str, Any]:
    """The facts of the event `failure`."""
    others = [end for end in ends if end.failed and end is not first]
    return {
        "cause": asdict(first), "text": failure_text(ends), "reason": reason(ends),
        "reached": max(end.step for end in ends), "ended": max(end.at for end in ends),
        "others": [{"rank": end.rank, "host": end.host, "how": end.how, "step": end.step, "words": brief(end)}
                   for end in others],
    }  # fmt: skip


def where(end: End) -> str:
    """The rank, its host, and how far it was."""
    doing = f", in {end.phase}" if end.phase and end.phase != "end" else ""
    step = "last heard of at step" if end.how == "lost" else "step"
    return f"rank {end.rank} on {end.host}, {step} {end.step}{doing}:"


def cause(end: End) -> str:
    """How a rank ended, in words."""
    if end.how == "raised":
        return f"{end.type}: {end.message}" if end.message else end.type
    if end.how == "killed":
        usual = MEANINGS.get(signal.Signals(end.signal), "") if end.signal in set(signal.Signals) else ""
        meaning = end.why or usual
        return f"killed by {_signal_name(end.signal)}" + (f" ({meaning})" if meaning else "") + _said(end)
    if end.how == "exited":
        return f"exited with code {end.code}" + _said(end)
    if end.how == "hung":
        return f"hangs: {end.message}"
    if end.how == "ended":
        return "ended because mpirun gave it up" + _said(end)
    if end.how == "lost":
        return f"lost: {end.why}" if end.oom else "lost: its node or its actor is gone" + _said(end)
    if end.how == "drained":
        return f"left its node: {end.message}"
    return end.how


def brief(end: End) -> str:
    """How a rank ended, in a few words without addresses and numbers: equal ends read the same."""
    if end.how != "raised":
        return cause(end).partition(" (")[0].partition("; ")[0]
    first = next(iter(end.message.strip().splitlines()), "")
    # "[…/pair.cc:561] Read error [127.0.0.1]:29062: Connection reset by peer. This is typically …" -> the words between
    plain = re.sub(r"^\[[^\]]*\.cc:\d+\] |\[[\da-fA-F.:]+\]:\d+:? ?", "", first).partition(". ")[0].strip().rstrip(".")
    return f"{end.type}: {plain[:95]}..." if len(plain) > 98 else f"{end.type}: {plain}".rstrip(": ")


def compact(ranks: Iterable[int]) -> str:
    """Ranks as ranges: `0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0-3, 7`."""
    told = compact(ranks)
    return f"rank{'' if told.isdigit() else 's'} {told}"


def _finished_before(first: End, ends: Iterable[End]) -> list[End]:
    """The ranks that were through when this one failed; of their end the others may hear before their node sees it."""
    return [end for end in ends if end.how == "finished" and end.at <= first.at + ECHO_S]


def _suspects(first: End, ends: Sequence[End]) -> list[str]:
    """If the first cause is only a victim: who was not there when it waited."""
    if not is_victim(first):
        return []
    done = _finished_before(first, ends)
    behind = [end for end in ends if end.how == "stopped" and end.step <= first.step]
    lines = [f"  {_name_ranks(done)} had finished before: did the job return early there?"] if done else []
    for end in behind[:3]:
        lines.append(f"  still running, maybe waited for: {where(end).rstrip(':')}")
    return lines + ([f"  ... and {len(behind) - 3} more"] if len(behind) > 3 else [])


def _follow_on(others: Sequence[End]) -> list[str]:
    """One line for each kind of end."""
    kinds: dict[str, list[End]] = {}
    for end in others:
        kinds.setdefault(brief(end), []).append(end)
    return [f"  follow-on: {_name_ranks(ends)}: {words}" for words, ends in kinds.items()]


def _kind(end: End) -> tuple[str, int, int, str, str]:
    """Equal for ends that are the same, numbers in the message aside."""
    return end.how, end.code, end.signal, end.type, re.sub(r"0x[0-9a-f]+|\d+", "#", end.message)


def _name_ranks(ends: Sequence[End]) -> str:
    return name_ranks(end.rank for end in ends)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(end: End) -> str:
    return f"; {end.message.strip()}" if end.message else ""
