"""Sweeps on a cluster with room for one gang, with eight trials at a time asked for, round after
round.

Each round has eight trials of two sizes, of which no two have room, and a rank of one of them is
killed. A round that waits without end is one that never returns; what it leaves is counted. Ray
Tune with Ray Train has hung so (ray#47439, ray#47440), and left placement groups (ray#54305).
"""

from __future__ import annotations

import os
import signal
import statistics
from time import time
from typing import Any

CPUS = 2


def meet(config: Any, struck: int) -> float:
    """Every rank hears of all others; in one trial a rank is killed before that, once."""
    import torch

    import raydist

    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if config.seed == struck and raydist.rank().rank == 0 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return total.item()


def sweep_round(number: int, cpus: int = CPUS) -> Any:
    """One sweep, checked; its SweepResult."""
    import raydist

    sizes = f"scale=1x{cpus},1x{cpus // 2 + 1}"
    words = ("seed=range(0,4)", "backend=gloo", "sweep.parallel=8", "watch.progress=none")
    done = raydist.sweep(meet, sizes, *words, struck=number % 4)
    ranks = [cpus] * 4 + [cpus // 2 + 1] * 4
    assert [done.results[each].values for each in range(8)] == [(float(n),) * n for n in ranks]
    restarts = [len(done.results[each].restarts) for each in range(8)]
    assert restarts == [int(each % 4 == number % 4) for each in range(8)], restarts
    return done


def main(rounds: int = 50) -> list[str]:
    """The table's rows."""
    import ray
    from ray.util import placement_group_table

    ray.init(
        "local", num_cpus=CPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    seconds = []
    for number in range(rounds):
        began = time()
        sweep_round(number)
        seconds.append(time() - began)
        left = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
        assert not left, left
    ray.shutdown()
    row = f"| {rounds} | {statistics.median(seconds):.2f} s | {max(seconds):.2f} s | 0 |"
    return [
        "| rounds of 8 trials | median | longest | placement groups left |",
        "|---|---|---|---|",
        row,
    ]
