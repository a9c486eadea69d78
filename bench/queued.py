"""A queue in a storm: runs of random priority on a Ray with room for one, some of whose drivers are
killed, stopped for a while, or interrupted at random moments.

Each round has four runs. Those that were left alone must finish with the same losses to the bit,
the store must be empty afterwards, and the room must not stay empty while a run waits: the longest
such time is printed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS_OF_ROUND = 4
LOOK_S = 0.1
JOB = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 10, generator=generator)
    targets = torch.randint(3, (256,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Dropout(0.2), nn.Linear(32, 3))

    def loss(output, target):
        time.sleep(0.05)
        return nn.functional.cross_entropy(output, target)

    raydist.fit(config, train=TensorDataset(inputs, targets), model=model, loss=loss)
"""
WORDS = ("job=short.py", "scale=1x2", "data.batch_size=8", "train.epochs=4", "snapshot.every=1")
QUEUE = ("queue=on", "queue.exempt_s=0")


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """Start a run in a folder of its own."""
    where = folder / name
    where.mkdir()
    (where / "short.py").write_text(JOB)
    command = [sys.executable, "-m", "raydist.train", *WORDS, f"name={name}", *words]
    with (where / "screen.txt").open("w") as screen:
        return subprocess.Popen(command, cwd=where, stdout=screen, stderr=screen)


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the run in this folder; none before it began."""
    files = [*folder.glob("runs/*/*/events.jsonl")]
    lines = files[0].read_text().splitlines() if files else []
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step. A repeated step must have the same."""
    found: dict[int, float] = {}
    for event in events(folder):
        if event["kind"] == "report" and event["rank"] == 0 and "loss" in event["values"]:
            loss = event["values"]["loss"]
            assert found.setdefault(event["step"], loss) == loss, event
    return found


def storm_round(folder: Path, expected: dict[int, float]) -> tuple[float, int, int]:
    """Return the longest time with empty room while a run waited, and the numbers of pauses and of
    runs that were left alone."""
    from raydist.cluster import connect
    from raydist.cluster.queue import store

    began = time.monotonic()
    due = sorted(
        (random.uniform(0, 20), number, random.choice(("INT", "KILL", "STOP", "none")))
        for number in range(RUNS_OF_ROUND)
    )
    names = [f"r{number}" for number in range(RUNS_OF_ROUND)]
    running = {}
    for name in names:
        priority = f"queue.priority={random.choice((-1, 0, 0, 1))}"
        running[name] = start(folder, name, *QUEUE, priority)
        time.sleep(random.uniform(0, 4))
    struck: set[str] = set()
    stopped: list[tuple[float, subprocess.Popen[bytes]]] = []
    idle_since, idle_s = 0.0, 0.0
    while any(run.poll() is None for run in running.values()):
        now = time.monotonic()
        while due and now - began > due[0][0]:
            _, number, how = due.pop(0)
            run = running[f"r{number}"]
            if how != "none" and run.poll() is None:
                run.send_signal(getattr(signal, f"SIG{how}"))
                if how == "STOP":
                    stopped.append((now + random.uniform(1, 5), run))
                else:
                    struck.add(f"r{number}")
        for each in [each for each in stopped if now > each[0]]:
            each[1].send_signal(signal.SIGCONT)
            stopped.remove(each)
        free = sum(node.free.get("CPU", 0) for node in connect.alive_nodes())
        held_back = {run.pid for _, run in stopped}
        waiting = any(each.state == "waiting" for each in store.read_all().entries)
        empty = free >= 2 and waiting and not held_back
        idle_since = idle_since or now if empty else 0.0
        idle_s = max(idle_s, now - idle_since if empty else 0.0)
        assert now - began < 300, [(folder / name / "screen.txt").read_text() for name in names]
        time.sleep(LOOK_S)
    alone = [name for name in names if name not in struck]
    for name in alone:
        screen = (folder / name / "screen.txt").read_text()
        assert running[name].returncode == 0, screen
        assert losses(folder / name) == expected, screen
    until = time.monotonic() + 10
    while left := store.read_all().entries:
        assert time.monotonic() < until, left
        time.sleep(LOOK_S)
    pauses = sum(event["kind"] == "pause" for name in names for event in events(folder / name))
    return idle_s, pauses, len(alone)


def first_step_s(folder: Path, name: str, *words: str) -> float:
    """Start a run, and return the seconds from its command until its first step."""
    began = time.time()
    run = start(folder, name, *words)
    assert run.wait() == 0, (folder / name / "screen.txt").read_text()
    steps = [event["t"] for event in events(folder / name) if event["kind"] == "report"]
    return float(min(steps)) - began


def urgent_rounds(folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds until the first step of an urgent run: alone, and displacing another."""
    pairs = []
    for number in range(rounds):
        alone = first_step_s(folder, f"alone{number}", *QUEUE)
        low = start(folder, f"low{number}", *QUEUE, "queue.priority=low", "train.epochs=40")
        while not any(each["kind"] == "report" for each in events(folder / f"low{number}")):
            time.sleep(LOOK_S)
        urgent = first_step_s(folder, f"urgent{number}", *QUEUE, "queue.priority=high")
        low.send_signal(signal.SIGINT)
        low.wait()
        pairs.append((alone, urgent))
    return pairs


def main(rounds: int = 50) -> list[str]:
    """The table's rows."""
    import ray
    from ray.cluster_utils import Cluster

    from raydist.cluster import ray_private

    ray_private.load_auth_token()  # as `ray start` does
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False},
    )
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        assert start(folder, "whole").wait() == 0, (folder / "whole/screen.txt").read_text()
        expected = losses(folder / "whole")
        pairs = urgent_rounds(folder, min(rounds, 10))
        figures = []
        for number in range(rounds):
            (round_folder := folder / f"round{number}").mkdir()
            figures.append(storm_round(round_folder, expected))
            print(f"queued: round {number}: {figures[-1]}", flush=True)
    ray.shutdown()
    cluster.shutdown()
    idle_s, pauses, alone = zip(*figures, strict=True)
    more = [urgent - first for first, urgent in pairs]
    return [
        "| rounds | pauses | runs left alone, all with the losses of an undisturbed run | longest "
        "time with empty room while a run waited |",
        "|---|---|---|---|",
        f"| {rounds} | {sum(pauses)} | {sum(alone)} | {max(idle_s):.2f} s |",
        "",
        "First step of an urgent run, from its command, medians: "
        f"{statistics.median(first for first, _ in pairs):.2f} s alone, "
        f"{statistics.median(more):.2f} s more with a run to displace.",
    ]
