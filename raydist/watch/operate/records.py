"""What a command leaves in the run folder: a file with its answer, and an event. (driver)"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from raydist.shared import kinds
from raydist.shared.events import Events, parse_event
from raydist.shared.kinds import Event

FOLDER = "operate"
"""The folder of the answers, in the run folder."""
LOOK_S = 0.1
"""Seconds between two reads of the file of events."""


def new_file(folder: Path, name: str, suffix: str) -> Path:
    """Make an empty file for an answer: `operate/stacks-2026-11-25_23-10-11.txt`.

    Two commands of the same second get different ones. OSError: it can't be made.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    (folder / FOLDER).mkdir(exist_ok=True)
    for number in itertools.count(1):
        more = f"-{number}" if number > 1 else ""
        path = folder / FOLDER / f"{name}-{stamp}{more}{suffix}"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    return path


def write_answer(folder: Path, events: Events, name: str, lines: Iterable[str]) -> str:
    """Write an answer to a new file; return its path in the run folder, or "" if the disk is full.

    A disk that is full must not keep a person from the answer.
    """
    try:
        path = new_file(folder, name, ".txt")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        events.warn(f"the answer of raydist {name} is not in the run folder ({error.strerror})")
        return ""
    return str(path.relative_to(folder))


def record(
    events: Events, command: str, text: str, ranks: Sequence[int] = (), file: str = ""
) -> None:
    """Add the event of a command."""
    events.add(kinds.Operated(command=command, text=text, ranks=tuple(ranks), file=file))


def follow_events(
    path: Path, after: int, within_s: float = math.inf, ended: threading.Event | None = None
) -> Iterator[Event]:
    """Yield the events of a run as they are written, for some seconds.

    `after`: the size of the file before the first one. `ended`: set when no further ones follow.
    """
    until, rest = time.monotonic() + within_s, b""
    ended = ended or threading.Event()
    with path.open("rb") as file:
        file.seek(after)
        last = False
        while time.monotonic() < until and not last:
            last = ended.is_set()
            *lines, rest = (rest + file.read()).split(b"\n")
            yield from filter(None, map(parse_event, lines))
            ended.wait(LOOK_S)
