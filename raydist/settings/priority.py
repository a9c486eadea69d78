"""`queue.priority` as a number. (pure)"""

from __future__ import annotations

import re

from raydist.shared.errors import ConfigError

PRIORITIES = {"high": 100, "normal": 0, "low": -100}


def priority_of(text: str) -> int:
    """Return the priority that a text names. ConfigError: it names none."""
    if text in PRIORITIES:
        return PRIORITIES[text]
    if re.fullmatch(r"[+-]?\d{1,6}", text):
        return int(text)
    cause = "must be high, normal, low, or a whole number"
    raise ConfigError.of("queue.priority", text, cause, "queue.priority=high")
