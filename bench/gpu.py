"""A day with a GPU: tests, figures and the network of this machine's GPUs, in one report
(docs/gpu.md): `make gpu`.

Each part is a program of its own with a time limit: one that fails or hangs costs its line, not the
report. `python -m bench.gpu PART ROUNDS` runs one.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.measure import BACKEND, RANKS, SMALL, alternate, machine

ROOT = Path(__file__).parents[1]
REPORT = Path("gpu-report.md")
LIMIT_S = 1800.0
COUNT = (
    "import torch; print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])"
)
FAKE = "Fake GPU"
"""The name of a GPU of tests/fake_gpu."""
ONLY_REAL = (
    "speed: what a GPU, NVLink, PCIe or RDMA costs or gains; each figure above is without meaning",
    "numbers of real kernels: bf16, TF32 and atomics differ from a CPU's",
    "the driver, NCCL's transports, topology and plug-ins, GPUDirect, CUDA graphs, cuDNN, "
    "the code that torch.compile makes for GPUs",
    "how far the host runs ahead: here it waits at each kernel for what precedes it in its stream",
    "profiles: torch's profiler asks the driver's CUPTI, and `raydist profile` crashes the ranks",
    "how much memory of a GPU other processes use: each counts only its own",
)
"""What the fake GPUs of the tests cannot show."""
JUDGED = ("tests", "network")
"""The parts that show something on fake GPUs too: of the others only that they run."""
Figure = tuple[str, bool]
"""A figure, and whether it reaches the goal."""


@dataclass(frozen=True)
class Part:
    """One line of the report."""

    what: str
    goal: str
    gpus: int = 1
    """The least number of GPUs that it needs."""


PARTS = {
    "tests": Part("the GPU tests, pytest -m gpu", "all pass"),
    "launch": Part(
        "launch: raydist.run until the first all-reduce has returned", "at most 1/2 of torchrun's"
    ),
    "recovery": Part("recovery: kill -9 of a rank until the next step", "at most 2 s"),
    "steps": Part(
        "steps: ResNet-50, bf16, report() at every step", "at least 0.99 of a torchrun loop's"
    ),
    "bandwidth": Part(
        "bandwidth: all_reduce of 256 MiB", "at least 0.97 of a torch loop's", gpus=2
    ),
    "keeping": Part("snapshots and heartbeats: their cost in steps", "at most 1%"),
    "network": Part("the network: tools.doctor", "nothing that breaks a run"),
}


def tests(rounds: int) -> Figure:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, flush=True)
    return (done.stdout.strip().splitlines() or [done.stderr])[-1].strip("= "), done.returncode == 0


def launch(rounds: int) -> Figure:
    from bench import launch as bench

    begin_ray()
    sides = {
        "raydist": partial(bench.turn_raydist, RANKS),
        "torchrun": partial(bench.turn_torchrun, RANKS),
    }
    return compare(alternate(sides, rounds), "s", most=0.5)


def recovery(rounds: int) -> Figure:
    from bench import recovery as bench

    begin_ray()
    took = statistics.median(alternate({"raydist": bench.turn_raydist}, rounds)["raydist"])
    return f"{took:.2f} s", took <= 2


def steps(rounds: int) -> Figure:
    from bench import steps as bench

    begin_ray()
    return compare(
        alternate({"raydist": bench.turn_raydist, "torchrun": bench.turn_torchrun}, rounds),
        "steps/s",
        0.99,
    )


def bandwidth(rounds: int) -> Figure:
    from bench import bandwidth as bench

    return compare(
        alternate({"raydist": bench.turn_raydist, "torch": bench.turn_torch}, rounds), "GB/s", 0.97
    )


def keeping(rounds: int) -> Figure:
    from bench import keeping as bench

    begin_ray()
    with tempfile.TemporaryDirectory() as folder:
        _, cost, least, most, pairs = bench.snapshots(rounds, folder)
    return f"{cost:.2f}% ({least:.2f}% to {most:.2f}%) of {pairs} pairs of blocks", cost <= 1


def network(rounds: int) -> Figure:
    command = [
        sys.executable,
        "-m",
        "raydist.tools.doctor",
        "--json",
        f"backend={BACKEND}",
        f"scale=1x{RANKS}",
    ]
    done = subprocess.run([*command, "group=inline"], capture_output=True, text=True)
    found = json.loads(done.stdout)
    problems = [finding["text"] for finding in found["findings"]]
    return "; ".join(
        [f"{len(found['checks'])} checks, {len(problems)} findings", *problems]
    ), done.returncode == 0


def begin_ray() -> None:
    import ray

    ray.init(
        "local",
        num_cpus=RANKS + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )


def compare(
    figures: Mapping[str, Sequence[float]],
    unit: str,
    least: float = 0.0,
    most: float = float("inf"),
) -> Figure:
    """Both medians, the median of the ratios turn by turn, and whether that lies within the
    limits."""
    (ours, mine), (theirs, others) = figures.items()
    ratio = statistics.median(one / other for one, other in zip(mine, others, strict=True))
    text = (
        f"{ours} {statistics.median(mine):.2f} {unit}, {theirs} "
        f"{statistics.median(others):.2f} {unit}: {ratio:.3f}"
    )
    return text, least <= ratio <= most


def run_part(name: str, gpus: int, rounds: int) -> tuple[str, str]:
    """(figure, verdict) of one part, or why there is none."""
    if not gpus:
        return "", "not run: this machine has no GPU that torch can use"
    if gpus < PARTS[name].gpus:
        return "", f"not run: it needs {PARTS[name].gpus} GPUs, this machine has {gpus}"
    env = {**os.environ, "BENCH_BACKEND": "nccl", "BENCH_RANKS": str(gpus)}
    command = [sys.executable, "-m", "bench.gpu", name, str(rounds)]
    with tempfile.TemporaryFile("w+") as screen:
        part = subprocess.Popen(
            command, env=env, stdout=screen, stderr=screen, start_new_session=True
        )
        try:
            code = part.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(part.pid, signal.SIGKILL)
            return "", f"FAILED: it did not end within {LIMIT_S:g} s"
        screen.seek(0)
        said = screen.read()
    print(said, flush=True)
    last = (said.strip().splitlines() or ["it printed nothing"])[-1]
    if code:
        return "", f"FAILED: {last}"
    figure, good = json.loads(last)
    if SMALL and name not in JUDGED:
        return figure, "it runs; the figure is without meaning"
    return figure, "reached" if good else "MISSED"


def main(rounds: int = 3, parts: Sequence[str] = ()) -> list[str]:
    """The rows of the report, which is written to `REPORT` too. `parts`: these only."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True)
    names: list[str] = json.loads(done.stdout.replace("'", '"')) if done.returncode == 0 else []
    rows = ["| what | figure | goal | verdict |", "|---|---|---|---|"]
    for name in parts or PARTS:
        part = PARTS[name]
        print(f"gpu: {name}", flush=True)
        figure, verdict = run_part(name, len(names), rounds)
        cells = [part.what, figure, part.goal, verdict]
        rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    lines = [f"# raydist on {gpus}", "", machine(), "", *rows, ""]
    if FAKE in names:
        lines += [
            "Fake GPUs (tests/fake_gpu) cannot show:",
            "",
            *(f"- {each}" for each in ONLY_REAL),
        ]
    REPORT.write_text("\n".join(lines))
    print(f"the report is in {REPORT.absolute()}", flush=True)
    return rows


if __name__ == "__main__":
    from bench import gpu

    print(json.dumps(getattr(gpu, sys.argv[1])(int(sys.argv[2]))))
