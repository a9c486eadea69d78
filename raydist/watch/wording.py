"""The words for what a person sees: seats, launch, summary; nothing but ASCII of its own. (pure)"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raydist.blame import compact
from raydist.watch.progress import BESIDES, number, rate_text

SEATS_SHOWN = 16
"""With more ranks than this, each node is one row."""
NODES_SHOWN = 32
METRICS_SHOWN = 12
SHOWN_S = 0.005
"""Shorter times are not told."""

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """The text without colours, cursor movements and other control characters that it may have brought along."""
    return _CONTROL.sub("", text)


def flat(text: str) -> str:
    """The text clean, and on one line."""
    return clean(text).replace("\n", " ")


def count(n: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def cluster(facts: Mapping[str, Any]) -> str:
    """Where Ray is, and whether it was there."""
    there = "started here, at" if facts.get("started") else "at"
    return f"ray   {there} {facts.get('address')}: {count(facts.get('nodes', 1), 'node')}"


def plan(facts: Mapping[str, Any]) -> str:
    """How many ranks, on how many nodes, over which backend."""
    hosts = {seat.get("node", seat.get("ip")) for seat in facts["seats"]}
    spares = [node["host"] for node in facts.get("spares", ())]
    beside = f", {count(len(spares), 'spare')} ({', '.join(spares)})" if spares else ""
    ranks = f"{count(facts['world_size'], 'rank')} on {count(len(hosts), 'node')}"
    return f"plan  {ranks}{beside}, backend {facts.get('backend')}"


def resize(facts: Mapping[str, Any]) -> str:
    """How many nodes and ranks there are now."""
    ranks = count(facts["world_size"], "rank")
    return f"resize: goes on with {ranks} on {count(facts['nodes'], 'node')}, there were {facts['before']}"


def seats(facts: Mapping[str, Any]) -> list[list[str]]:
    """Who sits where, as rows under a row of headings."""
    found: Sequence[Mapping[str, Any]] = facts["seats"]
    if len(found) <= SEATS_SHOWN:
        head = ["rank", "host", "ip", "local_rank", "gpus"]
        rows = [[*(str(seat.get(name, "")) for name in head[:-1]), _gpus([seat])] for seat in found]
        return [head, *rows]
    nodes: dict[Any, list[Mapping[str, Any]]] = {}
    for seat in found:
        nodes.setdefault(seat.get("node", seat.get("ip")), []).append(seat)
    rows = [
        [str(own[0]["host"]), str(own[0]["ip"]), compact(seat["rank"] for seat in own), _gpus(own)]
        for own in list(nodes.values())[:NODES_SHOWN]
    ]
    more = [[f"... and {count(len(nodes) - NODES_SHOWN, 'more node')}", "", "", ""]] if len(nodes) > NODES_SHOWN else []
    return [["host", "ip", "ranks", "gpus"], *rows, *more]


def _gpus(own: Sequence[Mapping[str, Any]]) -> str:
    """Ids as ranges where they are known, else how many."""
    told = [seat.get("gpus") or 0 for seat in own]
    ids = [str(one) for gpus in told if isinstance(gpus, list | tuple) for one in gpus]
    if ids:
        return compact(map(int, ids)) if all(one.isdigit() for one in ids) else ", ".join(ids)
    amount = sum(gpus for gpus in told if isinstance(gpus, int | float))
    return f"{amount:g}" if amount else "-"


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Rows as lines with aligned columns; the widest column gives way where `width` characters are too few."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None and (over := sum(widths) + 2 * len(widths) - width) > 0:
        widest = widths.index(max(widths))
        widths[widest] = max(6, widths[widest] - over)
    return ["  " + "  ".join(map(_fit, row, widths)).rstrip() for row in rows]


def _fit(cell: str, width: int) -> str:
    return cell.ljust(width) if len(cell) <= width else cell[: width - 2] + ".."


def back(restarted: Mapping[str, Any]) -> str:
    """What a restart has cost: `back at step 12 after 0.31 s, no step lost`."""
    repeated = restarted["repeated"]
    again = f"{count(repeated, 'step')} done again" if repeated else "no step lost"
    return f"back at step {restarted['step']} after {restarted['s']:.2f} s, {again}"


def headline(result: Mapping[str, Any], step: int | None) -> str:
    """How it ended."""
    after = f"after {result['wall_s']:.1f} s" + (f", at step {step}" if step else "")
    if result["status"] == "finished":
        return f"finished in {result['wall_s']:.1f} s"
    if result["status"] == "stopped":
        return f"stopped by {signal_name(result.get('signal', 0))} {after}"
    return f"FAILED {after}" + (f": {result['error']}" if result.get("error") else "")


def signal_name(signum: int) -> str:
    """SIGINT for 2."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}" if signum else "a person"


def summary(result: Mapping[str, Any], first: Iterable[str] = (), brief: bool = False) -> list[tuple[str, str]]:
    """What it came to, as (what, value). `first`: the metrics to begin with; `brief`: only the essentials."""
    finished = result["status"] == "finished"
    told = result.get("metrics", {})
    metrics = {name: number(told[name]) for name in [*first, *told] if name in told and name not in BESIDES}
    rows = list(metrics.items())[:METRICS_SHOWN] if finished else []
    if finished and len(metrics) > METRICS_SHOWN:
        rows.append(("...", f"{len(metrics) - METRICS_SHOWN} more in result.json"))
    if not brief:
        rows += [("throughput", rate_text(result.get("throughput") or 0.0, "samples")), ("launch", launch(result))]
        goodput = result.get("goodput")
        rows.append(("goodput", f"{goodput:.0%} of the time in training steps" if goodput else ""))
        rows.append(("other time", other_time(result)))
    rows += [("network", result.get("network", "")), ("slow", result.get("slow", {}).get("text", ""))]
    if saved := result.get("checkpoint"):
        rows.append(("checkpoint", saved if finished else f"{saved} (resume=auto goes on from there)"))
    return [(flat(what), flat(value)) for what, value in [*rows, ("folder", result["dir"])] if value]


def other_time(result: Mapping[str, Any]) -> str:
    """Where the time went that was not in steps; of failures the parts: `launch 6.04 + failures 0.31 (...)`."""
    parts: Mapping[str, float] = result.get("spent") or {}
    recovery: Mapping[str, float] = result.get("recovery") or {}
    inner = " + ".join(f"{name} {s:.2f}" for name, s in recovery.items() if s >= SHOWN_S)
    told = {name: f"{name} {s:.2f}" for name, s in parts.items() if name != "steps" and s >= SHOWN_S}
    if inner and "failures" in told:
        told["failures"] += f" ({inner})"
    return " + ".join(told.values()) + " s" if told else ""


def launch(result: Mapping[str, Any]) -> str:
    """`connect 1.12 + place 0.03 + first step 0.20 = 1.35 s`."""
    parts: Mapping[str, float] = result.get("launch") or {}
    told = " + ".join(f"{name} {s:.2f}" for name, s in parts.items())
    return f"{told} = {sum(parts.values()):.2f} s" if parts else ""
