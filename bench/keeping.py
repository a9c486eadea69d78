"""What it costs a training to be kept: snapshots and heartbeats in steps, a checkpoint of 1 GB in
the time of the loop.

The sides take turns within one run, block by block, so that nothing differs between them but what
is measured.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from bench.measure import BACKEND, RANKS, SMALL

BLOCK, BLOCKS = 14, 2 if SMALL else 100
"""Steps of a block, and pairs of blocks in a round: short ones, for the machine drifts within
seconds."""
STATE, TURN_S, WRITTEN_S = 1 << 30, 10.0, 2.0
"""Bytes of the state that is saved; seconds of training to each save, and of those in which it is
written."""


def kept(blocks: int) -> tuple[list[tuple[float, float]], float]:
    """On a rank: by pair of blocks, seconds with snapshots and heartbeats and seconds without
    either; and the seconds of the former that the rank spent in snapshots, by its own clock."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import raydist
    from raydist.settings.config import Checkpoint, Data, Job, Train
    from raydist.state.snapshot_layout import State
    from raydist.training.snapshotter import Snapshotter
    from raydist.worker import context

    here, real, seconds = context.current(), Snapshotter.step, [0.0] * (2 * blocks + 3)
    device = here.rank.device
    beat, began, spent = here.beat, time.perf_counter(), 0.0

    def timed(
        self: Snapshotter,
        step: int,
        own: Callable[[], State],
        state: Callable[[], State],
        can_wait: bool = False,
    ) -> None:
        nonlocal began, spent
        if step // BLOCK % 2:
            called = time.perf_counter()
            real(self, step, own, state, can_wait)
            spent += (time.perf_counter() - called) * (step >= 3 * BLOCK)
        else:
            self.go_on()
        if (step + 1) % BLOCK == 0:
            if (
                device.type == "cuda"
            ):  # the host runs ahead of it, and the next block would pay for that
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            seconds[step // BLOCK], began = now - began, now
            here.beat = beat if (step + 1) // BLOCK % 2 else lambda step, phase: None

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 10),
    )
    samples = TensorDataset(torch.randn(2048, 1, 28, 28), torch.randint(10, (2048,)))
    steps = len(seconds) * BLOCK
    job = Job(
        train=Train(steps=steps), data=Data(batch_size=32), checkpoint=Checkpoint(every=steps)
    )
    Snapshotter.step = timed  # type: ignore[method-assign]
    try:
        raydist.fit(job, model=net, train=samples, loss=nn.functional.cross_entropy)
    finally:
        Snapshotter.step, here.beat = real, beat  # type: ignore[method-assign]
    # before the third block memory is fetched for the first time
    return [(seconds[block], seconds[block - 1]) for block in range(3, 2 * blocks + 3, 2)], spent


def stalled(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """On the only rank: by side and turn, seconds that the call took, and the steps that the loop
    made less than at the turn's end while the state was written, in seconds of the loop."""
    import torch
    from torch import nn

    from raydist.worker import checkpoint

    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    state = {"model": net.state_dict(), "table": torch.randn(STATE // 4)}
    x, y = torch.randn(64, 256), torch.randint(10, (64,))
    saves: dict[str, Callable[[int], object]] = {
        "none": lambda step: None,
        "save": lambda step: checkpoint.save(step, state),
        "save(wait=True)": lambda step: checkpoint.save(step, state, wait=True),
    }

    def steps_until(end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            count += 1
            nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return count

    told: dict[str, list[tuple[float, float]]] = {side: [] for side in saves}
    for turn in range(rounds + 1):
        for number, (side, save) in enumerate(saves.items()):
            checkpoint.settle()
            began = time.perf_counter()
            save(turn * len(saves) + number)
            back = time.perf_counter()
            beside = steps_until(back + WRITTEN_S)
            alone = steps_until(began + TURN_S) / (began + TURN_S - back - WRITTEN_S)
            if turn:  # the first fetches memory
                told[side].append((back - began, WRITTEN_S - beside / alone))
    return told


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """By how much the first of all pairs are more than the second, in percent; and where that lies
    19 times of 20, by drawing pairs again and again (bootstrap, Efron 1979)."""

    def more(some: Sequence[tuple[float, float]]) -> float:
        return 100 * (sum(one for one, _ in some) / sum(other for _, other in some) - 1)

    drawn = sorted(more(random.choices(pairs, k=len(pairs))) for _ in range(1000))
    return more(pairs), drawn[25], drawn[974]


def snapshots(rounds: int, folder: str) -> tuple[float, float, float, float, int]:
    """What snapshots and heartbeats cost in percent: by the rank's own clock; by turns, with its
    interval; of how many pairs of blocks."""
    import raydist

    print("keeping: snapshots", flush=True)
    words = (
        f"scale=1x{RANKS}",
        f"backend={BACKEND}",
        "watch.progress=none",
        "checkpoint.keep=1",
        "restart=none",  # ranks that began again would have measured only a part
        f"hang.end={not SMALL}",  # eight ranks on two cores seem to hang now and then
    )
    done = raydist.run(
        kept, *words, f"hydra.run.dir={folder}/snapshots", args=(BLOCKS * rounds,)
    ).values[0]
    assert done is not None
    pairs, spent = done
    return 100 * spent / sum(on for on, _ in pairs), *interval(pairs), len(pairs)


def main(rounds: int = 5) -> list[str]:
    """The tables' rows."""
    import ray

    import raydist

    ray.init(
        "local", num_cpus=RANKS, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    same = (f"backend={BACKEND}", "watch.progress=none", "checkpoint.keep=1")
    with tempfile.TemporaryDirectory() as folder:
        own, cost, least, most, blocks = snapshots(rounds, folder)
        print("keeping: a save of 1 GB", flush=True)
        told = raydist.run(
            stalled, "scale=1x1", *same, f"hydra.run.dir={folder}/saves", args=(rounds,)
        ).values[0]
    ray.shutdown()
    assert told is not None
    rows = [
        "| snapshots, by the rank's own clock | snapshots and heartbeats, by turns | 95% of it | "
        "pairs of blocks |",
        "|---|---|---|---|",
        f"| {own:.2f}% | {cost:.2f}% | {least:.2f}% to {most:.2f}% | {blocks} |",
        "",
        f"| 1 GB, once in {TURN_S:g} s | the call returns after | of {TURN_S:g} s | lost beside "
        "the writer |",
        "|---|---|---|---|",
    ]
    for side, turns in told.items():
        call, beside = (statistics.median(each) for each in zip(*turns, strict=True))
        rows.append(
            f"| `{side}` | {call:.3f} s | {100 * call / TURN_S:.2f}% | "
            f"{100 * beside / TURN_S:.2f}% |"
        )
    return rows
