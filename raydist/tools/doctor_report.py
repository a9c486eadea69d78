"""The doctor's report: a table node by check, each finding with what to type, and one verdict. (driver)"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from raydist.findings import LEVELS, Finding, fold, named
from raydist.inventory import count
from raydist.node.peers import Trip
from raydist.placement import Plan
from raydist.tools.doctor_findings import CHECKS, Host
from raydist.watch import wording

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = {"note": "note", "warn": "warn", "fail": "FAIL"}
STATES = ("ok", *SHOWN.values())
COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "FAIL": "bold red", "": ""}
ROWS_SHOWN = 16
FINDINGS_SHOWN = 12
"""Of one level; --json has all."""


@dataclass
class Report:
    """What was checked, and what was found."""

    hosts: Sequence[Host] = ()
    summary: str = ""
    """Ranks, nodes, backend, network: one line."""
    gpus: bool = False
    checks: dict[str, list[Finding]] = field(default_factory=dict)
    """The findings of each check that was made, in order; none where all is fine."""
    trips: Sequence[Sequence[Trip] | None] = ()
    took_s: float = 0.0
    """How long all calls from every node to every other took."""

    def passed(self, check: str) -> None:
        """Note that a check was made."""
        self.checks.setdefault(check, [])

    def add(self, check: str, *findings: Finding) -> None:
        """Note what a check found, if anything."""
        self.checks.setdefault(check, []).extend(findings)

    def describe(self, plan: Plan, hosts: Sequence[Host]) -> None:
        """Note who was looked at."""
        self.hosts = hosts
        self.gpus = bool(plan.ask.rank_resources.get("GPU"))
        over = ", ".join(sorted({host.interface for host in hosts}))
        nodes = count(len(hosts), "node")
        self.summary = f"{count(plan.world_size, 'rank')} on {nodes}, backend {plan.ask.backend}, over {over}"

    def measured(self, trips: Sequence[Sequence[Trip] | None], took_s: float) -> None:
        """Note the calls from every node to every other."""
        self.trips, self.took_s = trips, took_s

    @property
    def findings(self) -> list[Finding]:
        """All of them, the worst first, otherwise in the order of the checks."""
        return fold(finding for check in self.made for finding in self.checks[check])

    @property
    def made(self) -> list[str]:
        """The checks that were made, in the order in which one failure explains the next."""
        order = [*CHECKS]
        return sorted(self.checks, key=lambda check: order.index(check) if check in order else len(order))

    @property
    def broken(self) -> bool:
        """Whether the job would not run, or not as asked."""
        return any(finding.level == "fail" for finding in self.findings)

    def state(self, check: str, host: Host) -> str:
        """`ok`, or the worst that was found about this node."""
        about = [f.level for f in self.checks[check] if host.name in f.nodes or not f.nodes]
        return SHOWN[max(about, key=LEVELS.index)] if about else "ok"

    @property
    def verdict(self) -> str:
        """One line."""
        failed = [check for check in self.made if any(finding.level == "fail" for finding in self.checks[check])]
        warned = sum(finding.level == "warn" for finding in self.findings)
        warnings = f", {count(warned, 'warning')}" if warned else ""
        every = count(len(self.checks), "check")
        if failed:
            return f"this job would break: {', '.join(failed)} ({len(failed)} of {every} failed{warnings})"
        return f"this job can run: {every}, nothing failed{warnings}"


def pairs(report: Report) -> list[tuple[float, str, str]]:
    """(seconds of a round trip, caller, called) of every call that came through."""
    return [
        (trip.rtt_s, report.hosts[caller].name, report.hosts[called].name)
        for caller, row in enumerate(report.trips)
        for called, trip in enumerate(row or ())
        if caller != called and trip.rtt_s
    ]


def as_data(report: Report) -> dict[str, Any]:
    """The report as JSON-able data."""
    return {
        "ok": not report.broken,
        "verdict": report.verdict,
        "job": report.summary,
        "nodes": [asdict(host) for host in report.hosts],
        "checks": {check: {host.name: report.state(check, host) for host in report.hosts} for check in report.made},
        "findings": [asdict(finding) for finding in report.findings],
        "network": network(report),
    }


def network(report: Report) -> dict[str, Any] | None:
    """The round trips, in ms; None where no call came through."""
    there = sorted(pairs(report))
    if not there:
        return None
    most, caller, called = there[-1]
    return {
        "calls": sum(len(row) - 1 for row in report.trips if row),
        "took_s": report.took_s,
        "rtt_median_ms": 1e3 * median(rtt for rtt, _, _ in there),
        "rtt_most_ms": 1e3 * most,
        "rtt_most": [caller, called],
    }


def show(report: Report, as_json: bool) -> None:
    """Print the report: with colours where a terminal is."""
    if as_json:
        print(json.dumps(as_data(report), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for line in above(report, console.width):
        console.print(line, soft_wrap=True)
    if table := rows(report):
        console.print()
        console.print(drawn(table) if console.is_terminal else "\n".join(wording.table(table)), soft_wrap=True)
    for line in below(report, console.width):
        console.print(line, soft_wrap=True, style=COLOURS.get(line.partition(" ")[0], ""))
    style = "bold red" if report.broken else "bold green"
    console.print(f"\n{report.verdict}", style=style, soft_wrap=True)


def drawn(table: Sequence[Sequence[str]]) -> Table:
    """The rows as rich draws them."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in table[0]:
        made.add_column(name, overflow="fold")
    for name, *states in table[1:]:
        made.add_row(name, *(Text(state, COLOURS[state]) for state in states))
    return made


def above(report: Report, width: int) -> Iterator[str]:
    """What was looked at, how long the calls took, and what is fine everywhere."""
    if report.summary:
        yield f"job   {report.summary}"
    if told := network(report):
        yield (
            f"calls {told['calls']} from node to node in {report.took_s:.1f} s; a round trip takes "
            f"{told['rtt_median_ms']:.2f} ms, {told['rtt_most_ms']:.2f} ms at most ({' -> '.join(told['rtt_most'])})"
        )
    if fine := [check for check in report.made if not report.checks[check]]:
        yield from wrapped("fine  ", ", ".join(fine), width)


def below(report: Report, width: int) -> Iterator[str]:
    """Each finding, and what to type."""
    for level in reversed(LEVELS):
        own = [finding for finding in report.findings if finding.level == level]
        for finding in own[:FINDINGS_SHOWN]:
            yield ""
            yield from wrapped(f"{SHOWN[level]:<5} ", about(report, finding), width)
            if finding.mend:
                yield from wrapped("mend  ", finding.mend, width)
        if len(own) > FINDINGS_SHOWN:
            yield f"\n... and {len(own) - FINDINGS_SHOWN} more of these: --json tells of all"
    if report.gpus and not report.broken:
        yield "\nnext  python -m raydist.tools.bandwidth, same words: what NCCL really uses, and how fast"


def about(report: Report, finding: Finding) -> str:
    """`gloo on host1, host2: what is wrong`, without the hosts where the text itself has them."""
    said = not finding.nodes or any(node in finding.text for node in finding.nodes)
    everywhere = len(finding.nodes) == len(report.hosts)
    where = "" if said else " on every node" if everywhere else f" on {named(finding.nodes)}"
    return f"{finding.check}{where}: {finding.text}"


def wrapped(head: str, text: str, width: int) -> list[str]:
    """Text beside its heading, broken where the screen ends; no word is broken, so that it can be copied."""
    return textwrap.wrap(
        text, max(60, min(120, width)), initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def rows(report: Report) -> list[list[str]]:
    """Node by check, without the checks that are fine everywhere; equal nodes are one row, the worst come first."""
    shown = [check for check in report.made if report.checks[check]]
    if not shown or not report.hosts:
        return []
    equal: dict[tuple[str, ...], list[str]] = {}
    for host in report.hosts:
        equal.setdefault(tuple(report.state(check, host) for check in shown), []).append(host.name)
    worst = sorted(equal.items(), key=lambda item: [-item[0].count(state) for state in reversed(STATES)])
    body = [[named(names), *states] for states, names in worst]
    more = [[f"... and {len(body) - ROWS_SHOWN} more rows", *("" for _ in shown)]] if len(body) > ROWS_SHOWN else []
    return [["node", *shown], *body[:ROWS_SHOWN], *more]
