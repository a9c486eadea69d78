"""Who watches the watchers: each process of a run is killed or stopped, and the cables of a host
are pulled.

Two ranks train on two of three hosts of tests/rig (it needs root); the fault meets the host of rank
1. Seconds until an event names it, the longest pause of the training after it, and from the last
step until the command has ended. `python -m bench faults --rounds 1`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.silence import HEALTH, JOB, steps
from raydist.shared import kinds
from raydist.shared.events import read_events, read_kind
from raydist.shared.kinds import Event

STEPS, STRUCK = 500, 40
"""Steps of a run, of 50 ms each, and the step before the fault: the training outlasts the 10 s of
silence."""
LIMIT_S = 300.0
NODE = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
"""deploy/node/environment.sh's."""
NAMES = ("warning", "hang", "restart", "stop")
"""Events that tell of a fault."""


@dataclass(frozen=True)
class Fault:
    """One row."""

    how: str
    """KILL, STOP, or `cut`."""
    what: str
    """A process of rank 1's host, or a NIC of it; empty: all NICs."""
    health: Mapping[str, str]
    """What Ray's head is started with."""
    text: str


FAULTS = [
    *(
        Fault(how, what, HEALTH, f"{how} {what}")
        for what in ("rank", "fork server", "agent", "raylet")
        for how in ("KILL", "STOP")
    ),
    Fault("cut", "eth0", HEALTH, "the driver's link only"),
    Fault("cut", "", HEALTH, "all cables, Ray as docs/faults.md advises"),
    Fault("cut", "", NODE, "all cables, Ray as deploy/node starts it"),
    Fault("cut", "", {}, "all cables, Ray's defaults"),
]


@dataclass(frozen=True)
class Seen:
    """What a fault has cost."""

    named_s: float
    pause_s: float
    end_s: float
    code: int
    says: str


def strike(fault: Fault, rig: Any, host: Any, folder: Path) -> None:
    """The fault, on this host."""
    if fault.how == "cut":
        rig.cut(host, fault.what or None)
        return
    rank, server = (folder / "1.pids").read_text().split()
    there = host.processes()
    pids = {
        "rank": [rank],
        "fork server": [server],
        "agent": [
            pid for pid, line in there.items() if line.startswith("ray::") and "NodeActor" in line
        ],
        "raylet": [
            pid for pid, line in there.items() if line.partition(" ")[0].endswith("/raylet")
        ],
    }[fault.what]
    assert pids, there
    host.run(["kill", f"-{fault.how}", *map(str, pids)])


def turn(fault: Fault) -> Seen:
    """One run on three hosts of its own."""
    from tests.rig import hosts

    root = str(Path(__file__).parent.parent)
    with hosts(3) as rig, tempfile.TemporaryDirectory() as name:
        rig.ray_up(cpus=2, env={**fault.health, "PYTHONPATH": root})
        time.sleep(6)  # Ray's own delay before it looks at a new node for the first time
        folder, events = Path(name), Path(name) / "run" / "events.jsonl"
        (folder / "struck.py").write_text(JOB.format(folder=name))
        words = [
            "scale=2x1",
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS}",
            "checkpoint.every=100000",
        ]
        env = {"PYTHONPATH": root, "RAY_ADDRESS": rig.ray_address}
        command = [
            "python",
            "-m",
            "raydist.train",
            f"job={folder}/struck.py",
            f"hydra.run.dir={folder}/run",
            *words,
        ]
        run = rig.hosts[0].popen(command, env=env, cwd=folder, stdout=sys.stderr, stderr=sys.stderr)
        while not any(step >= STRUCK for _, step, _ in steps(folder)):
            assert run.poll() is None, "the run ended before the fault"
            time.sleep(0.01)
        (plan,) = read_kind(kinds.Plan, events)
        host = next(host for host in rig.hosts if host.name == plan.slots[1]["host"])
        struck = time.time()
        strike(fault, rig, host, folder)
        code = run.wait(LIMIT_S)
        return seen(list(read_events(events)), steps(folder), struck, time.time(), code)


def seen(
    events: list[Event], done: list[tuple[float, int, int]], struck: float, ended: float, code: int
) -> Seen:
    """What a run tells of a fault at the time `struck`. `done`: steps of rank 0; `ended`: when its
    command did."""
    reports = [each for each in events if each.t > struck and each.kind in NAMES]
    newest, at, pause = -1, struck, 0.0
    for when, step, _ in done:
        if step > newest:
            if when > struck:
                pause = max(pause, when - at)
            newest, at = step, max(when, struck)
    named = reports[0].t - struck if reports else float("nan")
    return Seen(named, pause, ended - at, code, described(reports[0]) if reports else "nothing")


def described(event: Event) -> str:
    """The event in a few words."""
    fields = event.to_json()
    words = fields.get("text") or fields.get("cause") or ""
    return f"{event.kind}: {words}"[:90].replace("|", "/").replace("\n", " ")


def main(rounds: int = 1) -> list[str]:
    """The table's rows."""
    rows = [
        "| fault | named after | longest pause | last step to the end | exit code | first event |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        print(f"faults: {fault.text}", flush=True)
        found = [turn(fault) for _ in range(rounds)]
        named, pause, end = (
            statistics.median(getattr(each, column) for each in found)
            for column in ("named_s", "pause_s", "end_s")
        )
        codes = ", ".join(map(str, sorted({each.code for each in found})))
        rows.append(
            f"| {fault.text} | {named:.1f} s | {pause:.1f} s | {end:.1f} s | {codes} | "
            f"{found[-1].says} |"
        )
        print(rows[-1], flush=True)
    return rows
