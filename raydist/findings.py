"""What a check found: what is wrong, where, and what to type to mend it. (pure)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

LEVELS = ("note", "warn", "fail")
"""From the least to the worst: good to know; works, but not as well as it could; the job would break."""
HOSTS_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before the job runs."""

    check: str
    """Which check found it."""
    level: str
    """note, warn or fail."""
    nodes: tuple[str, ...]
    """The hosts that it is about; none: the job as a whole."""
    text: str
    mend: str = ""
    """What to type to mend it."""


def fold(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ only in their nodes as one; the worst first, otherwise in the order they came."""
    equal: dict[Finding, list[str]] = {}
    for finding in findings:
        equal.setdefault(replace(finding, nodes=()), []).extend(finding.nodes)
    found = [replace(finding, nodes=tuple(dict.fromkeys(nodes))) for finding, nodes in equal.items()]
    return sorted(found, key=lambda finding: -LEVELS.index(finding.level))


def named(names: Iterable[str]) -> str:
    """The first few hosts, and how many more there are."""
    every = list(names)
    more = len(every) - HOSTS_NAMED
    return ", ".join(every[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")
