"""Traces of ranks become one file: the steps only, on one clock, a row for each rank and GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from raydist.messages.profile import MARKS, Marks
from raydist.watch.operate.traces import LIST, Part, join_traces

SECOND = 1_000_000_000
KERNEL = {"cat": "kernel", "pid": 1, "tid": 7}
CALL = {"cat": "cuda_runtime", "pid": 40, "tid": 40}


def span(name: str, ts: float, number: int | None = None, **more: Any) -> dict[str, Any]:
    """A span of the rank's thread; `number`: its correlation."""
    arguments = {} if number is None else {"correlation": number}
    return {"ph": "X", "name": name, "ts": ts, "dur": 5.0, "pid": 40, "tid": 40} | {
        "args": arguments,
        **more,
    }


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 40, "tid": 0, "ts": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "pid": 40, "tid": 40, "ts": 0, "args": {"name": "main"}},
    {"ph": "X", "name": "Iteration Start", "pid": "Spans", "tid": 0, "ts": 150.0},
    span("before", 90.0),
    span("first", 110.0),
    span("launch early", 95.0, 1, **CALL),
    span("launch", 190.0, 2, **CALL),
    span("launch late", 210.0, 3, **CALL),
    span("kernel of before", 130.0, 1, **KERNEL),
    span("kernel that lags", 300.0, 2, **KERNEL),
    span("kernel of after", 310.0, 3, **KERNEL),
    {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 2, "pid": 40, "tid": 40, "ts": 190.0},
    {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 2, "pid": 1, "tid": 7, "ts": 300.0},
    span("after", 205.0),
]


def test_the_steps_of_all_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """The clock of the second node leads by two seconds; both began at the same moment."""
    parts = []
    for rank, lead in enumerate((0.0, 2.0)):
        base = (100 + int(lead)) * SECOND
        marks = Marks(40, 7, base + 100_000, [base + 150_000, base + 200_000])
        trace = {"baseTimeNanoseconds": base, MARKS: marks, "traceEvents": EVENTS}
        with gzip.open(tmp_path / f"{rank}.json.gz", "wt") as file:
            json.dump(trace, file)
        parts.append(Part(rank, f"host{rank}", f"{rank}.json.gz", lead))
    (tmp_path / LIST).write_text(json.dumps(parts))
    out = tmp_path / "joined.json.gz"
    join_traces(tmp_path, out)
    joined = json.loads(gzip.decompress(out.read_bytes()))
    events = joined["traceEvents"]
    assert joined["baseTimeNanoseconds"] == 100 * SECOND + 100_000

    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == [
        "rank 0 · host0",
        "rank 0 · host0 · GPU 1",
        "rank 1 · host1",
        "rank 1 · host1 · GPU 1",
    ]
    for rank in range(2):
        spans = sorted(
            (event["ts"], event["name"], names[event["pid"]].endswith("GPU 1"))
            for event in events
            if event["ph"] == "X" and names[event["pid"]].startswith(f"rank {rank}")
        )
        assert spans == [
            (0.0, "step 7", False),
            (10.0, "first", False),
            (50.0, "step 8", False),
            (90.0, "launch", False),
            (200.0, "kernel that lags", True),
        ]
    flows = [(event["ph"], event["id"]) for event in events if event.get("cat") == "ac2g"]
    assert flows == [("s", "0.2"), ("f", "0.2"), ("s", "1.2"), ("f", "1.2")]
