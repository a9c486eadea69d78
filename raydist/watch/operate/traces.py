"""The traces of ranks -> one file for Perfetto: a row for each rank, on one clock. (driver)

It runs in a separate process: a trace may have millions of events, and the driver must continue.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raydist.messages.profile import MARKS, Marks

LIST = "parts.json"
"""The file of the folder that lists the parts."""
EACH = 1000
"""Process ids of a trace for each rank: 1 for its CPU, from 2 on for its GPUs."""
EARLY_US = 1.0
"""Tolerance for events at the beginning."""


class Part(NamedTuple):
    """The trace of one rank."""

    rank: int
    host: str
    file: str
    """In the folder of LIST."""
    lead_s: float
    """The lead of its node's clock over the driver's."""


class Window(NamedTuple):
    """The time of the steps in a trace, in its own microseconds."""

    begin: float
    end: float


def join_traces(folder: Path, out: Path) -> None:
    """Write the parts of a folder as one trace."""
    parts = [Part(*each) for each in json.loads((folder / LIST).read_text(encoding="utf-8"))]
    zero: float | None = None
    partial = folder / out.name
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=6) as file:
        for number, part in enumerate(parts):
            with gzip.open(folder / part.file, "rt", encoding="utf-8") as packed:
                trace = json.load(packed)
            marks = Marks(*trace[MARKS])
            base_ns = trace.get("baseTimeNanoseconds", 0)
            began_us = marks.began_ns / 1e3 - part.lead_s * 1e6
            if zero is None:
                zero = began_us
                head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": int(zero * 1e3)}
                file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            shift = base_ns / 1e3 - part.lead_s * 1e6 - zero
            window = Window((marks.began_ns - base_ns) / 1e3, (marks.ends_ns[-1] - base_ns) / 1e3)
            events = [
                *placed(within(trace["traceEvents"], window), part, marks.pid, shift),
                *steps(marks, part, zero),
            ]
            file.write(",\n" if number else "")
            file.write(",\n".join(json.dumps(each) for each in events))
        file.write("\n]}\n")
    os.replace(partial, out)


def within(events: Iterable[Mapping[str, Any]], window: Window) -> Iterator[Mapping[str, Any]]:
    """Return the events of the steps: those that begin in the window, and their work on a GPU.

    A GPU is behind its host, so what it does is known by the number of the call that caused it.
    """
    events = [each for each in events if isinstance(each.get("ts"), int | float)]
    calls = {
        number
        for each in events
        if (number := correlation(each)) is not None and not on_gpu(each) and inside(each, window)
    }
    for each in events:
        number = correlation(each)
        if each.get("ph") == "M" or inside(each, window):
            if not (on_gpu(each) and number is not None and number not in calls):
                yield each
        elif on_gpu(each) and number in calls:
            yield each


def inside(event: Mapping[str, Any], window: Window) -> bool:
    """Report whether an event begins in the window."""
    return bool(window.begin - EARLY_US <= event["ts"] <= window.end)


def on_gpu(event: Mapping[str, Any]) -> bool:
    """Report whether an event is that of a GPU; flows end where the GPU begins."""
    return event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation") or (
        event.get("cat") == "ac2g" and event.get("ph") == "f"
    )


def correlation(event: Mapping[str, Any]) -> int | None:
    """Return the number that a call of CUDA shares with the work that it starts; None: none."""
    number = event.get("args", {}).get("correlation")
    return event.get("id") if number is None and event.get("cat") == "ac2g" else number


def placed(
    events: Iterable[Mapping[str, Any]], part: Part, own: int, shift_us: float
) -> Iterator[Mapping[str, Any]]:
    """Return the events of a rank with times and process ids of the whole file.

    `own`: the id of the rank's process. Other ids are numbers of GPUs.
    """
    seen = set[int]()
    for event in events:
        pid = event.get("pid")
        if event.get("ph") == "M" and str(event.get("name")).startswith("process"):
            continue
        if not isinstance(pid, int):  # kineto's own marks
            continue
        device = pid if on_gpu(event) or pid != own else -1
        new = process_id(part.rank, device)
        if new not in seen and event.get("ph") != "M":
            seen.add(new)
            name = f"rank {part.rank} · {part.host}" + (f" · GPU {device}" if device >= 0 else "")
            yield named("process_name", new, {"name": name})
            yield named("process_sort_index", new, {"sort_index": new})
        changed = {"pid": new, "ts": event["ts"] + shift_us}
        if "id" in event:  # of a flow
            changed["id"] = f"{part.rank}.{event['id']}"
        yield {**event, **changed}


def process_id(rank: int, device: int) -> int:
    """Return the process id of a rank's CPU (device -1) or of one of its GPUs."""
    return rank * EACH + 2 + device


def steps(marks: Marks, part: Part, zero_us: float) -> Iterator[Mapping[str, Any]]:
    """Return a row with the steps of a rank."""
    if not marks.first:
        return
    pid = process_id(part.rank, -1)
    yield named("thread_name", pid, {"name": "steps"})
    yield named("thread_sort_index", pid, {"sort_index": -1})
    began = marks.began_ns
    for number, end in enumerate(marks.ends_ns, marks.first):
        yield {
            "ph": "X",
            "name": f"step {number}",
            "cat": "step",
            "pid": pid,
            "tid": 0,
            "ts": began / 1e3 - part.lead_s * 1e6 - zero_us,
            "dur": (end - began) / 1e3,
        }
        began = end


def named(kind: str, pid: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an event that names a row."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "ts": 0, "args": arguments}


def main(arguments: Sequence[str]) -> int:
    """Join the traces of a folder into a file."""
    folder, out = map(Path, arguments)
    join_traces(folder, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
