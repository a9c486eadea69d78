"""The doctor's report: a table of nodes and checks, findings with fixes, a verdict. (driver)"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, TypedDict

from raydist.cluster.placement import Plan
from raydist.messages.checkup import Trip
from raydist.network.finding import LEVELS, Finding, fold_findings
from raydist.reporting import wording
from raydist.shared.rank_names import counted, joined_names
from raydist.tools.doctor_findings import CHECKS, Host

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = {"note": "note", "warn": "warn", "fail": "FAIL"}
STATES = ("ok", *SHOWN.values())
COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "FAIL": "bold red", "": ""}
ROWS_SHOWN = 16
FINDINGS_SHOWN = 12
"""Maximum number of findings of one level that are shown; --json has all."""


class NetworkData(TypedDict):
    """Round trips between nodes."""

    calls: int
    took_s: float
    rtt_median_ms: float
    rtt_most_ms: float
    rtt_most: tuple[str, str]
    """Caller and called of the longest round trip."""


@dataclass
class Report:
    """The checks that were run, and their findings."""

    hosts: Sequence[Host] = ()
    summary: str = ""
    """Ranks, nodes, backend, network: one line."""
    gpus: bool = False
    checks: dict[str, list[Finding]] = field(default_factory=dict)
    """Findings by check, for each check that was run; empty for a check that passed."""
    trips: Sequence[Sequence[Trip] | None] = ()
    """Connections by caller, then by called node; None for a caller that did not answer."""
    took_s: float = 0.0
    """Total seconds of the calls from every node to every other node."""

    def note_check(self, check: str) -> None:
        """Record that a check was run."""
        self.checks.setdefault(check, [])

    def add(self, check: str, *findings: Finding) -> None:
        """Record a check and its findings, if any."""
        self.checks.setdefault(check, []).extend(findings)

    def describe(self, plan: Plan, hosts: Sequence[Host]) -> None:
        """Record the nodes and the job."""
        self.hosts = hosts
        self.gpus = bool(plan.request.rank_resources.get("GPU"))
        over = ", ".join(sorted({host.interface for host in hosts}))
        nodes = counted(len(hosts), "node")
        self.summary = (
            f"{counted(plan.world_size, 'rank')} on {nodes}, backend "
            f"{plan.request.backend}, over {over}"
        )

    def note_trips(self, trips: Sequence[Sequence[Trip] | None], took_s: float) -> None:
        """Record the calls from every node to every other node."""
        self.trips = trips
        self.took_s = took_s

    @property
    def findings(self) -> list[Finding]:
        """All findings, the worst first, otherwise in the order of the checks."""
        return fold_findings(
            finding for check in self.checks_made for finding in self.checks[check]
        )

    @property
    def checks_made(self) -> list[str]:
        """The checks that were run, in the order of CHECKS: causes before their effects."""
        order = [*CHECKS]
        return sorted(
            self.checks, key=lambda check: order.index(check) if check in order else len(order)
        )

    @property
    def broken(self) -> bool:
        """Whether the job would fail, or run in another way than its settings specify."""
        return any(finding.level == "fail" for finding in self.findings)

    def state(self, check: str, host: Host) -> str:
        """Return `ok`, or the worst level of this check's findings for this node."""
        levels = [f.level for f in self.checks[check] if host.name in f.nodes or not f.nodes]
        return SHOWN[max(levels, key=LEVELS.index)] if levels else "ok"

    @property
    def verdict(self) -> str:
        """The report in one line."""
        failed = [
            check
            for check in self.checks_made
            if any(finding.level == "fail" for finding in self.checks[check])
        ]
        warned = sum(finding.level == "warn" for finding in self.findings)
        warnings = f", {counted(warned, 'warning')}" if warned else ""
        checks = counted(len(self.checks), "check")
        if failed:
            return (
                f"this job would break: {', '.join(failed)} ({len(failed)} of {checks} "
                f"failed{warnings})"
            )
        return f"this job can run: {checks}, none failed{warnings}"


def round_trips(report: Report) -> list[tuple[float, str, str]]:
    """Return (seconds, caller, called) of every call that succeeded."""
    return [
        (trip.rtt_s, report.hosts[caller].name, report.hosts[called].name)
        for caller, row in enumerate(report.trips)
        for called, trip in enumerate(row or ())
        if caller != called and trip.rtt_s
    ]


def report_as_data(report: Report) -> dict[str, Any]:
    """Return the report for --json."""
    return {
        "ok": not report.broken,
        "verdict": report.verdict,
        "job": report.summary,
        "nodes": [asdict(host) for host in report.hosts],
        "checks": {
            check: {host.name: report.state(check, host) for host in report.hosts}
            for check in report.checks_made
        },
        "findings": [asdict(finding) for finding in report.findings],
        "network": network_data(report),
    }


def network_data(report: Report) -> NetworkData | None:
    """Return the median and longest round trip; None if no call succeeded."""
    trips = sorted(round_trips(report))
    if not trips:
        return None
    most, caller, called = trips[-1]
    return {
        "calls": sum(len(row) - 1 for row in report.trips if row),
        "took_s": report.took_s,
        "rtt_median_ms": 1e3 * median(rtt for rtt, _, _ in trips),
        "rtt_most_ms": 1e3 * most,
        "rtt_most": (caller, called),
    }


def show_report(report: Report, as_json: bool) -> None:
    """Print the report, with colours on a terminal."""
    if as_json:
        print(json.dumps(report_as_data(report), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for line in header_lines(report, console.width):
        console.print(line, soft_wrap=True)
    if table := rows(report):
        console.print()
        console.print(
            rich_table(table) if console.is_terminal else "\n".join(wording.table(table)),
            soft_wrap=True,
        )
    for line in finding_lines(report, console.width):
        console.print(line, soft_wrap=True, style=COLOURS.get(line.partition(" ")[0], ""))
    style = "bold red" if report.broken else "bold green"
    console.print(f"\n{report.verdict}", style=style, soft_wrap=True)


def rich_table(table: Sequence[Sequence[str]]) -> Table:
    """Return the rows as a table of rich, with colours."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in table[0]:
        drawn.add_column(name, overflow="fold")
    for name, *states in table[1:]:
        drawn.add_row(name, *(Text(state, COLOURS[state]) for state in states))
    return drawn


def header_lines(report: Report, width: int) -> Iterator[str]:
    """Yield the job, the round trips, and the checks that passed on all nodes."""
    if report.summary:
        yield f"job   {report.summary}"
    if network := network_data(report):
        longest = " -> ".join(network["rtt_most"])
        yield (
            f"calls {network['calls']} from node to node in {report.took_s:.1f} s; a round trip "
            "takes "
            f"{network['rtt_median_ms']:.2f} ms, {network['rtt_most_ms']:.2f} ms at most "
            f"({longest})"
        )
    if fine := [check for check in report.checks_made if not report.checks[check]]:
        yield from wrapped("fine  ", ", ".join(fine), width)


def finding_lines(report: Report, width: int) -> Iterator[str]:
    """Yield each finding, and its fix."""
    for level in reversed(LEVELS):
        findings = [finding for finding in report.findings if finding.level == level]
        for finding in findings[:FINDINGS_SHOWN]:
            yield ""
            yield from wrapped(f"{SHOWN[level]:<5} ", finding_text(report, finding), width)
            if finding.fix:
                yield from wrapped("fix   ", finding.fix, width)
        if len(findings) > FINDINGS_SHOWN:
            more = len(findings) - FINDINGS_SHOWN
            yield f"\n... and {more} more of level {SHOWN[level]}: --json has all"
    if report.gpus and not report.broken:
        measures = "measures the network that NCCL uses"
        yield f"\nnext  raydist bandwidth with the same overrides {measures}"


def finding_text(report: Report, finding: Finding) -> str:
    """Format a finding as `gloo on host1, host2: text`, without hosts that the text names."""
    named = not finding.nodes or any(node in finding.text for node in finding.nodes)
    everywhere = len(finding.nodes) == len(report.hosts)
    where = (
        "" if named else " on every node" if everywhere else f" on {joined_names(finding.nodes)}"
    )
    return f"{finding.check}{where}: {finding.text}"


def wrapped(head: str, text: str, width: int) -> list[str]:
    """Wrap text next to its heading between words, so that commands can be copied."""
    return textwrap.wrap(
        text,
        max(60, min(120, width)),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def rows(report: Report) -> list[list[str]]:
    """Return a table of nodes and checks, without checks that passed everywhere.

    Equal nodes share a row, the worst first.
    """
    shown = [check for check in report.checks_made if report.checks[check]]
    if not shown or not report.hosts:
        return []
    hosts_with: dict[tuple[str, ...], list[str]] = {}
    for host in report.hosts:
        hosts_with.setdefault(tuple(report.state(check, host) for check in shown), []).append(
            host.name
        )
    worst = sorted(
        hosts_with.items(), key=lambda item: [-item[0].count(state) for state in reversed(STATES)]
    )
    body = [[joined_names(names), *states] for states, names in worst]
    more = (
        [[f"... and {len(body) - ROWS_SHOWN} more rows", *("" for _ in shown)]]
        if len(body) > ROWS_SHOWN
        else []
    )
    return [["node", *shown], *body[:ROWS_SHOWN], *more]
