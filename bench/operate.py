"""What a hundred `raydist stacks` cost a training of 32 ranks, and how soon each answers.

A step sleeps, as a host that waits for its GPU, and then reduces on all ranks. One side is left
alone; in the other a person asks for the stacks of all ranks once a second, over one connection, as
the command does after its start. The figure is the time of a step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from bench.measure import alternate, heads, row
from raydist.messages.operate import GetStacks, TextReply
from raydist.tools.running import connected_run, receive

RANKS = int(os.environ.get("BENCH_OPERATE_RANKS", "32"))
STACKS = int(os.environ.get("BENCH_OPERATE_STACKS", "100"))
"""Smaller ones only show that the bench runs."""
EVERY_S, SLEEP_S = 1.0, 0.1
"""Seconds between two stacks, and of the sleep in a step."""
FIRST = 20
"""The step from which on time is taken: until then the ranks are starting."""
STEPS = FIRST + round(STACKS * EVERY_S / SLEEP_S)
PROGRAM = f"""
import time
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
values = torch.ones(1000)
for step in range(1, {STEPS} + 1):
    time.sleep({SLEEP_S})
    dist.all_reduce(values)
    values /= dist.get_world_size()
    if dist.get_rank() == 0 and step in ({FIRST}, {STEPS}):
        Path(f"step-{{step}}").write_text(str(time.time()))
"""


def turn(asks: bool, answered_s: list[float]) -> float:
    """Return the milliseconds of a step. `asks`: for stacks; each answer's seconds are added."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        words = ["script=program.py", f"scale=1x{RANKS}", "group=inline", "watch.progress=none"]
        command = [sys.executable, "-m", "raydist.train", *words]
        with subprocess.Popen(command, cwd=folder) as program:
            while not (folder / f"step-{FIRST}").exists():
                assert program.poll() is None, "the program ended early"
                time.sleep(0.05)
            if asks:
                ask(folder / "runs", answered_s)
        assert program.returncode == 0
        first, last = (float((folder / f"step-{step}").read_text()) for step in (FIRST, STEPS))
        return 1000 * (last - first) / (STEPS - FIRST)


def ask(runs: Path, answered_s: list[float]) -> None:
    """Ask for all stacks, STACKS times, while the program makes its steps."""
    with connected_run(str(runs), Namespace(job=None)) as link:
        for _ in range(STACKS):
            began = time.perf_counter()
            link.send(GetStacks([], False))
            assert len(receive(link, TextReply).lines) > 0
            answered_s.append(time.perf_counter() - began)
            time.sleep(max(0.0, EVERY_S - answered_s[-1]))


def main(rounds: int) -> list[str]:
    """The table's rows."""
    answered_s: list[float] = []
    sides = {
        f"{STACKS} stacks": lambda: turn(True, answered_s),
        "left alone": lambda: turn(False, answered_s),
    }
    figures = alternate(sides, rounds)
    ours = f"{STACKS} stacks"
    return [
        f"| a step of {RANKS} ranks | {heads(sides, ours)} |",
        "|---" * 4 + "|",
        f"| sleep and all-reduce | {row(figures, ours, 'ms')} |",
        "",
        f"An answer: {statistics.median(answered_s):.2f} s, {max(answered_s):.2f} s at most.",
    ]
