"""Where the wall time of a command went, from the start of its process to its end. (driver)"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from raydist.shared import kinds
from raydist.shared.events import read_events
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS

LAST_LAUNCH = ("rendezvous", "warm-up")
"""The last phase of a launch; without a rendezvous it is the one before it."""


def time_line(folder: Path, entered: float) -> str:
    """Return one line with the parts of this process's wall time up to now, and their sum.

    `folder`: the run folder. `entered`: when main() was called, in seconds since the epoch.
    """
    events: list[Event] = []
    with contextlib.suppress(OSError, json.JSONDecodeError):
        events = list(read_events(folder / EVENTS))
    began, now = process_began(), time.time()
    shown = " + ".join(
        f"{name} {seconds:.2f}" for name, seconds in split(events, began, entered, now)
    )
    return f"time  {shown} = {now - began:.2f} s"


def process_began() -> float:
    """Return when this process was started, in seconds since the epoch; from proc_pid_stat(5).

    psutil adds the time of the machine's boot, which the kernel reports in whole seconds.
    """
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def split(
    events: Iterable[Event], began: float, entered: float, now: float
) -> list[tuple[str, float]]:
    """Return the parts of the time from `began` to `now`, in order and without gaps.

    Each is (purpose, seconds). python: the interpreter. settings: imports, composing, checks.
    launch: until the ranks have met. ranks: until the last one has ended. records: until the result
    is written. exit: the rest. A run that ended early has fewer parts. All times are in seconds
    since the epoch.
    """
    marks = {"python": entered}
    for event in events:
        match event:
            case kinds.Run():
                marks["settings"] = event.t
            case kinds.Phase() if event.name in LAST_LAUNCH:
                marks["launch"] = event.t
            case kinds.Ended():
                marks["ranks"] = event.t
            case kinds.Result():
                marks["records"] = event.t
    marks["exit"] = now
    parts, since = [], began
    for name, at in marks.items():
        parts.append((name, max(0.0, at - since)))
        since = max(since, at)
    return parts
