"""The report of a rank's end, and the driver's records of the attempt -> how it ended. (pure)"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from raydist.cluster.drain import DrainNotice
from raydist.messages.agent import RankEnd
from raydist.recovery.blame import is_victim, last_words, with_cuda_error
from raydist.recovery.hang_verdict import ConfirmedHang
from raydist.recovery.stall import Beat
from raydist.shared import kinds
from raydist.shared.errors import Stopped, cause_of, last_line, out_of_memory
from raydist.shared.outcome import End

NCCLS = "DistBackendError"
"""The type of the exception for an error of NCCL, whatever caused it."""


@dataclass(frozen=True)
class RankRecord:
    """What the driver knows of one rank before its end is reported."""

    rank: int
    host: str
    log: str = ""
    """The path of the rank's log on the driver's machine."""
    raised: kinds.Raised | None = None
    """The rank's event `raised`, if its job raised an exception."""


@dataclass(frozen=True)
class AttemptRecord:
    """What the driver knows of a whole attempt."""

    stopped: Stopped | None = None
    """The signal to the driver that stopped the run."""
    hang: ConfirmedHang | None = None
    """The hang for which the ranks were stopped."""
    drain: DrainNotice | None = None
    """The nodes that the cluster is about to take away."""
    resize: str = ""
    """Why the ranks were stopped to change the number of nodes, for a person; empty if they were
    not."""
    makes_way: str = ""
    """For which run the ranks were stopped, for a person; empty for none."""
    program: bool = False
    """Whether the ranks run a program (script=)."""


def classify_end(
    report: RankEnd, rank: RankRecord, attempt: AttemptRecord, log_tail: str = ""
) -> End:
    """Determine how a rank whose process has exited ended. The first rule that applies decides.

    `log_tail`: the last bytes of the rank's log, if that may tell more than its error.
    """
    end = End(
        rank=rank.rank,
        host=rank.host,
        how="finished",
        at=report.at,
        step=report.step,
        phase=report.phase,
        code=report.code,
        signal=report.signal,
        log=rank.log,
        message=report.lost,
        why=report.why,
        oom=report.oom,
        why_not_kept=report.why_not_kept,
    )
    if report.kept:
        return replace(end, how="stopped", kept=True)
    drain = attempt.drain
    if drain and report.stop_requested and attempt.stopped is None:
        return _drained(end, drain)
    continues = attempt.makes_way or (attempt.resize and attempt.program)
    if continues and report.stop_requested and attempt.stopped is None:
        # Its error, if it has one, came with the stop. A job that ends well was just finished; a
        # program may end well on SIGTERM wherever it is, as one that saves its state then.
        finished = not (end.signal or end.code or attempt.program)
        return end if finished else replace(end, how="stopped")
    hang = attempt.hang if attempt.stopped is None else None
    error = _raised(end, report, rank)
    if error:
        error = replace(error, message=with_cuda_error(error.message, log_tail))
        error = _with_gpu_report(error, report)
    # The last ranks of a stop or of a hang lose their peers: such an error did not end them.
    if error and not (is_victim(error) and _follows(error, attempt)):
        return error
    if error and attempt.stopped:
        # Also if the error came before the rank's own stop.
        return replace(end, how="stopped")
    if hang and hang.blames(end.rank):
        return _hung(end, hang)
    if report.stop_requested and (end.signal or end.code):
        return replace(_with_gpu_report(end, report), how="stopped")
    if report.by_mpirun:
        return replace(end, how="ended")
    if end.signal == signal.SIGABRT and not end.message:
        end = replace(end, message=last_words(log_tail))
    end = _with_gpu_report(end, report)
    if rank.raised and rank.raised.code:  # it was exiting when the others were ended
        return replace(
            end,
            how="exited",
            at=rank.raised.t,
            step=rank.raised.step,
            code=rank.raised.code,
            signal=0,
        )
    return replace(end, how="killed" if end.signal else "exited" if end.code else "finished")


def _with_gpu_report(end: End, report: RankEnd) -> End:
    """Add what NVML reported about the rank's GPU to the message: CUDA's errors do not have it."""
    if not report.gpu_report:
        return end
    return replace(end, message="; ".join(filter(None, [end.message, report.gpu_report])))


def _follows(error: End, attempt: AttemptRecord) -> bool:
    """Return whether a rank raised its error after the signal or the hang that ended them all."""
    if attempt.stopped is not None:
        return error.at >= attempt.stopped.at
    return attempt.hang is not None and error.at >= attempt.hang.since


def _raised(end: End, report: RankEnd, rank: RankRecord) -> End | None:
    """Return the exception that ended a rank; None if there is none, or it called `sys.exit`.

    It was reported, or is in the rank's error file.
    """
    if rank.raised and not rank.raised.code:
        raised = rank.raised
        return replace(
            end,
            how="raised",
            at=raised.t,
            type=raised.type,
            message=raised.message,
            traceback=raised.traceback,
            step=raised.step,
        )
    if end.code and report.error is not None:
        return replace(end, how="raised", **vars(report.error))
    return None


def _drained(end: End, drain: DrainNotice) -> End:
    """Return the end of a rank that left in time.

    Either its own node is drained, or other ranks' nodes are.
    """
    if end.rank in drain.ranks:
        return replace(end, how="drained", message=drain.text, preempted=True)
    return replace(end, how="stopped")


def _hung(end: End, hang: ConfirmedHang) -> End:
    found = hang.diagnosis
    return replace(
        end,
        how="hung",
        at=hang.since,
        message=found.text,
        traceback=found.stack_of(end.rank),
        notes=found.notes,
    )


def log_tells_more(report: RankEnd, raised: kinds.Raised | None) -> bool:
    """Return whether the end of a rank's log may have the reason for which it ended."""
    return report.signal == signal.SIGABRT or (raised is not None and raised.type == NCCLS)


def classify_lost(
    rank: RankRecord, beat: Beat, at: float, error: BaseException | None = None, cut: str = ""
) -> End:
    """Return the end of a rank whose agent is lost; its last heartbeat has the step and the phase.

    `error`: the error of the call to the agent; None if the agent did not answer in time. `cut`:
    who does not reach its node; empty if that is unknown.
    """
    step, phase, _ = beat
    end = End(rank.rank, rank.host, "lost", at, step, phase, log=rank.log)
    if cut:
        return replace(end, why=cut, silent=True)
    if error is None:
        return replace(end, message="its agent stopped responding", silent=True)
    why = out_of_memory(error)
    preempted = bool(getattr(cause_of(error), "preempted", False))  # set by Ray's ActorDiedError
    return replace(
        end, message=last_line(error), why=why, oom="ray" if why else "", preempted=preempted
    )


def classify_stuck(rank: RankRecord, beat: Beat, at: float, within_s: float) -> End:
    """Return the end of a rank whose process does not end, although its agent answers."""
    step, phase, _ = beat
    why = (
        f"its process did not end within {within_s:.0f} s of SIGKILL, as one that waits for a "
        "disk or a GPU that does "
        "not answer; see dmesg on its node"
    )
    return End(rank.rank, rank.host, "lost", at, step, phase, log=rank.log, why=why, stuck=True)


def lost_at(
    host: str, ends: Iterable[End], answered: float | None, now: float, interval: float, alone: bool
) -> float:
    """Return when a rank was lost, in seconds since the epoch.

    Ray reports a node that is cut off only seconds later. `answered`: when its agent last answered;
    None if it never did. `interval`: seconds between two answers. `alone`: whether no other rank
    has failed so far. If one has, an overdue answer must not make this rank the first cause.
    """
    for end in ends:
        if end.how == "lost" and end.host == host:  # all ranks of a node are lost at once
            return end.at
    return answered if alone and answered is not None and now - answered > 2 * interval else now
