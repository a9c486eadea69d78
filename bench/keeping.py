"""What it costs a training to be kept: snapshots and heartbeats in steps, a checkpoint of 1 GB in the time of the loop.

The sides take turns within one run, block by block, so that nothing differs between them but what is measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

BLOCK, BLOCKS = 10, 60
"""Steps of a block, and pairs of blocks in a round: short ones, for the machine drifts within seconds."""
STATE, TURN_S = 1 << 30, 10.0
"""Bytes of the state that is saved; seconds of training to each save."""


def kept(blocks: int) -> list[float]:
    """On a rank: by pair of blocks, seconds with snapshots and heartbeats over seconds without either."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import raydist
    from raydist import context
    from raydist.config import Checkpoint, Data, Job, Train
    from raydist.loop.keeping import Keeper, State

    here, real, seconds = context.here(), Keeper.step, [0.0] * (2 * blocks + 3)
    beat, began = here.beat, time.perf_counter()

    def timed(self: Keeper, step: int, own: Callable[[], State], state: Callable[[], State]) -> None:
        nonlocal began
        if step // BLOCK % 2:
            real(self, step, own, state)
        else:
            self.go_on()
        if (step + 1) % BLOCK == 0:
            now = time.perf_counter()
            seconds[step // BLOCK], began = now - began, now
            here.beat = beat if (step + 1) // BLOCK % 2 else lambda step, phase: None

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    )  # fmt: skip
    samples = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(10, (2048,)))
    steps = len(seconds) * BLOCK
    job = Job(train=Train(steps=steps), data=Data(batch_size=32), checkpoint=Checkpoint(every=steps))
    Keeper.step = timed  # type: ignore[method-assign]
    try:
        raydist.fit(job, model=net, train=samples, loss=nn.functional.cross_entropy)
    finally:
        Keeper.step, here.beat = real, beat  # type: ignore[method-assign]
    # before the third block memory is fetched for the first time
    return [seconds[block] / seconds[block - 1] for block in range(3, 2 * blocks + 3, 2)]


def stalled(rounds: int) -> dict[str, list[float]]:
    """On the only rank: by side, the steps of each turn of TURN_S; and seconds that each save took of the loop."""
    import torch
    from torch import nn

    from raydist import checkpoint

    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    state = {"model": net.state_dict(), "table": torch.randn(STATE // 4)}
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    saves: dict[str, Callable[[int], object]] = {
        "none": lambda step: None,
        "save": lambda step: checkpoint.save(step, state),
        "save(wait=True)": lambda step: checkpoint.save(step, state, wait=True),
    }
    told: dict[str, list[float]] = {name: [] for side in saves for name in (side, f"seconds of {side}")}
    step = 0
    for turn in range(rounds + 1):
        for side, save in saves.items():
            checkpoint.settle()
            began, first = time.perf_counter(), step
            save(step)
            took = time.perf_counter() - began
            while time.perf_counter() - began < TURN_S:
                step += 1
                nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            if turn:
                told[side].append(step - first)
                told[f"seconds of {side}"].append(took)
    return told


def lost(some: Sequence[float], most: Sequence[float]) -> str:
    """The share of its steps that a side loses, turn by turn."""
    return f"{100 * (1 - statistics.median(one / other for one, other in zip(some, most, strict=True))):.2f}%"


def main(rounds: int = 5) -> list[str]:
    """The tables' rows."""
    import ray

    import raydist

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    same = ("backend=gloo", "watch.progress=none", "checkpoint.keep=1")
    with tempfile.TemporaryDirectory() as folder:
        print("keeping: snapshots", flush=True)
        words = (*same, f"hydra.run.dir={folder}/snapshots")
        ratios = raydist.run(kept, "scale=1x2", *words, args=(BLOCKS * rounds,)).values[0]
        print("keeping: a save of 1 GB", flush=True)
        told = raydist.run(stalled, "scale=1x1", *same, f"hydra.run.dir={folder}/saves", args=(rounds,)).values[0]
    ray.shutdown()
    assert ratios is not None
    assert told is not None
    cost = 100 * (statistics.median(ratios) - 1)
    quarters = statistics.quantiles(ratios, n=4)
    rows = [
        "| snapshots and heartbeats cost | quartiles | pairs of blocks |",
        "|---|---|---|",
        f"| {cost:.2f}% | {100 * (quarters[0] - 1):.2f}% to {100 * (quarters[2] - 1):.2f}% | {len(ratios)} |",
        "",
        f"| a state of 1 GB, once in {TURN_S:g} s | the call returns after | steps lost |",
        "|---|---|---|",
    ]
    for side in ("save", "save(wait=True)"):
        seconds = statistics.median(told[f"seconds of {side}"])
        rows.append(f"| `{side}` | {seconds:.3f} s | {lost(told[side], told['none'])} |")
    return rows
