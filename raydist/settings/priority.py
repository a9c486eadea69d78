"""`queue.priority` as a number. (pure)"""

from __future__ import annotations

import re

from raydist.shared.errors import ConfigError

PRIORITIES = {"high": 100, "normal": 0, "low": -100}


def priority_of(text: str, name: str = "queue.priority", example: str = "") -> int:
    """Return the priority that a text names.

    ConfigError: it names none; `name`, `example`: how the message calls it, and what to type.
    """
    if text in PRIORITIES:
        return PRIORITIES[text]
    if re.fullmatch(r"[+-]?\d{1,6}", text):
        return int(text)
    cause = "must be high, normal, low, or a whole number"
    raise ConfigError.of(name, text, cause, example or f"{name}=high")
