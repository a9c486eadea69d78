"""What a hundred `raydist stacks` cost a training of 32 ranks, and how soon each answers.

A step sleeps, as a host that waits for its GPU, and then reduces on all ranks. In one run, a person
asks for the stacks of all ranks once a second for some seconds, then leaves the run alone for as
long, and so on: two runs differ by more than what stacks cost. Each connection is kept, as the
command does after its start. The figure is the time of a step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.measure import heads, row
from raydist.messages.operate import GetStacks, TextReply
from raydist.tools.running import connected_run, receive

RANKS = int(os.environ.get("BENCH_OPERATE_RANKS", "32"))
STACKS = int(os.environ.get("BENCH_OPERATE_STACKS", "100"))
"""Stacks of all ranks in a round; smaller numbers only show that the bench runs."""
EVERY_S, SLEEP_S = 1.0, 0.1
"""Seconds between two stacks, and of the sleep in a step."""
AT_A_TIME = 4
"""Stacks in a row, until the run is left alone for as long."""
FIRST = 20
"""The step from which on time is taken: until then the ranks are starting."""
PROGRAM = f"""
import time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values, ended = torch.ones(1000), torch.zeros(1)
with open(f"steps-{{dist.get_rank()}}", "w", buffering=1) as steps:
    while not ended.item():
        time.sleep({SLEEP_S})
        dist.all_reduce(values)
        values /= dist.get_world_size()
        print(time.time(), file=steps)
        if dist.get_rank() == 0:
            ended.fill_(Path("end").exists())
        dist.broadcast(ended, 0)
"""


class Window(NamedTuple):
    """Some seconds of the run."""

    asks: bool
    begins: float
    ends: float

    def step_ms(self, steps: list[float]) -> float:
        """The milliseconds of a step that began and ended here. `steps`: when each one ended."""
        return 1000 * statistics.mean(
            later - earlier
            for earlier, later in pairwise(steps)
            if earlier >= self.begins and later <= self.ends
        )


def watch_one_run(rounds: int, answered_s: list[float]) -> dict[bool, list[float]]:
    """Return the milliseconds of a step in each window, with stacks (True) and without."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        words = ["script=program.py", f"scale=1x{RANKS}", "group=inline", "watch.progress=none"]
        command = [sys.executable, "-m", "raydist.train", *words]
        with subprocess.Popen(command, cwd=folder) as program:
            while len(read_steps(folder)) < FIRST:
                assert program.poll() is None, "the program ended early"
                time.sleep(0.5)
            try:
                windows = ask_by_turns(folder / "runs", rounds, answered_s)
            finally:
                (folder / "end").touch()
        assert program.returncode == 0
        steps = read_steps(folder)
    figures: dict[bool, list[float]] = {True: [], False: []}
    for window in windows:
        figures[window.asks].append(window.step_ms(steps))
    return figures


def read_steps(folder: Path) -> list[float]:
    """Return when rank 0 ended each step."""
    file = folder / "steps-0"
    return [float(line) for line in file.read_text().splitlines()] if file.exists() else []


def ask_by_turns(runs: Path, rounds: int, answered_s: list[float]) -> list[Window]:
    """Ask for all stacks, then leave the run alone, and so on."""
    windows = []
    with connected_run(str(runs), Namespace(job=None)) as link:
        for number in range(2 * rounds * max(1, STACKS // AT_A_TIME)):
            # Which one is first changes from pair to pair: a machine that drifts favours neither.
            asks = number % 4 in (0, 3)
            begins = time.time()
            for _ in range(AT_A_TIME):
                began = time.perf_counter()
                if asks:
                    link.send(GetStacks([], False))
                    assert len(receive(link, TextReply).lines) > 0
                    answered_s.append(time.perf_counter() - began)
                time.sleep(max(0.0, began + EVERY_S - time.perf_counter()))
            windows.append(Window(asks, begins, time.time()))
    return windows


def main(rounds: int) -> list[str]:
    """The table's rows."""
    answered_s: list[float] = []
    asked, alone = "stacks", "left alone"
    found = watch_one_run(rounds, answered_s)
    figures = {asked: found[True], alone: found[False]}
    ratio = statistics.mean(figures[asked]) / statistics.mean(figures[alone])
    return [
        f"| a step of {RANKS} ranks | {heads(figures, asked)} |",
        "|---" * 4 + "|",
        f"| sleep and all-reduce | {row(figures, asked, 'ms')} |",
        "",
        f"{len(answered_s)} answers: {statistics.median(answered_s):.2f} s, "
        f"{max(answered_s):.2f} s at most. Ratio of the means: {ratio:.3f}.",
    ]
