"""What a run of 1,024 ranks (BENCH_RANKS: another number) costs its driver: simulated nodes of 8
ranks behind the driver's own transport.

Each node's actor is the real one, in one process beside the driver: all that the driver does is
measured but Ray's part of a call. That is measured with real ranks, as many as this machine holds,
which sleep. One row takes in answers as fast as it can, to show that memory does not grow with
them. BENCH_PROFILE=1 prints where the launch spends its time.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import raydist
from bench.simulated import SimulatedHosts, Simulation, many_nodes
from raydist.launch.mailbox import Mail
from raydist.launch.vitals import BYTES_PER_S
from raydist.launch.worker_group import WorkerGroup
from raydist.network import variables
from raydist.recovery.supervisor import Supervisor
from raydist.settings.config import Backend, Job, Target
from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.shared.kinds import Event

PER_NODE = 8
NODES = int(os.environ.get("BENCH_RANKS", 1024)) // PER_NODE
WATCH_S = 60.0
"""Seconds of steady state that are measured, after as long a start."""
ANSWERS = max(4, 102_400 // (NODES * PER_NODE))
"""Answers of each rank, one after the other as fast as they come, for the row about memory: half at
first."""
REAL_RANKS = 16


def resident() -> float:
    """MB of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def cpu_of(began: tuple[float, float]) -> float:
    """Percent of a core that this process has used since then."""
    cpu, wall = time.process_time() - began[0], time.monotonic() - began[1]
    return 100 * cpu / wall


def now() -> tuple[float, float]:
    return time.process_time(), time.monotonic()


class Run:
    """A group of simulated ranks, attempt after attempt."""

    def __init__(self, folder: Path, simulation: Simulation, mail: Mail, watch_s: float) -> None:
        self.folder, self.simulation, self.watch_s = folder, simulation, watch_s
        self.plan = many_nodes(NODES, PER_NODE)
        self.events = Events(folder / "events.jsonl", (self.seen,))
        self.job = Job(
            name="large", dir=str(folder), backend=Backend("gloo"), job=Target("json:dumps")
        )
        hosts = SimulatedHosts(self.plan, simulation, mail)
        self.group = WorkerGroup(self.plan, hosts, self.events)
        self.reports, self.joined = 0, threading.Event()
        self.at: dict[str, float] = {}
        """When each kind of event was said first in this attempt, on the monotonic clock."""

    def seen(self, event: Event) -> None:
        """A reader of events."""
        self.at.setdefault(event.kind, time.monotonic())
        self.reports += isinstance(event, kinds.Report)

    def start(self) -> None:
        """The second round of a launch."""
        self.at = {}
        own = variables.plan_variables(self.job, self.plan, self.group.facts, self.group.rendezvous)
        self.group.start(self.job, own, b"x" * 4096)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The supervisor runs inside the block, in a thread; the block's end waits until all ranks
        have ended."""
        watching = threading.Thread(
            target=Supervisor(self.group, self.events, self.folder / "logs", self.job).run
        )
        watching.start()
        try:
            yield
        finally:
            watching.join()

    def order(self, name: str, value: Any) -> Any:
        """Have the simulation do this; its clock, and when agents were told to stop."""
        return self.simulation.ask(name, value).result(60)


def launch(run: Run) -> list[str]:
    """Rows about the launch."""
    began = now()
    run.group.open(run.job, ())
    run.start()
    cpu, wall = time.process_time() - began[0], time.monotonic() - began[1]
    return [
        f"| driver CPU to launch | {cpu:.2f} s, {wall:.2f} s in all, {run.simulation.calls} "
        "messages | 2 s |"
    ]


def steady(run: Run) -> list[str]:
    """Rows about a run in which nothing happens."""
    time.sleep(run.watch_s)
    for budget in run.events._budgets:  # what is left of them after days
        budget.left = 0.0
    calls, size, began = run.simulation.calls, (run.folder / "events.jsonl").stat().st_size, now()
    time.sleep(run.watch_s)
    percent, calls = cpu_of(began), run.simulation.calls - calls
    with (run.folder / "events.jsonl").open("rb") as file:
        file.seek(size)
        lines = [
            line
            for line in file
            if b'"kind": "pace"' not in line and b'"kind": "nodes"' not in line
        ]
    day = (sum(map(len, lines)) / run.watch_s + 2 * BYTES_PER_S) * 86400 / 1e6
    return [
        f"| driver CPU in steady state | {percent:.1f}% of a core, {calls / run.watch_s:.0f} "
        "calls/s | 10% |",
        f"| events of a day | {day:.0f} MB | 50 MB |",
    ]


def failure(run: Run) -> str:
    """A rank is killed; until the last agent is told to stop its rank."""
    killed, _ = run.order("kill", 7)
    for _ in range(600):
        _, stopped = run.order("", None)
        if len(stopped) == NODES * PER_NODE - 1:
            return (
                f"| all ranks told to stop after a failure | {max(stopped) - killed:.2f} s | "
                "0.5 s |"
            )
        time.sleep(0.05)
    return f"| all ranks told to stop after a failure | {len(stopped)} told in 30 s | 0.5 s |"


def hang(run: Run) -> str:
    """All ranks stand still, because one is stopped; until the driver says which."""
    frozen, _ = run.order("freeze", True)
    while "stop" not in run.at:
        time.sleep(0.01)
    run.order("freeze", False)
    after = run.job.hang.after_s
    seconds = run.at["hang"] - frozen
    return (
        f"| a hang is certain | {seconds:.1f} s, of which {after:g} s and three steps are "
        "waited for | |"
    )


def memory(run: Run) -> str:
    """Answers as fast as they come."""
    run.order("hasty", 0.01)
    sizes, first = [], run.reports
    for _ in range(2):
        goal = run.reports + NODES * PER_NODE * ANSWERS // 2
        while run.reports < goal and "stop" not in run.at:
            time.sleep(0.05)
        sizes.append(resident())
    run.order("hasty", 0.0)
    reports = run.reports - first
    return (
        f"| memory after {reports // 2:,} and {reports:,} reports | {sizes[0]:.0f} and "
        f"{sizes[1]:.0f} MB | flat |"
    )


def sleeper(seconds: float) -> None:
    """On a real rank: ten steps a second."""
    until, step = time.time() + seconds, 0
    while time.time() < until:
        time.sleep(0.1)
        step += 1
        raydist.report(step=step, loss=0.5)


def real(ranks: int, seconds: float) -> str:
    """Ray's part: ranks that sleep, on this machine."""
    import ray

    ray.init(
        address="local",
        num_cpus=ranks,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    marks: list[tuple[float, float]] = []

    def measure() -> None:
        for _ in range(2):
            time.sleep(seconds / 3)
            marks.append(now())

    try:
        with tempfile.TemporaryDirectory() as folder:
            words = (
                f"scale=1x{ranks}",
                "backend=gloo",
                "watch.progress=none",
                f"hydra.run.dir={folder}/run",
            )
            threading.Thread(target=measure).start()
            raydist.run(sleeper, *words, seconds=seconds)
    finally:
        ray.shutdown()
    (cpu, wall), (later, end) = marks
    return (
        f"| {ranks} real ranks: driver CPU in steady state | "
        f"{100 * (later - cpu) / (end - wall):.1f}% of a core | |"
    )


def main(rounds: int = 1) -> list[str]:
    """The table's rows. `rounds`: minutes of steady state."""
    rows = [f"| {NODES} x {PER_NODE} ranks | measured | goal |", "|---|---|---|"]
    profile = cProfile.Profile() if os.environ.get("BENCH_PROFILE") else None
    with tempfile.TemporaryDirectory() as name:
        simulation = Simulation(name)
        with Mail() as mail:
            run = Run(
                Path(name),
                simulation,
                mail,
                float(os.environ.get("BENCH_WATCH_S", WATCH_S * rounds)),
            )
            if profile:
                profile.enable()
            rows += launch(run)
            if profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("cumtime").print_stats(25)
            with run.watched():
                rows += steady(run)
                rows.append(failure(run))
            run.start()
            with run.watched():
                time.sleep(10)
                rows.append(memory(run))
                run.order("kill", 7)
            run.start()
            with run.watched():
                time.sleep(10)
                rows.append(hang(run))
        simulation.close()
    rows.append(real(REAL_RANKS, 30.0))
    return rows
