"""Texts and tables for the console: plan, launch, summary; raydist's own text is ASCII. (pure)"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raydist.reporting.progress import PROGRESS_NAMES, number_text, rate_text
from raydist.shared import kinds
from raydist.shared.rank_names import counted, name_ranks, rank_ranges

RANKS_SHOWN = 16
"""With more ranks than this, each node is one row."""
NODES_SHOWN = 32
METRICS_SHOWN = 12
SHOWN_S = 0.005
"""Shorter times are not shown."""

_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def clean(text: str) -> str:
    """Remove colours, cursor movements and other control characters."""
    return _CONTROL.sub("", text)


def flat(text: str) -> str:
    """Apply `clean`, and put the text on one line."""
    return clean(text).replace("\n", " ")


def cluster_line(event: kinds.Cluster) -> str:
    """Return Ray's address, whether this run started it, and its number of nodes.

    Without Ray it is the reason for that.
    """
    if not event.address:
        why = (
            "for a program on one node; group=ray starts one"
            if event.requested == "auto"
            else "group=inline"
        )
        return f"ray   none ({why})"
    at = "started here, at" if event.started else "at"
    return f"ray   {at} {event.address}: {counted(event.nodes, 'node')}"


def plan_line(event: kinds.HasPlan) -> str:
    """Return the number of ranks and nodes, the spares, and the backend."""
    nodes = {slot.get("node", slot.get("ip")) for slot in event.slots}
    hosts = [node["host"] for node in event.spares]
    spares = (
        f", {counted(len(hosts), 'spare')} ({', '.join(hosts)}; warm a few seconds after the "
        "first step)"
        if hosts
        else ""
    )
    ranks = f"{counted(event.world_size, 'rank')} on {counted(len(nodes), 'node')}"
    return f"plan  {ranks}{spares}, backend {event.backend}"


def resize_line(event: kinds.Resize) -> str:
    """Return the number of ranks and nodes from now on, and the number of nodes before."""
    ranks = f"{counted(event.world_size, 'rank')} on {counted(event.nodes, 'node')}"
    return f"resize: continues with {ranks} (before: {counted(event.before, 'node')})"


def slot_rows(slots: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table of the slots: a row of headings, then a row for each rank.

    With many ranks it has a row for each node.
    """
    if len(slots) <= RANKS_SHOWN:
        head = ["rank", "host", "ip", "local_rank", "gpus"]
        return [
            head,
            *([*(str(slot.get(name, "")) for name in head[:-1]), _gpus([slot])] for slot in slots),
        ]
    nodes: dict[Any, list[Mapping[str, Any]]] = {}
    for slot in slots:
        nodes.setdefault(slot.get("node", slot.get("ip")), []).append(slot)
    rows = [
        [
            str(of_node[0]["host"]),
            str(of_node[0]["ip"]),
            rank_ranges(slot["rank"] for slot in of_node),
            _gpus(of_node),
        ]
        for of_node in list(nodes.values())[:NODES_SHOWN]
    ]
    more = len(nodes) - NODES_SHOWN
    last = [[f"... and {counted(more, 'more node')}", "", "", ""]] if more > 0 else []
    return [["host", "ip", "ranks", "gpus"], *rows, *last]


def _gpus(slots: Sequence[Mapping[str, Any]]) -> str:
    """Return GPU ids as ranges if they are known, else their number."""
    gpus = [slot.get("gpus") or 0 for slot in slots]
    ids = [str(id) for each in gpus if isinstance(each, list | tuple) for id in each]
    if ids:
        return rank_ranges(map(int, ids)) if all(id.isdigit() for id in ids) else ", ".join(ids)
    number = sum(each for each in gpus if isinstance(each, int | float))
    return f"{number:g}" if number else "-"


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Format rows as lines with aligned columns.

    If `width` characters are too few, the widest column is cut.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None and (over := sum(widths) + 2 * len(widths) - width) > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(6, widths[widest] - over)
    return ["  " + "  ".join(map(_fit, row, widths)).rstrip() for row in rows]


def _fit(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else cell[: width - 2] + ".."


def held_line(event: kinds.Held) -> str:
    """Return where a rank waits at a breakpoint(), and what to type."""
    place = f"{os.path.basename(event.file)}:{event.line}"
    return f"debug rank {event.rank} waits at {place}; type raydist debug rank={event.rank}"


def restart_cost(event: kinds.Restarted) -> str:
    """Format the cost of a restart: `back at step 12 after 0.31 s, no step repeated`.

    `runs again after 0.31 s` of a program that has reported no step.
    """
    if not event.step:
        return f"runs again after {event.s:.2f} s"
    kept = f", {name_ranks(event.kept)} kept" if event.kept else ""
    text = f"back at step {event.step} after {event.s:.2f} s, {repeated_steps(event.repeated)}"
    return text + kept


def repeated_steps(n: int) -> str:
    """Return `no step repeated`, `1 step repeated`."""
    return f"{counted(n, 'step') if n else 'no step'} repeated"


def headline(result: Mapping[str, Any], step: int | None) -> str:
    """Return the line on how the run ended."""
    after = f"after {result['wall_s']:.1f} s" + (f", at step {step}" if step else "")
    if result["status"] == "finished":
        return f"finished in {result['wall_s']:.1f} s"
    if result["status"] == "stopped":
        return f"stopped by {signal_name(result.get('signal', 0))} {after}"
    return f"FAILED {after}" + (f": {result['error']}" if result.get("error") else "")


def signal_name(signum: int) -> str:
    """Return the name of a signal, such as SIGINT for 2."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}" if signum else "an unknown signal"


def summary(
    result: Mapping[str, Any], first: Iterable[str] = (), brief: bool = False
) -> list[tuple[str, str]]:
    """Return the summary as (name, value) rows.

    `first`: metrics that come first; `brief`: only the essential rows.
    """
    finished = result["status"] == "finished"
    reported = result.get("metrics", {})
    names = [
        name
        for name in dict.fromkeys([*first, *reported])
        if name in reported and name not in PROGRESS_NAMES
    ]
    metrics = {name: number_text(reported[name]) for name in names}
    rows = list(metrics.items())[:METRICS_SHOWN] if finished else []
    if finished and len(metrics) > METRICS_SHOWN:
        rows.append(("...", f"{len(metrics) - METRICS_SHOWN} more in result.json"))
    if not brief:
        rows.append(("throughput", rate_text(result.get("throughput") or 0.0, "samples")))
        rows.append(("launch", launch_times(result)))
        goodput = result.get("goodput")
        rows.append(("goodput", f"{goodput:.0%} of the time in training steps" if goodput else ""))
        rows.append(("other time", other_time(result)))
    rows += [
        ("network", result.get("network", "")),
        ("slow", result.get("slow", {}).get("text", "")),
    ]
    if saved := result.get("checkpoint"):
        rows.append(
            ("checkpoint", saved if finished else f"{saved} (resume=auto continues from it)")
        )
    return [
        (flat(name), flat(value)) for name, value in [*rows, ("folder", result["dir"])] if value
    ]


def other_time(result: Mapping[str, Any]) -> str:
    """Format the seconds outside of training steps, with the parts of failures.

    Example: `launch 6.04 + failures 0.31 (...) s`.
    """
    spent: Mapping[str, float] = result.get("spent") or {}
    recovery: Mapping[str, float] = result.get("recovery") or {}
    parts = {
        name: f"{name} {s:.2f}" for name, s in spent.items() if name != "steps" and s >= SHOWN_S
    }
    inner = " + ".join(f"{name} {s:.2f}" for name, s in recovery.items() if s >= SHOWN_S)
    if inner and "failures" in parts:
        parts["failures"] += f" ({inner})"
    return " + ".join(parts.values()) + " s" if parts else ""


def launch_times(result: Mapping[str, Any]) -> str:
    """Format the times of a launch: `connect 1.12 + place 0.03 + first step 0.20 = 1.35 s`."""
    return sum_text(result.get("launch") or {})


def sum_text(parts: Mapping[str, float]) -> str:
    """Format the seconds of named parts and their sum; empty for none.

    Example: `detect 0.02 + kill 0.01 = 0.03 s`.
    """
    terms = " + ".join(f"{name} {s:.2f}" for name, s in parts.items())
    return f"{terms} = {sum(parts.values()):.2f} s" if parts else ""
