"""Ranks, hosts and counts as text. (pure)"""

from __future__ import annotations

from collections.abc import Collection, Iterable

HOSTS_NAMED = 4
"""`joined_names` lists this many names and counts the others."""


def rank_ranges(ranks: Iterable[int]) -> str:
    """Format ranks as ranges: `0-3, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def name_ranks(ranks: Iterable[int]) -> str:
    """Format ranks with their noun: `rank 1`, `ranks 0-3, 7`."""
    ranges = rank_ranges(ranks)
    return f"rank{'' if ranges.isdigit() else 's'} {ranges}"


def joined_names(names: Iterable[str]) -> str:
    """Join the first HOSTS_NAMED names and count the others: `a, b, c, d and 3 more`."""
    listed = list(names)
    more = len(listed) - HOSTS_NAMED
    return ", ".join(listed[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def counted(n: int, noun: str) -> str:
    """Format a count with its noun: `1 node`, `2 nodes`."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def of_ranks(text: str, ranks: Collection[int]) -> str:
    """Append the ranks that report a line: ` (ranks 0-2)`.

    A line that already begins with its only rank stays as it is.
    """
    if len(ranks) == 1 and text.startswith(f"rank {min(ranks)} "):
        return text
    return f"{text} ({name_ranks(ranks)})"
