"""Times -> algorithm and bus bandwidth, schedule of pairs, slow nodes and pairs, verdict. (pure)"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from raydist.shared.errors import ConfigError

OPS = (
    "sendrecv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
SHARED = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
"""Operations whose size counts the shares of all ranks together."""
SLOW = 0.7
"""A pair or node is slow below this fraction of the median."""
PASS, WARN = 0.8, 0.5
"""Fractions of the port's rate: PASS from the first, WARN from the second, FAIL below."""

Pair = tuple[int, int]


class RankRow(TypedDict):
    """One operation at one size, as one rank measured it."""

    op: str
    size: int
    """Bytes."""
    seconds: float | None
    """Seconds of one call; None if the backend lacks the operation."""
    wrong: int
    """Wrong elements."""


class RankMeasurement(TypedDict):
    """The results of one rank."""

    rows: list[RankRow]
    pairs: list[tuple[int, int, float]]
    """(rank, rank, GB/s in each direction)."""


@dataclass(frozen=True)
class Row:
    """One operation at one size, over all ranks."""

    op: str
    size: int
    """Bytes, as nccl-tests counts them: for the operations in SHARED, those of all ranks
    together."""
    time_us: float | None
    """Microseconds of one call on the slowest rank; None if the backend lacks the operation."""
    algbw: float = 0.0
    """GB/s (1e9 bytes): size / time."""
    busbw: float = 0.0
    """GB/s of the slowest link: independent of the number of ranks."""
    wrong: int = 0
    """Wrong elements, over all ranks."""


def row(op: str, size: int, seconds: float | None, wrong: int, ranks: int) -> Row:
    """Return the figures of one measurement.

    Source: nccl-tests, doc/PERFORMANCE.md, and the getBw of each of its src/*.cu.
    """
    if seconds is None:
        return Row(op, size, None)
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return Row(op, size, seconds * 1e6, algbw, algbw * factor(op, ranks), wrong)


def factor(op: str, ranks: int) -> float:
    """Return busbw / algbw."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARED else 1.0


def elements(op: str, size: int, ranks: int) -> int:
    """Return the number of float32 elements of a message of about `size` bytes.

    For each rank there is at least one, and the shares are equal.
    """
    count = max(1, size // 4)
    return max(ranks, count // ranks * ranks) if op in SHARED else count


def message_sizes(low: int, high: int, by: float) -> list[int]:
    """Return sizes in bytes from `low` to `high`, each `by` times the previous one.

    Each is at least a byte larger than the previous one. The last one is `high`, however far from
    the previous one.
    """
    sizes, size = [], low
    while size < high:
        sizes.append(size)
        size = max(size + 1, math.floor(size * by))
    return [*sizes, high]


def in_bytes(flag: str, text: str) -> int:
    """Return the bytes of `64M`; K, M and G are powers of 1024, as in nccl-tests."""
    match = re.fullmatch(r"(\d+)([KMG]?)i?B?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        digits = re.match(r"[1-9]\d*", text)
        cause = "must be a size: bytes, or a number with K, M or G"
        raise ConfigError.of(flag, text, cause, f"{flag} {digits[0] if digits else '64'}M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def rounds(n: int) -> list[list[Pair]]:
    """Return all pairs of n in rounds; no member is in two pairs of a round.

    The method is the circle method of a round-robin tournament. An even n takes n-1 rounds; an odd
    n takes n, and one member pauses in each.
    """
    circle: list[int | None] = [*range(n), *([None] if n % 2 else [])]
    schedule = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        schedule.append(
            [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        )
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def slow(matrix: Mapping[Pair, float]) -> tuple[list[int], list[Pair]]:
    """Return the slow nodes, and the slow pairs among the other nodes.

    A node is judged by its best pair: one slow node of three makes two of three pairs slow, and
    with them the median.
    """
    every = sorted({node for pair in matrix for node in pair})
    best = {node: max(speed for pair, speed in matrix.items() if node in pair) for node in every}
    # With two nodes the measurement does not show which one is slow.
    usual = statistics.median(best.values()) if len(every) > 2 else 0.0
    nodes = [node for node in every if best[node] < SLOW * usual]
    rest = {pair: speed for pair, speed in matrix.items() if not set(pair) & set(nodes)}
    middle = statistics.median(rest.values()) if rest else 0.0
    return nodes, [pair for pair, speed in sorted(rest.items()) if speed < SLOW * middle]


def bandwidth_verdict(measured: float, possible: float) -> str:
    """Format a verdict: `11.2 of 12.5 GB/s, 90%: PASS`.

    The share may exceed 100%: two nodes may reduce by a tree, which sends less than the ring that
    busbw assumes.
    """
    share = measured / possible
    grade = "PASS" if share >= PASS else "WARN" if share >= WARN else "FAIL"
    return f"{measured:.3g} of {possible:.3g} GB/s, {share:.0%}: {grade}"


def size_text(size: float) -> str:
    """Format a size as `64M`."""
    for unit in ("", "K", "M"):
        if size < 1024:
            return f"{size:.4g}{unit}"
        size /= 1024
    return f"{size:.4g}G"


def as_table(rows: Sequence[Row], backend: str) -> list[list[str]]:
    """Return a table of the rows; the first row is its headings."""
    head = ["op", "size", "time us", "algbw GB/s", "busbw GB/s", "wrong"]
    return [head, *(_cells(each, backend) for each in rows)]


def _cells(of: Row, backend: str) -> list[str]:
    if of.time_us is None:
        return [of.op, "", f"not in {backend}", "", "", ""]
    if of.op == "barrier":
        return [of.op, "", f"{of.time_us:.1f}", "", "", ""]
    return [
        of.op,
        size_text(of.size),
        f"{of.time_us:.1f}",
        f"{of.algbw:.3f}",
        f"{of.busbw:.3f}",
        str(of.wrong),
    ]


def as_matrix(matrix: Mapping[Pair, float], names: Sequence[str]) -> list[list[str]]:
    """Return a table with the GB/s of every pair: a row and a column for each node."""

    def cell(a: int, b: int) -> str:
        return "-" if a == b else f"{matrix[min(a, b), max(a, b)]:.3f}"

    return [
        ["GB/s", *names],
        *([name, *(cell(a, b) for b in range(len(names)))] for a, name in enumerate(names)),
    ]


def slow_lines(matrix: Mapping[Pair, float], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each slow node and pair."""
    nodes, pairs = slow(matrix)
    usual = statistics.median(speed for pair, speed in matrix.items() if not set(pair) & set(nodes))
    for node in nodes:
        best = max(speed for pair, speed in matrix.items() if node in pair)
        yield f"slow node: {names[node]}: {best:.3f} GB/s at best, {usual:.3f} between the others"
    for a, b in pairs:
        speed = f"{matrix[a, b]:.3f} GB/s, {usual:.3f} between the others"
        yield f"slow pair: {names[a]} and {names[b]}: {speed}"
