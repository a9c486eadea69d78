"""What a page has of a run's files besides its events: sizes of checkpoints, the trace. (driver)"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from raydist.reporting.trace import trace_of
from raydist.shared.events import read_events
from raydist.shared.record_names import EVENTS
from raydist.state.write import file_sizes

TRACED = 1 << 28
"""Maximum bytes of events of which the page makes a trace."""


def checkpoint_sizes(paths: Iterable[str]) -> dict[str, int]:
    """Return the bytes of each checkpoint that is on this machine."""
    sizes = {
        path: sum(file_sizes(Path(path)).values()) for path in paths if Path(path).is_absolute()
    }
    return {path: size for path, size in sizes.items() if size}


def trace_text(folder: Path) -> str:
    """Return the trace of a run, for Perfetto. ValueError: its events are too long."""
    path = folder / EVENTS
    if path.stat().st_size > TRACED:
        raise ValueError("the events are too long for a link: raydist watch RUN --trace FILE.json")
    return json.dumps(trace_of(read_events(path)))
