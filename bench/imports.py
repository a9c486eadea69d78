"""What it costs before anything runs: `import raydist`, the driver's start, and report() itself."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial

from bench.measure import alternate

PROGRAMS = {
    "import raydist": [sys.executable, "-c", "import raydist"],
    "python alone": [sys.executable, "-c", "pass"],
    "raydist.train --cfg job": [sys.executable, "-m", "raydist.train", "--cfg", "job"],
    "import ray": [sys.executable, "-c", "import ray"],
    "torchrun --help": [sys.executable, "-m", "torch.distributed.run", "--help"],
}


def turn(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def reports_per_second(count: int = 200_000) -> float:
    """How often a rank can call report() with a real channel to a reader that reads."""
    import socket
    import tempfile
    import threading

    import raydist
    from raydist.worker import context
    from raydist.worker.channel import Channel
    from raydist.worker.heartbeat import BEAT_PAGE

    ours, its = socket.socketpair()
    threading.Thread(
        target=lambda: [None for _ in iter(lambda: ours.recv(1 << 20), b"")], daemon=True
    ).start()
    with tempfile.TemporaryFile() as page:
        os.ftruncate(page.fileno(), BEAT_PAGE)
        channel = Channel(its, page.fileno())
        context.enter(context.Context(context.Rank(), emit=channel.emit, beat=channel.beat))
        began = time.perf_counter()
        for step in range(count):
            raydist.report(step=step, loss=0.5)
        rate = count / (time.perf_counter() - began)
        channel.shut()
    context.enter(None)
    return rate


def main(rounds: int = 7) -> list[str]:
    """The table's rows."""
    print("imports", flush=True)
    figures = alternate(
        {name: partial(turn, command) for name, command in PROGRAMS.items()}, rounds
    )
    lines = ["| program | seconds |", "|---|---|"]
    lines += [f"| `{name}` | {statistics.median(values):.3f} |" for name, values in figures.items()]
    rates = [reports_per_second() for _ in range(3)]
    return [*lines, "", f"report(): {statistics.median(rates):,.0f} calls per second on one rank."]
