"""How a rank ended -> advice for the user. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from raydist.recovery.blame import aborted_alone, disagree, is_victim
from raydist.shared.outcome import BROKEN_GPU, End

RULES: tuple[tuple[Callable[[End], bool], str], ...] = (
    (
        lambda end: end.oom == "ray",
        "the node ran low on memory: set a smaller data.workers or data.batch_size, or give the "
        "ranks more memory "
        "(scale.resources, larger nodes); Ray's limit is RAY_memory_usage_threshold where Ray is "
        "started",
    ),
    (
        lambda end: end.oom == "kernel",
        "reduce the memory of the ranks (data.batch_size, data.workers, snapshot.every=0), or "
        "raise the limit of their "
        "node, container or cgroup",
    ),
    (
        lambda end: end.type == "OutOfMemoryError" or "CUDA out of memory" in end.message,
        "set a smaller data.batch_size with train.accumulate, or train.precision=bf16, or use "
        "GPUs with more memory",
    ),
    (
        lambda end: (
            end.signal == signal.SIGBUS
            or "bus error" in end.message.lower()
            or re.search(
                r"(shared memory|/dev/shm|</torch_).*No space left", end.message, re.DOTALL
            )
            is not None
        ),
        "make /dev/shm larger (docker run --shm-size, an emptyDir of medium Memory), or set "
        "data.workers=0",
    ),
    (
        lambda end: "No space left on device" in end.message,
        "free space on the disk, keep fewer checkpoints (checkpoint.keep, checkpoint.every), or "
        "set another "
        "hydra.run.dir",
    ),
    (
        lambda end: "File too large" in end.message,
        "raise the limit on the size of files, ulimit -f, above that of a checkpoint",
    ),
    (
        lambda end: end.how == "drained" or end.preempted,
        "nothing, if Ray found another node: the run continues there",
    ),
    (
        lambda end: end.how == "lost",
        "check whether the node is up, and read its log and Ray's (`ray logs`); scale.wait_s "
        "limits the wait for another node",
    ),
    (
        lambda end: end.how == "hung" and "SIGSTOP" in end.message,
        "find the process that stops it: a debugger, a batch system that suspends jobs, a kill "
        "-STOP",
    ),
    (
        lambda end: bool(BROKEN_GPU.search(end.message)),
        "look at that GPU on its node: nvidia-smi -q -d ECC,ROW_REMAPPER, and dmesg for the Xid; "
        "reset it, or leave the node out",
    ),
    (
        lambda end: end.how == "hung",
        "compare the stacks of the ranks, next to their logs: a collective that only some ranks "
        "reach hangs all of them",
    ),
    (
        lambda end: end.type in ("ConfigError", "LaunchError"),
        "correct the setting that the message names: another attempt would fail in the same way",
    ),
    (
        disagree,
        "compare the code of the ranks at that step: all must call the same collectives in the "
        "same order, with "
        "tensors of the same shape; usual causes are branches on the rank, and a smaller last "
        "batch on one rank",
    ),
    (
        lambda end: is_victim(end) and not aborted_alone(end),
        "read the logs of ranks that are not named here, and test the network: raydist doctor",
    ),
    (
        lambda end: (
            end.how == "killed"
            and end.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
        ),
        "read the end of the rank's log for the native stack; env.TORCH_SHOW_CPP_STACKTRACES=1 "
        "shows more",
    ),
    (
        lambda end: (
            end.how == "killed" and end.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
        ),
        "find out what ends processes on that node: a person, a batch system's limit, a "
        "container that was stopped",
    ),
    (
        lambda end: end.how in ("raised", "exited"),
        "correct the job at the last line shown; group=inline scale=1x1 runs it in one process, "
        "where pdb works",
    ),
)
"""(test of a rank's end, advice). The first test that is true decides."""


def advice_for(end: End) -> str:
    """Return the advice for the end of a rank, in one line; empty if raydist has none."""
    return next((advice for fits, advice in RULES if fits(end)), "")


def refuses_checkpoint(end: End) -> bool:
    """Return whether a rank failed because `resume=` names what this job cannot continue from."""
    return end.type == "ConfigError" and end.message.startswith("resume=")
