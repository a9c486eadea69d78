"""Whole runs on a stream and on Ray Data, in which a rank is killed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.reporting.result import Result
from tests import faults
from tests.faults import Fault, kill
from tests.scenarios.test_restart_run import losses
from tests.training.test_sources import SIZE, Net, Placed, tensors

pytestmark = pytest.mark.ray
WORDS = (
    "scale=1x2",
    "backend=gloo",
    "watch.progress=none",
    "train.steps=20",
    "data.batch_size=6",
    "snapshot.every=1",
)


def learn(config: Any, source: Any, struck: tuple[Fault, ...] = ()) -> list[list[int]]:
    """Train; return the samples of each forward pass of this rank since the last restart."""
    faults.add_faults(*struck)
    net = Net()
    raydist.fit(config, model=net, train=source(), loss=faults.cross_entropy)
    return net.seen


def test_a_killed_rank_costs_a_source_no_sample(on_ray: Path) -> None:
    def run(*struck: Fault) -> Result[Any]:
        return raydist.run(learn, *WORDS, "group=inline", source=Placed, struck=struck)

    whole, again = run(), run(kill(1, 11))
    assert [end.step for end in again.restarts] == [11]
    assert losses(again) == losses(whole)
    for before, after in zip(whole.values, again.values, strict=True):
        assert before is not None
        assert after is not None
        assert after[1:] == before[11:]  # the first of them is looked at before the state is loaded


def rows() -> Any:
    import ray.data

    x, y = tensors()
    items = [{"x": row, "y": label} for row, label in zip(x.numpy(), y.tolist(), strict=True)]
    return ray.data.from_items(items, override_num_blocks=8)


@pytest.mark.skipif(
    not importlib.util.find_spec("pyarrow"),
    reason="Ray Data needs pyarrow: pip install 'ray[data]'",
)
def test_ray_data_gives_each_row_to_one_rank_and_begins_the_epoch_anew(
    on_ray: Path, ray_address: str
) -> None:
    words = (
        *WORDS,
        f"env.RAY_ADDRESS={ray_address}",
        "group=ray",
        "parallel=fsdp",
        "parallel.blocks=Linear",
    )
    done = raydist.run(learn, *words, source=rows, struck=(kill(1, 3),))
    assert done.status == "finished"
    assert [end.step for end in done.restarts] == [3]
    seen = [each for each in done.values if each]
    for epoch in (0, 1):
        taken = [
            number for each in seen for step in each[8 * epoch : 8 * epoch + 8] for number in step
        ]
        assert sorted(taken) == list(range(SIZE))
    assert any(
        "train=MaterializedDataset: the order of Ray Data cannot be reproduced" in text
        for text in done.warnings
    )
    assert any(
        "Ray Data: epoch 1 starts again from its first sample" in text for text in done.warnings
    )
