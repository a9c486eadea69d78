"""Has all ranks of a raydist.fit do something after the same step, without stopping. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

from raydist.launch.limits import longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import DoAfter, HoldForAction, ReleaseFromAction
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.rank_names import name_ranks

REPLY_S = 10.0
"""Limit on the wait for the steps of all ranks. They come from a thread of each rank, so within
milliseconds, unless C code holds the GIL or the rank is stopped."""
_one_at_a_time = threading.Lock()


def agree_on_step(group: WorkerGroup, what: str, values: Mapping[str, Any]) -> int:
    """Have all ranks do this after a common step; return that step.

    ConfigError: the program is not in raydist.fit. LaunchError: a rank does not answer; all
    continue.
    """
    ranks = range(group.plan.world_size)
    with _one_at_a_time:
        calls = [group.call(rank, HoldForAction()) for rank in ranks]
        wait(calls, timeout=longest(REPLY_S, len(calls)))
        steps = [
            call.result() if call.done() and call.exception() is None else None for call in calls
        ]
        held = [step for step in steps if step is not None and step >= 0]
        if len(held) == len(steps):
            for rank in ranks:
                group.call(rank, DoAfter(max(held), what, values))
            return max(held)
        for rank in ranks:
            group.call(rank, ReleaseFromAction())
    silent = [rank for rank, step in enumerate(steps) if step is None]
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        raise LaunchError(f"{name_ranks(silent)} {verb} not answer; raydist stacks says why")
    raise ConfigError(
        f"raydist {what}: the program is not in raydist.fit, and nobody else knows its state; it "
        "saves by raydist.checkpoint.save or by itself"
    )
