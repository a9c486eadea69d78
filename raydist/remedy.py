"""How a rank ended -> what a person may do about it. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from raydist.blame import End, disagree, is_victim

RULES: tuple[tuple[Callable[[End], bool], str], ...] = (
    (
        lambda end: end.oom and "Ray's memory monitor" in end.why,
        "the node ran low on memory: give ranks fewer loader workers (data.workers), a smaller data.batch_size, or "
        "more memory (scale.resources, larger nodes); Ray's limit is RAY_memory_usage_threshold where Ray is started",
    ),
    (
        lambda end: end.oom,
        "the ranks need less memory (data.batch_size, data.workers, snapshot.every=0), or their node, container or "
        "cgroup more",
    ),
    (
        lambda end: end.type == "OutOfMemoryError" or "CUDA out of memory" in end.message,
        "a smaller data.batch_size with train.accumulate, train.precision=bf16, or GPUs with more memory",
    ),
    (
        lambda end: end.signal == signal.SIGBUS or "bus error" in end.message.lower(),
        "make /dev/shm larger (docker run --shm-size, an emptyDir of medium Memory), or data.workers=0",
    ),
    (
        lambda end: bool(re.search(r"No space left on device", end.message)),
        "make room on the disk, fewer checkpoints (checkpoint.keep, checkpoint.every), or another hydra.run.dir",
    ),
    (
        lambda end: end.how == "drained" or end.preempted,
        "nothing, if another node came: the run goes on there",
    ),
    (
        lambda end: end.how == "lost",
        "see whether the node is up, and what its own log and Ray's (`ray logs`) say; scale.wait_s is how long another "
        "is waited for",
    ),
    (
        lambda end: end.how == "hung" and "SIGSTOP" in end.message,
        "find out who stops it: a debugger, a batch system that suspends jobs, somebody's kill -STOP",
    ),
    (
        lambda end: end.how == "hung",
        "compare the stacks of the ranks, beside their logs: a collective that only some ranks reach hangs all of them",
    ),
    (
        lambda end: end.type in ("ConfigError", "LaunchError"),
        "mend what the message says: another attempt would meet it again",
    ),
    (
        disagree,
        "compare what the ranks do at that step: all have to call the same collectives, in one order, with tensors of "
        "the same shape; branches on the rank, and a smaller last batch on one of them, are the usual reasons",
    ),
    (
        is_victim,
        "look at the logs of ranks that are not named here, and at the network: python -m raydist.tools.doctor",
    ),
    (
        lambda end: (
            end.how == "killed" and end.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
        ),
        "the end of the rank's log shows where native code was; env.TORCH_SHOW_CPP_STACKTRACES=1 shows more",
    ),
    (
        lambda end: end.how == "killed" and end.signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT),
        "ask who ends processes on that node: a person, a batch system's limit, a container that was stopped",
    ),
    (
        lambda end: end.how in ("raised", "exited"),
        "mend the job at the last line shown; with group=inline scale=1x1 it runs in one process, where pdb works",
    ),
)


def remedy(end: End) -> str:
    """What to do about it, in one line; empty where nothing is known."""
    return next((words for fits, words in RULES if fits(end)), "")
