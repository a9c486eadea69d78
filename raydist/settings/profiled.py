"""The steps that `watch.profile=100..105` names. (pure)"""

from __future__ import annotations

import re

from raydist.shared.errors import ConfigError

MAX_STEPS = 1000
"""A profile has megabytes for each rank and second."""


def steps_to_profile(text: str) -> tuple[int, int] | None:
    """Return the first and the last step; None for an empty text. ConfigError: a wrong text."""
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if found is None:
        why = "must be the first and the last step"
    elif first < 2:
        why = "step 1 loads and compiles, and is not profiled"
    elif last < first:
        why = "the last step is before the first"
    elif last - first >= MAX_STEPS:
        why = f"at most {MAX_STEPS} steps are profiled"
    else:
        return first, last
    example = f"{max(2, first)}..{max(2, first) + 5}" if found else "100..105"
    raise ConfigError.of("watch.profile", text, why, f"watch.profile={example}")
