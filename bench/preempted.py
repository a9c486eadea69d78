"""An urgent run takes the room of another: the queue of raydist, and a real Slurm whose preemption
is REQUEUE, on the same host of tests/rig, in turns. It needs root.

Under Slurm it is a plain loop in torch that saves every 20 steps; the victim is killed, and goes on
from its last save. Seconds from the command until the urgent run's first step, on a free host and
on a taken one, and the steps that the victim repeats.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.queued import events

ROOT = Path(__file__).parent.parent
LONG, SHORT = 600, 20
"""Steps of a victim, and of an urgent run, of 50 ms each."""
SAVED = 20
"""Steps between two saves of the plain loop."""
LIMIT_S = 120.0
NETWORK = "nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))"
PLAIN = f"""
import sys, time
from pathlib import Path
import torch
from torch import nn

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(exist_ok=True)
saved, net, begin = folder / "state.pt", {NETWORK}, 0
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if saved.exists():
    state = torch.load(saved, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["step"]
for step in range(begin + 1, steps + 1):
    time.sleep(0.05)
    nn.functional.cross_entropy(net(torch.randn(8, 10)), torch.randint(3, (8,))).backward()
    optimizer.step()
    optimizer.zero_grad()
    with (folder / "times").open("a") as times:
        times.write(f"{{time.time()}} {{step}}\\n")
    if step % {SAVED} == 0:
        state = {{"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
        torch.save(state, folder / "beside.pt")
        (folder / "beside.pt").rename(saved)
"""
JOB = f"""
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config):
    def loss(output, target):
        time.sleep(0.05)
        return nn.functional.cross_entropy(output, target)

    data = TensorDataset(torch.randn(256, 10), torch.randint(3, (256,)))
    raydist.fit(config, train=data, model={NETWORK}, loss=loss)
"""
WORDS = ("scale=1x1", "backend=gloo", "data.batch_size=8", "train.epochs=1000", "queue=on")


@dataclass
class Side:
    """One way to run it."""

    start: Callable[[str, int, bool], Any]
    """(name, steps, urgent): type the command."""
    steps: Callable[[str], list[tuple[float, int]]]
    """name: the time and the number of each step so far."""
    end: Callable[[str, Any], None]
    """(name, what start has returned): end it, if it still runs."""

    def wait(self, name: str, step: int) -> float:
        """Wait for a step, and return the time of the first one."""
        until = time.monotonic() + LIMIT_S
        while not any(number >= step for _, number in self.steps(name)):
            assert time.monotonic() < until, f"{name}: no step {step}"
            time.sleep(0.05)
        return min(when for when, _ in self.steps(name))

    def turn(self, number: int) -> tuple[float, float, int]:
        """Return the seconds on a free host and on a taken one, and the victim's repeated steps."""
        began = time.time()
        alone = self.start(f"alone{number}", SHORT, True)
        free_s = self.wait(f"alone{number}", SHORT) - began
        self.end(f"alone{number}", alone)
        victim = self.start(f"victim{number}", LONG, False)
        self.wait(f"victim{number}", SAVED + 15)
        began = time.time()
        urgent = self.start(f"urgent{number}", SHORT, True)
        taken_s = self.wait(f"urgent{number}", SHORT) - began
        before = max(step for _, step in self.steps(f"victim{number}"))
        self.wait(f"victim{number}", before + 5)
        done = [step for _, step in self.steps(f"victim{number}")]
        self.end(f"urgent{number}", urgent)
        self.end(f"victim{number}", victim)
        return free_s, taken_s, len(done) - len({*done})


def by_slurm(slurm: Any) -> Side:
    """Two partitions, of which one preempts the other."""
    (slurm.project / "plain.py").write_text(PLAIN)

    def start(name: str, steps: int, urgent: bool) -> str:
        partition = "urgent" if urgent else "batch"
        python = f". {slurm.home}/setup.sh; exec python plain.py {name} {steps}"
        number: str = slurm.submit(f"sbatch --requeue --partition={partition} --wrap '{python}'")
        return number

    def steps(name: str) -> list[tuple[float, int]]:
        file = slurm.project / name / "times"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines]

    def end(name: str, number: str) -> None:
        slurm.type(f"scancel {number}")
        while slurm.type("squeue --noheader").split().count(number):
            time.sleep(0.1)

    return Side(start, steps, end)


def by_raydist(host: Any, folder: Path) -> Side:
    """The queue of raydist, on the Ray of this host."""

    def start(name: str, steps: int, urgent: bool) -> Any:
        (folder / name).mkdir()
        (folder / name / "job.py").write_text(JOB)
        queue = ("queue.priority=high",) if urgent else ("queue.exempt_s=0",)
        words = ["job=job.py", f"name={name}", f"train.steps={steps}", *WORDS, *queue]
        with (folder / name / "screen.txt").open("w") as screen:
            return host.popen(
                ["python", "-m", "raydist.train", *words],
                env={"PYTHONPATH": str(ROOT)},
                cwd=folder / name,
                stdout=screen,
                stderr=screen,
            )

    def steps(name: str) -> list[tuple[float, int]]:
        found = events(folder / name)
        return [(each["t"], each["step"]) for each in found if each["kind"] == "report"]

    def end(name: str, run: Any) -> None:
        if run.poll() is None:
            run.terminate()
        run.wait(LIMIT_S)

    return Side(start, steps, end)


def main(rounds: int = 5) -> list[str]:
    """The table's rows."""
    from tests.rig import hosts
    from tests.rig.slurm import Slurm

    with hosts(3, nics=("eth0",)) as rig, tempfile.TemporaryDirectory() as made:
        *rig.hosts, own = rig.hosts
        slurm = Slurm(rig, grace_s=0)
        slurm.up()
        rig.hosts = [own]
        rig.ray_up(cpus=1, env={"PYTHONPATH": str(ROOT)})
        sides = {"raydist queue": by_raydist(own, Path(made)), "Slurm": by_slurm(slurm)}
        figures: dict[str, list[tuple[float, float, int]]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, side in sides.items():
                figure = side.turn(number)
                print(f"preempted: {number}: {name} {figure}", flush=True)
                if number:  # the first turn imports what later ones find in the memory
                    figures[name].append(figure)
    lines = [
        "| | first step, free host | first step, taken host | more | steps repeated |",
        "|---" * 5 + "|",
    ]
    for name, found in figures.items():
        free_s, taken_s, repeated = (statistics.median(each) for each in zip(*found, strict=True))
        more_s = statistics.median(taken - free for free, taken, _ in found)
        lines.append(
            f"| {name} | {free_s:.2f} s | {taken_s:.2f} s | {more_s:.2f} s | {repeated:g} |"
        )
    return lines
