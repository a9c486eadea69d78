"""A duration as people type it, such as 4h or 1h30m, in seconds. (pure)"""

from __future__ import annotations

import re

from raydist.shared.errors import ConfigError

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
FORM = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in UNITS))


def seconds_of(setting: str, text: str) -> float:
    """Return the seconds of a duration: `90` (seconds), `30m`, `1h30m`, `2d`.

    ConfigError: it is none; `setting` is the name for the message.
    """
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = FORM.fullmatch(text)
    if not text or parts is None:
        cause = "must be a duration: seconds, or a number with d, h, m or s"
        raise ConfigError.of(setting, text, cause, f"{setting}=4h")
    return sum(
        float(number) * size
        for number, size in zip(parts.groups(), UNITS.values(), strict=True)
        if number
    )
