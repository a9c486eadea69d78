"""Seconds until a rank that was stopped is named, and until training goes on elsewhere without a
host that was cut off.

Two ranks train; one gets a SIGSTOP, or the cable of its host is pulled. The words are raydist's
defaults; Ray's are `HEALTH`, as docs/faults.md advises, and its own with a spare or an elastic
size, where the run does not wait for Ray. The hosts are those of tests/rig: it needs
root. Nothing stands beside: to the others a stopped rank is a collective that takes long, until
torch's timeout (half an hour for gloo).
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import raydist
from bench.recovery import network
from raydist.shared import kinds
from raydist.shared.events import read_kind

STEPS, STRUCK, PAUSE_S = 120, 40, 0.05
"""Steps of a turn, the one before the fault, and seconds that each takes."""
WARM = 200
"""Steps in which a spare warms up, before the fault."""
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
"""What the head of Ray is started with: after four silent looks, 8 s, a node is dead."""
JOB = """
import raydist
from bench.silence import train


def job(config):
    train(config, {folder!r}, '')
"""


def train(config: Any, folder: str, fault: str) -> None:
    """On a rank: raydist's own loop, each step noted with its time and attempt; once, rank 1 is
    stopped in it."""
    import torch
    from torch.utils.data import TensorDataset

    from raydist.worker import context

    rank = raydist.rank().rank
    (Path(folder) / f"{rank}.pids").write_text(
        f"{os.getpid()} {os.getppid()}"
    )  # its own, and the fork server's

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # with restart.in_place a rank takes part in several attempts
        step, attempt = context.current().step, os.environ["TORCHELASTIC_RESTART_COUNT"]
        with (Path(folder) / f"{rank}.times").open("a") as times:
            times.write(f"{time.time()} {step} {attempt}\n")
        if (rank, step, attempt, fault) == (1, STRUCK, "0", "stop"):
            (Path(folder) / "struck").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PAUSE_S)
        return torch.nn.functional.cross_entropy(output, target)

    data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
    raydist.fit(config, train=data, loss=loss, model=network())


def steps(folder: Path) -> list[tuple[float, int, int]]:
    """(when, steps done, attempt) of rank 0, as far as it got."""
    path = folder / "0.times"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        (float(at), int(step), int(attempt))
        for at, step, attempt in (line.split() for line in lines)
    ]


def went_on(folder: Path, struck: float) -> float:
    """Seconds from the fault until a step was done that had not been done before."""
    done = steps(folder)
    last = max(step for _, step, attempt in done if attempt == 0)
    return min(at for at, step, attempt in done if attempt and step > last) - struck


def turn_stop() -> tuple[float, float]:
    """Seconds until the stopped rank is named, and until the next step is done."""
    with tempfile.TemporaryDirectory() as folder:
        words = (
            "scale=1x2",
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS}",
            "checkpoint.every=100000",
        )
        done = raydist.run(
            train, *words, f"hydra.run.dir={folder}/run", folder=folder, fault="stop"
        )
        struck = float((Path(folder) / "struck").read_text())
        (told,) = read_kind(kinds.Hang, done.dir / "events.jsonl")
        return told.t - struck, went_on(Path(folder), struck)


def turn_cut(rig: Any, size: tuple[str, ...], warm: int) -> tuple[float, float]:
    """Seconds until the host that was cut off is given up, and until the next step is done on
    another, or with fewer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cut.py").write_text(JOB.format(folder=name))
        words = [
            *size,
            "backend=gloo",
            "watch.progress=none",
            f"train.steps={STEPS + warm}",
            "checkpoint.every=100000",
        ]
        env = {"PYTHONPATH": str(Path(__file__).parent.parent), "RAY_ADDRESS": rig.ray_address}
        command = [
            "python",
            "-m",
            "raydist.train",
            f"job={folder}/cut.py",
            f"hydra.run.dir={folder}/run",
            *words,
        ]
        run = rig.hosts[0].popen(command, env=env, cwd=folder)
        while not any(step >= STRUCK + warm for _, step, _ in steps(folder)):
            assert run.poll() is None, "the run ended before its host was cut off"
            time.sleep(0.01)
        (plan,) = read_kind(kinds.Plan, folder / "run" / "events.jsonl")
        sizes = read_kind(kinds.Resize, folder / "run" / "events.jsonl")
        slots = [plan.slots, *(resize.slots for resize in sizes)][-1]
        victim = next(host for host in rig.hosts if host.name == slots[1]["host"])
        struck = time.time()
        rig.cut(victim)
        assert run.wait(120) == 0
        lost = next(read_kind(kinds.Restart, folder / "run" / "events.jsonl"))
        return lost.t - struck, went_on(folder, struck)


def cuts(
    rounds: int, health: dict[str, str], size: tuple[str, ...] = ("scale=2x1",), warm: int = 0
) -> list[tuple[float, float]]:
    """Each on hosts of its own: one that was cut off is of no use to the next."""
    from tests.rig import hosts

    found = []
    for number in range(rounds):
        with hosts(3) as rig:
            rig.ray_up(cpus=2, env={**health, "PYTHONPATH": str(Path(__file__).parent.parent)})
            time.sleep(6)  # Ray's own delay before it looks at a new node for the first time
            found.append(turn_cut(rig, size, warm))
        print(
            f"  round {number + 1}: cut off {found[-1][0]:.2f} s, {found[-1][1]:.2f} s", flush=True
        )
    return found


def stops(rounds: int) -> list[tuple[float, float]]:
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    found = []
    for number in range(rounds + 1):
        found.append(turn_stop())
        print(f"  round {number}: stopped {found[-1][0]:.2f} s, {found[-1][1]:.2f} s", flush=True)
    ray.shutdown()
    return found[1:]


def main(rounds: int = 3) -> list[str]:
    """The table's rows."""
    spare = ("scale=2x1", "scale.spares=1")
    rows = ["| | until it is known | until the next step | of it at most |", "|---|---|---|---|"]
    for fault, found in (
        ("one of 2 ranks is stopped", stops(rounds)),
        ("one of 3 hosts is cut off", cuts(rounds, HEALTH)),
        ("the same with a spare", cuts(rounds, {}, spare, WARM)),
        ("and restart.in_place", cuts(rounds, {}, (*spare, "restart.in_place=auto"), WARM)),
        ("the same with scale=2..3x1", cuts(rounds, {}, ("scale=2..3x1",), WARM)),
    ):
        known, on = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append(
            f"| {fault} | {known:.2f} s | {on:.2f} s | {max(each for _, each in found):.2f} s |"
        )
    return rows
