"""Which rank slows the others, by each rank's own work in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.recovery.straggler import (
    CHECK_S,
    LASTING,
    Own,
    Pauses,
    Stragglers,
    median_without,
    pauses_text,
    slower,
    straggler_text,
)
from raydist.settings import compose
from tests.records import read_events

HOSTS = ["a", "a", "b", "b"]


def paces(*own_ms: float, step_ms: float = 100, steps: int = 64) -> dict[int, Own]:
    return {rank: (steps, own / 1e3, step_ms / 1e3) for rank, own in enumerate(own_ms)}


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ((50, 50, 50, 62), [3]),
        ((50, 62, 50, 62), [1, 3]),  # the median of the others is what two of them need
        ((50, 50, 50, 58), []),  # 8% of a step
        ((62, 62, 62, 62), []),
        ((10, 60, 60, 60), []),  # one is fast
    ],
)
def test_who_is_slow(own: tuple[float, ...], slow: list[int]) -> None:
    assert [each.rank for each in slower(paces(*own), HOSTS, 10)] == slow


def test_steps_of_microseconds_are_not_worth_a_word() -> None:
    assert not slower(paces(0.1, 0.1, 0.1, 0.9, step_ms=1), HOSTS, 10)


def test_the_median_of_the_others() -> None:
    for ordered in ([1.0, 2.0], [1.0, 2.0, 5.0], [1.0, 2.0, 5.0, 9.0]):
        for i, one in enumerate(ordered):
            left = ordered[:i] + ordered[i + 1 :]
            middle = (left[(len(left) - 1) // 2] + left[len(left) // 2]) / 2
            assert median_without(ordered, one) == middle


def looks(stragglers: Stragglers, *own: tuple[float, ...], steps: int = 64) -> list[list[int]]:
    """Return the ranks that are named at each look."""
    result = []
    for number, each in enumerate(own, start=1):
        named: list[int] = []
        for rank, one in paces(*each, steps=number * steps).items():
            named += [
                slow.rank for slow in stragglers.note(rank, one, number * CHECK_S + rank * 0.01)
            ]
        result.append(named)
    return result


def test_who_collects_garbage_for_long_is_named_once() -> None:
    pauses, reported = Pauses(HOSTS), []
    for look in range(12):
        shares = (
            0.01,
            0.04,
            0.09 if look else 0.0,
            0.2 if look > 6 or look % 2 else 0.0,
        )
        reported += [
            pauses.note(rank, share, look * CHECK_S + rank * 0.01)
            for rank, share in enumerate(shares)
        ]
    events = [event for event in reported if event]
    assert [[each["rank"] for each in event.ranks] for event in events] == [[2], [2, 3]]
    assert events[0].ranks[0] == {"rank": 2, "host": "b", "pauses": 0.09}
    assert events[0].text.startswith("rank 2 on b: Python's garbage collector takes 9% of the time")
    assert (
        "ranks 2-3 on b: Python's garbage collector takes up to 20% of the time" in events[1].text
    )
    assert "train.gc=100" in events[1].text
    assert "train.gc=" not in pauses_text([0], ["a"], {0: 0.1}, together=100)  # it is set already


def test_only_who_is_slow_for_long_is_named_and_once() -> None:
    slow, well = (50.0, 50.0, 50.0, 70.0), (50.0, 50.0, 50.0, 50.0)
    many = [slow] * (LASTING + 4)
    assert [ranks for ranks in looks(Stragglers(HOSTS, 10), *many) if ranks] == [[3]]
    assert not any(looks(Stragglers(HOSTS, 10), slow, well, slow, slow, well, slow, well, slow))
    assert not any(looks(Stragglers(HOSTS, 0), *many))


def test_a_rank_that_has_recovered_is_not_slow_at_the_end() -> None:
    """It counted as an incident of its node, which was avoided after the second."""
    slow, even = (50.0, 50.0, 50.0, 62.0), (50.0, 50.0, 50.0, 50.0)
    stragglers = Stragglers(HOSTS, 10)
    looks(stragglers, *[slow] * 8, even)
    assert [each.rank for each in stragglers.slow_now] == [3]
    stragglers = Stragglers(HOSTS, 10)
    looks(stragglers, *[slow] * 8, *[even] * 8)
    assert stragglers.slow_now == []


def test_a_run_that_stands_still_tells_nothing_new() -> None:
    stragglers = Stragglers(HOSTS, 10)
    for number in range(20):
        for rank, own in paces(50, 50, 50, 70).items():
            assert not stragglers.note(rank, own, number * CHECK_S + rank * 0.01)


def test_its_words() -> None:
    (slow,) = slower(paces(50, 50, 50, 62), HOSTS, 10)
    assert straggler_text([slow]) == (
        "rank 3 on b slows the others: its own work takes 62 ms of a step, the median of the "
        "others 50 ms; "
        "at their pace a step would take 12% less"
    )
    both = slower(paces(50, 50, 50, 50, 50, 62, 62), [*HOSTS, "c", "c", "c"], 10)
    assert straggler_text(both).startswith("ranks 5-6 on c slow the others: their own work")


FIT = """
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.03 if raydist.rank().rank == 1 else 0.01)
        return x


def job(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Slow(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
    return raydist.fit(config, model=model, train=data, loss=nn.functional.cross_entropy)
"""

OWN = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    time.sleep(0.03 if dist.get_rank() == 1 else 0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.ray
@pytest.mark.parametrize("how", ["ddp", "horovod", "script"])
def test_a_slow_rank_is_named_and_who_waits_for_it_is_not(
    on_ray: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydist.flow import run_job
    from raydist.recovery import straggler

    if how == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not built: raydist horovod build")
    monkeypatch.setattr(straggler, "CHECK_S", 0.5)
    (on_ray / "slow.py").write_text(OWN if how == "script" else FIT)
    words = {
        "ddp": ["job=slow.py", "train.steps=200", "train.epochs=1000"],
        "horovod": ["job=slow.py", "train.steps=200", "train.epochs=1000", "backend=horovod"],
        "script": ["script=slow.py", "watch.output=none"],
    }[how]
    job = compose.compose([*words, "scale=1x2", "checkpoint.every=1000"], claim=True)
    done = run_job(job)
    (event,) = [
        happened
        for happened in read_events(done.dir / "events.jsonl")
        if happened["kind"] == "slow"
    ]
    (slow,) = event["ranks"]
    assert slow["rank"] == 1
    own, step = done.work["1"]
    assert 0.02 < own <= step  # it sleeps 30 ms
    assert done.work["0"][0] < own - 0.01  # and the other, which waits for it, only 10
    assert done.to_json()["slow"]["text"] == event["text"]
