"""Has ranks do something after the same step, without stopping. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from raydist.launch.limits import longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import DoAfter, HoldForAction, Holding, ReleaseFromAction
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.rank_names import name_ranks

REPLY_S = 10.0
"""Limit on the wait for the steps of all ranks. They come from a thread of each rank, so within
milliseconds, unless C code holds the GIL or the rank is stopped."""
OUTSIDE = {
    "save": (
        "raydist save: the program is not in raydist.fit, and nobody else knows its state; it "
        "saves by raydist.checkpoint.save or by itself"
    ),
    "set": "raydist set: the program is not in raydist.fit, which takes the new values",
    "profile": (
        "raydist profile: the program has made no step yet that raydist sees: it counts the steps "
        "of torch's optimizers (outside of torch.compile) and of raydist.fit; type seconds=2"
    ),
}
"""Why a program without steps of raydist can't do it."""
_one_at_a_time = threading.Lock()


def agree_on_step(
    group: WorkerGroup,
    what: str,
    values: Mapping[str, Any],
    ranks: Sequence[int],
    noted: Callable[[Holding], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> int:
    """Have these ranks do this after a common step; return that step.

    `noted`: notes the common step; the ranks learn of it inside the block.

    ConfigError: the program has no such steps. LaunchError: a rank does not answer, or they are in
    different loops; all continue.
    """
    with _one_at_a_time:
        calls = [group.call(rank, HoldForAction()) for rank in ranks]
        wait(calls, timeout=longest(REPLY_S, len(calls)))
        held = [
            call.result() if call.done() and call.exception() is None else None for call in calls
        ]
        replies = [each for each in held if each is not None]
        agreed = False
        try:
            if len(replies) == len(held) and (last := common_step(what, replies)) is not None:
                with noted(last):
                    for rank in ranks:
                        group.call(rank, DoAfter(last.step, what, values, last.fit))
                agreed = True
                return last.step
        finally:
            if not agreed:
                for rank in ranks:
                    group.call(rank, ReleaseFromAction())
    if silent := [rank for rank, each in zip(ranks, held, strict=True) if each is None]:
        raise LaunchError(no_answer(silent))
    if len({each.fit for each in replies}) > 1:
        raise LaunchError("the ranks are at the beginning or end of raydist.fit; type it again")
    raise ConfigError(OUTSIDE[what])


def common_step(what: str, replies: Sequence[Holding]) -> Holding | None:
    """Return the reply with the step after which all can do this; None: there is none."""
    last = max(replies, key=lambda each: each.step)
    same = all(each.fit == last.fit for each in replies)
    # The reply is the next step: 1 if there was none.
    counted = what == "profile" and all(each.step > 1 for each in replies)
    return last if same and (last.fit or counted) else None


def no_answer(ranks: Sequence[int]) -> str:
    """Return the sentence about ranks that do not answer."""
    verb = "does" if len(ranks) == 1 else "do"
    return f"{name_ranks(ranks)} {verb} not answer; raydist stacks says why"
