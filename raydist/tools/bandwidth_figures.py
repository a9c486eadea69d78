"""Times -> algorithm and bus bandwidth, who meets whom, which pair or node is slow, and how it compares. (pure)"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raydist.errors import ConfigError

OPS = (
    "sendrecv", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier",
)  # fmt: skip
SHARED = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
"""Their size is that of all ranks' shares together."""
SLOW = 0.7
"""A pair, or a node, below so much of the median is slow."""
PASS, WARN = 0.8, 0.5
"""Of what a port could do: fine from PASS on, poor from WARN on."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One operation at one size."""

    op: str
    size: int
    """Bytes, as nccl-tests counts them: for all_gather and its like, those of all ranks together."""
    time_us: float | None
    """Of one call on the slowest rank; None where the backend does not have the operation."""
    algbw: float = 0.0
    """GB/s (1e9 bytes): size over time."""
    busbw: float = 0.0
    """GB/s: what the slowest link carried, whatever the number of ranks."""
    wrong: int = 0
    """Elements that came out wrong, over all ranks."""


def row(op: str, size: int, seconds: float | None, wrong: int, ranks: int) -> Row:
    """The figures of one measurement.

    Source: nccl-tests, doc/PERFORMANCE.md, and the getBw of each of its src/*.cu.
    """
    if seconds is None:
        return Row(op, size, None)
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return Row(op, size, seconds * 1e6, algbw, algbw * factor(op, ranks), wrong)


def factor(op: str, ranks: int) -> float:
    """busbw / algbw."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARED else 1.0


def elements(op: str, size: int, ranks: int) -> int:
    """float32 numbers of a message of about `size` bytes; the same for all ranks, and at least one for each."""
    count = max(1, size // 4)
    return max(ranks, count // ranks * ranks) if op in SHARED else count


def sizes(low: int, high: int, by: float) -> list[int]:
    """From `low` to `high` bytes, each `by` times the one before."""
    found = [low]
    while math.floor(found[-1] * by) <= high:
        found.append(math.floor(found[-1] * by))
    return found


def in_bytes(flag: str, text: str) -> int:
    """The bytes that `64M` says; K, M and G are powers of 1024, as in nccl-tests."""
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        digits = re.match(r"[1-9]\d*", text)
        raise ConfigError(
            f"{flag} {text}: no size; say {flag} {digits[0] if digits else '64'}M, or K, G, or plain bytes"
        )
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def rounds(n: int) -> list[list[Pair]]:
    """A tournament of everyone against everyone: rounds of pairs that have nobody in common (the circle method).

    n-1 rounds for an even number, n for an odd one, in each of which one has nobody to meet.
    """
    circle: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        found.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def slow(matrix: Mapping[Pair, float]) -> tuple[list[int], list[Pair]]:
    """The slow nodes, and the slow pairs among the others.

    A node counts by its best pair: one slow node of three makes two of the three pairs slow, and their median too.
    """
    every = sorted({node for pair in matrix for node in pair})
    best = {node: max(speed for pair, speed in matrix.items() if node in pair) for node in every}
    # of two nodes nobody can tell which one it is
    usual = statistics.median(best.values()) if len(every) > 2 else 0.0
    nodes = [node for node in every if best[node] < SLOW * usual]
    rest = {pair: speed for pair, speed in matrix.items() if not set(pair) & set(nodes)}
    middle = statistics.median(rest.values()) if rest else 0.0
    return nodes, [pair for pair, speed in sorted(rest.items()) if speed < SLOW * middle]


def verdict(measured: float, possible: float) -> str:
    """`11.2 of 12.5 GB/s, 90%: PASS`.

    No cap at 100%: two nodes may reduce by a tree, which carries less than the ring that busbw counts with.
    """
    share = measured / possible
    word = "PASS" if share >= PASS else "WARN" if share >= WARN else "FAIL"
    return f"{measured:.3g} of {possible:.3g} GB/s, {share:.0%}: {word}"


def size_text(size: float) -> str:
    """`64M`."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def as_table(rows: Sequence[Row], backend: str) -> list[list[str]]:
    """The rows as cells under a row of headings."""
    head = ["op", "size", "time us", "algbw GB/s", "busbw GB/s", "wrong"]
    return [head, *(_cells(one, backend) for one in rows)]


def _cells(one: Row, backend: str) -> list[str]:
    if one.time_us is None:
        return [one.op, "", f"not in {backend}", "", "", ""]
    if one.op == "barrier":
        return [one.op, "", f"{one.time_us:.1f}", "", "", ""]
    return [one.op, size_text(one.size), f"{one.time_us:.1f}", f"{one.algbw:.3f}", f"{one.busbw:.3f}", str(one.wrong)]


def as_matrix(matrix: Mapping[Pair, float], names: Sequence[str]) -> list[list[str]]:
    """GB/s of every pair as cells, with a row and a column for each node."""

    def cell(a: int, b: int) -> str:
        return "-" if a == b else f"{matrix[min(a, b), max(a, b)]:.3f}"

    return [["GB/s", *names], *([name, *(cell(a, b) for b in range(len(names)))] for a, name in enumerate(names))]


def told_slow(matrix: Mapping[Pair, float], names: Sequence[str]) -> Iterator[str]:
    """A line for each slow node and pair."""
    nodes, pairs = slow(matrix)
    usual = statistics.median(speed for pair, speed in matrix.items() if not set(pair) & set(nodes))
    for node in nodes:
        best = max(speed for pair, speed in matrix.items() if node in pair)
        yield f"slow node: {names[node]}: {best:.3f} GB/s at best, {usual:.3f} between the others"
    for a, b in pairs:
        yield f"slow pair: {names[a]} and {names[b]}: {matrix[a, b]:.3f} GB/s, {usual:.3f} between the others"
