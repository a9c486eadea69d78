"""How the ranks of an attempt ended -> the first cause, the reason for it, and a text. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from raydist.shared import kinds
from raydist.shared.outcome import BROKEN_GPU, End
from raydist.shared.rank_names import name_ranks

SAID = 500
"""Maximum characters that are kept of native code's last message."""
ECHO_S = 0.5
"""Seconds within which an exit with a code may follow from the death of another rank."""
TRACEBACK_LINES = 15
"""Lines at the end of a traceback that the text shows; the rank's log has all of them."""

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
"""Exceptions that another rank's death causes (torch/distributed/__init__.py,
horovod/common/exceptions.py)."""

PEER_WORDS = re.compile(
    r"gloo/transport/|monitoredBarrier"
    r"|NCCL (error|watchdog|communicator was aborted)|ncclRemoteError|ncclSystemError"
    r"|[Ww]atchdog caught collective|collective operation timeout|Horovod has been shut down"
    r"|The client socket has (timed out|failed)|wait timeout after \d+ ?ms",
)
"""Messages after the death of a peer: those of gloo and TCPStore (torch 2.15, one of three ranks
killed), NCCL, Horovod."""
NETWORK_WORDS = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|unhandled system error"
)
"""Messages of the same libraries, in a RuntimeError. Clients of databases and of HTTP have them in
exceptions of their own types: those say nothing about another rank."""

OWN_KERNEL = re.compile(r"device-side assert triggered")
"""CUDA's error that only this rank's own kernel causes, as only its own GPU causes BROKEN_GPU,
whoever reports them: NCCL's watchdog does so as a DistBackendError, or aborts."""

DISAGREE = re.compile(
    r"data size doesn't match expected size|op\.preamble\.length"
    r"|Mismatched (?:[A-Z]+ tensor|data types|operations|reduction operation|prescale)"
)
"""Messages of gloo (when it aborts) and of Horovod (an error on all ranks) if ranks call different
collectives."""

BAD_HEAP = re.compile(r"double free|(?:free|malloc|realloc|munmap_chunk)\(\)|corrupted ")
"""The beginning of glibc's messages before it aborts: this rank's own native code is to blame."""
LAST_WORDS = re.compile(
    rf"^ *what\(\): +(.+)|^(F\d{{4}} .+)|^((?:{BAD_HEAP.pattern}).*)"
    r"|^\[rank\d+\]:.*\] (Aborting process .+)",
    re.MULTILINE,
)
"""The messages of C++, glog's checks, glibc and torch's watchdog of NCCL before they abort."""
CUDA_ERROR = re.compile(r"CUDA error: (.+)")
"""What torch's watchdog of NCCL prints. The message of its abort does not repeat it, nor does the
exception in Python (torch 2.15)."""

MEANINGS = {
    signal.SIGKILL: "from the kernel's out-of-memory killer, see dmesg on the node, or from "
    "another process: kill -9",
    signal.SIGSEGV: "native code accessed invalid memory; the stack of each thread is at the end "
    "of the log",
    signal.SIGBUS: "a memory-mapped file could not grow, most often because /dev/shm is full "
    "(docker: --shm-size)",
    signal.SIGABRT: "native code aborted: a failed check, or a collective that timed out; see "
    "the end of the log",
    signal.SIGILL: "an instruction that this CPU lacks: a library was built for another CPU",
    signal.SIGFPE: "an integer division by zero in native code",
    signal.SIGTERM: "another process or the cluster asked it to terminate",
    signal.SIGINT: "Ctrl-C was pressed on that node, or another process sent it",
    signal.SIGXCPU: "it reached its limit of CPU time, ulimit -t",
}
"""By signal: what it usually means."""


def is_victim(end: End) -> bool:
    """Return whether another rank may have caused this end.

    If so, that rank gets time to fail before the cause is chosen.
    """
    return _guilt(end) > 0


def aborted_alone(end: End) -> bool:
    """Return whether a rank's native code aborted, and nothing tells of another rank."""
    words = PEER_WORDS.search(end.message) or NETWORK_WORDS.search(end.message)
    tells = words or "watchdog" in end.message
    return end.how == "killed" and end.signal == signal.SIGABRT and not tells


def first_cause(ends: Iterable[End]) -> End | None:
    """Return the first cause: the failure that caused the others; None if no rank failed.

    Failures that no other rank can cause come first, then aborts, then network errors. Time decides
    only between equal ones: ranks that wait for a dead rank often fail before the driver notices
    the death.
    """
    failed = sorted(
        (end for end in ends if end.failed), key=lambda end: (_guilt(end), end.at, end.rank)
    )
    first = next(iter(failed), None)
    if first is not None and first.how == "exited":
        # MPI's ranks, and programs that catch the error, may exit with a code before the driver
        # notices what caused it.
        killed = (
            end
            for end in failed
            if end.how == "killed" and not _guilt(end) and end.at - first.at < ECHO_S
        )
        return next(killed, first)
    return min(_together(first, failed), key=lambda end: end.rank) if first is not None else None


def last_words(log: str) -> str:
    """Return why native code aborted, from the end of its log; empty if the log has no reason."""
    found = list(LAST_WORDS.finditer(log))
    if not found:
        return ""
    return with_cuda_error(next(filter(None, found[-1].groups())).strip()[:SAID], log)


def with_cuda_error(message: str, log: str) -> str:
    """Return the message with the last error of CUDA in a rank's log, unless it has one."""
    errors = CUDA_ERROR.findall(log)
    if not errors or "CUDA" in message:
        return message
    return f"{message} (CUDA error: {errors[-1].strip()})"


def disagree(end: End) -> bool:
    """Return whether ranks called different collectives.

    The rank that failed need not be the one that is wrong.
    """
    return end.how in ("raised", "killed") and DISAGREE.search(end.message) is not None


def _together(first: End, ends: Iterable[End]) -> list[End]:
    """Return this end and those with the same cause.

    The ranks of a node are lost together, and reported one by one.
    """
    return [
        end
        for end in ends
        if end is first or (end.how == first.how == "lost" and end.host == first.host)
    ]


def _guilt(end: End) -> int:
    """Return the degree to which another rank may have caused this end.

    0: no other rank causes this. 1: an abort, by its own check or by a watchdog; or a signal in
    MPI_Finalize, which needs the other ranks (MPICH 5 ends by SIGSEGV there if another rank calls
    MPI_Abort). 2: a network error.
    """
    if disagree(end) or BROKEN_GPU.search(end.message) or OWN_KERNEL.search(end.message):
        return 0
    if end.signal == signal.SIGABRT and BAD_HEAP.match(end.message):
        return 0
    if end.how == "ended" or (end.how == "raised" and _lost_peer(end.type, end.message)):
        return 2
    aborted = end.signal == signal.SIGABRT or end.phase == "finalize"
    return int(end.how == "killed" and aborted)


def _lost_peer(type: str, message: str) -> bool:
    """Return whether an exception is one that the death of another rank causes."""
    if type in NETWORK_TYPES or PEER_WORDS.search(message):
        return True
    return type == "RuntimeError" and NETWORK_WORDS.search(message) is not None


def failure_text(ends: Sequence[End]) -> str:
    """Return a text for a person about the first cause and the other failures.

    The first cause has its log and the end of its traceback, the others take a few lines.
    """
    first = first_cause(ends)
    if first is None:
        return ""
    others = [end for end in ends if end.failed and end is not first]
    same = [end for end in others if kind_of(end) == kind_of(first)]
    lines = [f"{where(first)} {describe_end(first)}"]
    lines += [f"  {line}" for line in first.traceback.strip().splitlines()[-TRACEBACK_LINES:]]
    lines += [f"  log: {first.log}"] if first.log else []
    lines += [f"  the same on {_name_ranks(same)}"] if same else []
    lines += _broken_gpus(ends) + _suspects(first, ends)
    lines += _follow_on([end for end in others if end not in same])
    return "\n".join(lines)


def blame_reason(ends: Sequence[End]) -> str:
    """Return why this failure is considered the first cause, in one line."""
    first = first_cause(ends)
    if first is None:
        return ""
    others = [end for end in ends if end.failed and end is not first]
    victims = [end for end in others if _guilt(end) > _guilt(first)]
    if first.how == "hung":
        return (
            "what the ranks were doing when they were silent: " + first.message.partition("\n")[0]
        )
    if first.how == "drained":
        return "the cluster drains its node; nothing has failed"
    if disagree(first):
        return (
            "its collective did not match another rank's; only the job can tell which of the "
            "two is wrong"
        )
    if _follows_another(first, ends):
        done = _finished_before(first, ends)
        known = (
            f"{_name_ranks(done)} had finished before"
            if done
            else "the rank that failed first is not known"
        )
        return f"{known}; all errors are typical of losing a peer"
    if not others:
        return "the only rank that failed; the others were stopped because of it"
    if len(victims) == len(others):
        errors = (
            f"{_name_ranks(victims)}'s error is"
            if len(victims) == 1
            else f"the errors of {_name_ranks(victims)} are"
        )
        return (
            f"{errors} typical of losing a peer; rank {first.rank}'s failure is not caused by "
            "other ranks"
        )
    if len(lost := _together(first, ends)) + len(victims) == len(others) + 1:
        return f"{_name_ranks(lost)} were lost together, with their node or actor on {first.host}"
    rival = min((end for end in others if end not in victims), key=lambda end: (end.at, end.rank))
    if rival.at < first.at:
        return f"rank {rival.rank} exited first, as programs do when a peer is killed"
    rivals = len(others) + 1 - len(victims)
    return (
        f"the first of {rivals} possible causes, {rival.at - first.at:.3f} s before rank "
        f"{rival.rank}"
    )


def failure_event(first: End, ends: Sequence[End], attempt: int) -> kinds.Failure:
    """Return the event of a failure. `attempt`: the number of attempts before it."""
    others = [end for end in ends if end.failed and end is not first]
    return kinds.Failure(
        cause=asdict(first),
        text=failure_text(ends),
        reason=blame_reason(ends),
        reached=max(end.step for end in ends),
        ended=max(end.at for end in ends),
        others=[
            {
                "rank": end.rank,
                "host": end.host,
                "how": end.how,
                "step": end.step,
                "words": short_cause(end),
            }
            for end in others
        ],
        attempt=attempt,
    )


def where(end: End) -> str:
    """Return the rank, its host, and how far it was."""
    doing = f", in {end.phase}" if end.phase and end.phase != "end" else ""
    step = "last heartbeat at step" if end.how == "lost" else "step"
    return f"rank {end.rank} on {end.host}, {step} {end.step}{doing}:"


def describe_end(end: End) -> str:
    """Return how a rank ended, for a person."""
    if end.how == "raised":
        return f"{end.type}: {end.message}" if end.message else end.type
    if end.how == "killed":
        usual = (
            MEANINGS.get(signal.Signals(end.signal), "")
            if end.signal in set(signal.Signals)
            else ""
        )
        meaning = end.why or usual
        return (
            f"killed by {_signal_name(end.signal)}"
            + (f" ({meaning})" if meaning else "")
            + _said(end)
        )
    if end.how == "exited":
        return f"exited with code {end.code}" + _said(end)
    if end.how == "hung":
        return f"hangs: {end.message}"
    if end.how == "ended":
        return "ended by mpirun" + _said(end)
    if end.how == "lost":
        return f"lost: {end.why}" if end.why else "lost: its node or its actor is gone" + _said(end)
    if end.how == "drained":
        return f"left its node: {end.message}"
    return end.how


def short_cause(end: End) -> str:
    """Return how a rank ended, in short, without addresses and numbers.

    Equal ends have equal text.
    """
    if end.how != "raised":
        return describe_end(end).partition(" (")[0].partition("; ")[0]
    first = next(iter(end.message.strip().splitlines()), "")
    # "[…/pair.cc:561] Read error [127.0.0.1]:29062: Connection reset by peer. This is typically …"
    # -> the words between
    plain = (
        re.sub(r"^\[[^\]]*\.cc:\d+\] |\[[\da-fA-F.:]+\]:\d+:? ?", "", first)
        .partition(". ")[0]
        .strip()
        .rstrip(".")
    )
    return (
        f"{end.type}: {plain[:95]}..." if len(plain) > 98 else f"{end.type}: {plain}".rstrip(": ")
    )


def _finished_before(first: End, ends: Iterable[End]) -> list[End]:
    """Return the ranks that had finished when this one failed.

    Other ranks may notice that a rank has finished before its node reports it.
    """
    return [end for end in ends if end.how == "finished" and end.at <= first.at + ECHO_S]


def _broken_gpus(ends: Iterable[End]) -> list[str]:
    """Return the ranks that did not fail, but whose GPU is at fault: others may have waited for
    them."""
    broken = [end for end in ends if end.how == "stopped" and BROKEN_GPU.search(end.message)]
    lines = [f"  stopped: {where(end)} {end.message}" for end in broken[:3]]
    return lines + ([f"  ... and {len(broken) - 3} more"] if len(broken) > 3 else [])


def _follows_another(first: End, ends: Sequence[End]) -> bool:
    """Return whether the first cause itself probably follows from what another rank did."""
    others = any(end.failed and end is not first for end in ends)
    return is_victim(first) and (others or not aborted_alone(first))


def _suspects(first: End, ends: Sequence[End]) -> list[str]:
    """Return the ranks that the first cause may have waited for, if it is only a victim."""
    if not _follows_another(first, ends):
        return []
    done = _finished_before(first, ends)
    behind = [end for end in ends if end.how == "stopped" and end.step <= first.step]
    lines = (
        [f"  {_name_ranks(done)} had finished before: did the job return early there?"]
        if done
        else []
    )
    for end in behind[:3]:
        lines.append(f"  still running, perhaps waited for: {where(end).rstrip(':')}")
    return lines + ([f"  ... and {len(behind) - 3} more"] if len(behind) > 3 else [])


def _follow_on(others: Sequence[End]) -> list[str]:
    """Return one line for each kind of end."""
    kinds: dict[str, list[End]] = {}
    for end in others:
        kinds.setdefault(short_cause(end), []).append(end)
    return [f"  follow-on: {_name_ranks(ends)}: {words}" for words, ends in kinds.items()]


def kind_of(end: End) -> tuple[str, int, int, str, str]:
    """Return a key that is equal for equal ends, ignoring numbers in the message."""
    # A rank that raised exits with code 1, or is killed before that because another rank failed.
    code, number = (0, 0) if end.how == "raised" else (end.code, end.signal)
    return end.how, code, number, end.type, re.sub(r"0x[0-9a-f]+|\d+", "#", end.message)


def _name_ranks(ends: Sequence[End]) -> str:
    return name_ranks(end.rank for end in ends)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _said(end: End) -> str:
    return f"; {end.message.strip()}" if end.message else ""
