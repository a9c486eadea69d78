"""Waiting for a condition in a test."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "the condition",
    timeout: float = 90.0,
) -> None:
    """Return once the condition is true; fail if it is still false after `timeout` seconds.

    `what` describes the condition in the failure; a function is called then.
    """
    began = time.monotonic()
    deadline = began + timeout
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(
                f"not within {timeout:g} s: {what if isinstance(what, str) else what()}"
            )
        # A condition that starts a command must not take the CPUs from what it waits for.
        time.sleep(min(max(0.02, 9 * (now - began)), 2.0))
        began = time.monotonic()
