"""What ranks are doing -> lines for a person."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.messages.agent import RankActivity, StackWay
from raydist.watch.operate.folding import Seen, describe, fold, one_line, seen_of

LIBRARY = "/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
REDUCES = [
    (LIBRARY, 9, "all_reduce"),
    (LIBRARY, 3, "wrapper"),
    ("/home/me/train.py", 81, "step"),
    ("<frozen runpy>", 1, ""),
]
SLEEPS = [("/home/me/train.py", 31, "rest"), ("/home/me/train.py", 90, "main")]
LOADS = [
    ("/x/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 9, "__next__"),
    ("/home/me/train.py", 40, "main"),
]
LIBRARY_ONLY = [(LIBRARY, 9, "barrier")]


def seen(
    rank: int,
    frames: list[tuple[str, int, str]],
    state: str = "S",
    way: StackWay = "thread",
    collectives: tuple[Any, ...] = (),
) -> Seen:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    stack = "\n".join(["Current thread 0x1 (most recent call first):", *lines]) if frames else ""
    found = RankActivity(100 + rank, state, 0.0, stack, collectives, way=way)
    return seen_of(rank, "node-1", found, None)


def source(file: str, line: int) -> str:
    return "time.sleep(60)" if line == 31 else ""


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [*(seen(rank, REDUCES) for rank in range(3)), seen(3, SLEEPS)],
            "rank 3: time.sleep(60) at train.py:31; ranks 0-2: all_reduce at train.py:81",
        ),
        (
            [seen(0, REDUCES), seen(1, [], "T", "")],
            "rank 1: stopped by a signal (SIGSTOP); kill -CONT 101 wakes it; "
            "rank 0: all_reduce at train.py:81",
        ),
        ([seen(0, REDUCES), seen(1, SLEEPS)], "rank 1: time.sleep(60) at train.py:31; rank 0: "),
        ([seen(0, SLEEPS), seen(1, SLEEPS, way="signal")], "rank 1: time.sleep(60) at train.py:31"),
        ([seen(0, [], way="")], "rank 0: no Python stack: it is outside of Python"),
        ([seen(0, [], "D", "")], "rank 0: waits for a disk or a device: it is outside of Python"),
        ([seen(0, LOADS)], "rank 0: waits for its data loader at train.py:40"),
        ([seen(0, LIBRARY_ONLY)], "rank 0: barrier at distributed_c10d.py:9"),
        ([seen(0, SLEEPS[1:])], "rank 0: main at train.py:90"),
        ([], ""),
    ],
)
def test_equal_stacks_are_one_entry_and_the_odd_one_is_first(ranks: list[Seen], text: str) -> None:
    assert one_line(fold(ranks), source).startswith(text)


def test_the_last_collectives_are_named_with_the_ranks_where_they_differ() -> None:
    def entry(number: int, retired: bool) -> dict[str, Any]:
        name = {"profiling_name": "gloo:all_reduce", "input_sizes": [[3]], "is_p2p": False}
        return {**name, "collective_seq_id": number, "retired": retired, "process_group": ["0"]}

    ranks = [
        seen(0, REDUCES, collectives=(entry(4, True), entry(5, False))),
        seen(1, REDUCES, collectives=(entry(4, True),)),
    ]
    lines = [line.strip() for line in describe(fold(ranks), source)]
    assert "waits in all_reduce of [[3]], number 5 (rank 0)" in lines
    assert "its last collective: all_reduce of [[3]], number 4 (rank 1)" in lines
    assert lines[-1] == 'File "/x/lib/python3.11/site-packages/torch/distributed/' + (
        'distributed_c10d.py", line 9, in all_reduce'
    )
