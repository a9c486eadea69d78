"""One request to the agent of each rank, all at once. (driver)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from raydist.cluster.placement import Slot
from raydist.launch.limits import longest
from raydist.messages.request import Request, Transport
from raydist.shared.errors import (
    NO_MORE_PROCESSES,
    CallLost,
    ConfigError,
    LaunchError,
    is_refusal,
    last_line,
)

Reply = TypeVar("Reply")
LATE_S = 30.0
"""Seconds after which a person is told which agent has not answered yet."""


def call_each(
    call: Transport,
    slots: Sequence[Slot],
    requests: Sequence[Request[Reply]],
    limit_s: float,
    on_late: Callable[[str], None],
) -> list[Reply]:
    """Send one request to the agent of each slot, and return the replies in order.

    All requests are sent at once. `on_late`: is told once which agents have not answered after
    LATE_S. Raises LaunchError, with the first rank whose agent failed or did not reply within
    `limit_s` seconds; its `lost` are the ranks whose calls failed. Hundreds of ranks get a little
    more time.
    """
    futures = [call(slot.rank, request) for slot, request in zip(slots, requests, strict=True)]
    within = longest(limit_s, len(futures))
    done, late = wait(futures, timeout=min(within, LATE_S), return_when="FIRST_EXCEPTION")
    if late and within > LATE_S and not any(future.exception() for future in done):
        on_late(no_answer_text(slots, futures, requests[0], LATE_S))
        wait(futures, timeout=within - LATE_S, return_when="FIRST_EXCEPTION")
    for slot, future in zip(slots, futures, strict=True):
        if future.done() and (error := future.exception()) is not None:
            why = NO_MORE_PROCESSES if is_refusal(error) else last_line(error)
            text = f"rank {slot.rank} on {slot.node.host} ({slot.node.ip}): {why}"
            if isinstance(error, ConfigError):
                raise ConfigError(text) from error
            raise LaunchError(text, lost=ranks_without_answer(slots, futures)) from error
    if not all(future.done() for future in futures):
        raise LaunchError(no_answer_text(slots, futures, requests[0], within))
    return [future.result() for future in futures]


def no_answer_text(
    slots: Sequence[Slot], futures: Sequence[Future[Any]], request: Request[Any], seconds: float
) -> str:
    """Describe which agents have not answered a request for so long."""
    silent = [slot for slot, future in zip(slots, futures, strict=True) if not future.done()]
    return (
        f"{len(silent)} of {len(futures)} agents did not answer {type(request).__name__} within "
        f"{seconds:.3g} s; the first is rank {silent[0].rank} on {silent[0].node.host} "
        f"({silent[0].node.ip})"
    )


def ranks_without_answer(slots: Sequence[Slot], futures: Sequence[Future[Any]]) -> tuple[int, ...]:
    """Return the ranks whose calls have failed, without an answer of the agent."""
    return tuple(
        slot.rank
        for slot, future in zip(slots, futures, strict=True)
        if future.done() and isinstance(future.exception(), CallLost)
    )
