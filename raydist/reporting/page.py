"""The page about a failure: root cause, reason, cost, recovery and advice. (pure)"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from raydist.reporting.advice import advice_for, refuses_checkpoint
from raydist.reporting.failures import PARTS, Failure
from raydist.reporting.wording import clean, repeated_steps, sum_text
from raydist.shared.outcome import End
from raydist.shared.rank_names import counted, name_ranks


def page(failure: Failure, dir: str) -> str:
    """Return the whole page. `dir`: the run folder."""
    sections = (
        ("root cause", [*failure.text.splitlines(), *where_lines(failure)]),
        ("reason", [failure.reason]),
        ("cost", cost_lines(failure)),
        ("recovery", recovery_lines(failure)),
        ("advice", advice_lines(failure, dir)),
    )
    blocks = [
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    ]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.at))
    return clean("\n\n".join([f"failure {failure.number}, {at}, in {dir}", *blocks])) + "\n"


def page_lines(failure: Failure, dir: str) -> list[str]:
    """Return the lines of the page that the text of a failure lacks, and the path of the page."""
    rows = [("reason", failure.reason), *(("cost", line) for line in cost_lines(failure))]
    rows += [("advice", line) for line in advice_lines(failure, dir)]
    return [*(f"{name}: {line}" for name, line in rows if line), f"page: {dir}/{failure.page}"]


def where_lines(failure: Failure) -> list[str]:
    """Return the rank's host, address and GPUs, and the files with stacks."""
    slot = failure.slot
    known = {
        "host": slot.get("host"),
        "address": slot.get("ip"),
        "GPU": describe_gpus(slot.get("gpus")),
    }
    node = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    stacks = (
        f"{Path(failure.cause['log']).parent}/rank-*.stacks"
        if failure.cause["how"] == "hung"
        else ""
    )
    rows = [("node", node), ("stacks of all ranks", stacks)]
    rows += [("also", note) for note in failure.cause.get("notes", ())]
    return [f"  {name}: {value}" for name, value in rows if value]


def describe_gpus(gpus: Any) -> str:
    """Return the GPUs of a slot: ids, or `x 2` if only their number is known; empty without."""
    if isinstance(gpus, Sequence) and not isinstance(gpus, str):
        return ", ".join(str(id) for id in gpus)
    return f"x {gpus:g}" if isinstance(gpus, int | float) and gpus else ""


def cost_lines(failure: Failure) -> list[str]:
    """Return the time and the steps that the failure cost."""
    lines = []
    repeated = failure.repeated
    if failure.status == "restarted" and failure.s is not None:
        if repeated is None:
            lines.append(f"{failure.s:.2f} s until the program ran again")
        else:
            lines.append(f"{failure.s:.2f} s until the next step, {repeated_steps(repeated)}")
    elif failure.status in ("failed", "stopped"):
        ended = ["the run ended"]
        if failure.checkpoint:
            lost = "" if repeated is None else f", {counted(repeated, 'step')} after it lost"
            ended.append(f"step {failure.saved} is saved{lost}")
        elif repeated is not None:
            ended.append(f"no checkpoint is saved, {counted(repeated, 'step')} lost")
        lines.append("; ".join(ended))
    if failure.parts:
        lines.append(
            "time: "
            + sum_text({name: failure.parts[name] for name in PARTS if name in failure.parts})
        )
    return lines


def recovery_lines(failure: Failure) -> list[str]:
    """Return raydist's actions after the failure."""
    restart, over = failure.restart, failure.status in ("failed", "stopped")
    if not restart:
        return [f"not restarted: {failure.why_last or 'restart.max=0'}"] if over else []
    # Failures that no longer count, because they are old, have a number too.
    limited = not restart.free and restart.number <= (restart.most or 0)
    number = f"restart {restart.number}" + (f" of at most {restart.most}" if limited else "")
    if "place" in failure.parts and over:
        return [
            f"{number}, but Ray could not place all ranks: {failure.why_last or failure.status}"
        ]
    if failure.kept:
        lines = [f"{number}: in place, {name_ranks(failure.kept)} kept their processes"]
    else:
        where = "on other nodes" if failure.moved else "on their nodes"
        lines = [f"{number}: all ranks forked again {where}"]
    if failure.why_not_kept:
        lines.append(f"not in place for ranks that had not failed: {failure.why_not_kept}")
    for what, ranks in (("another node", failure.moved), ("a new actor", failure.renewed)):
        hosts = sorted(set(ranks.values()) - {""})
        lines += (
            [f"{what} for {name_ranks(ranks)}" + (f": {', '.join(hosts)}" if hosts else "")]
            if ranks
            else []
        )
    if failure.resized:
        before, after = failure.resized
        lines.append(f"{'fewer' if after < before else 'more'} nodes: {after} instead of {before}")
    if failure.resumed is not None:
        lines.append(f"resumed after step {failure.resumed}")
    if over:
        lines.append(f"then the run ended: {failure.why_last or failure.status}")
    return lines


def advice_lines(failure: Failure, dir: str) -> list[str]:
    """Return advice for the user."""
    end = end_of(failure.cause)
    advice = advice_for(end)
    lines = [advice] if advice else []
    over = failure.status in ("failed", "stopped")
    if over and failure.checkpoint and not refuses_checkpoint(end):
        named = dir if failure.own_checkpoint else failure.checkpoint
        lines.append(f"to continue from the checkpoint: the same command with resume={named}")
    return lines


def end_of(cause: Mapping[str, Any]) -> End:
    """Return the End that an event's `cause` contains."""
    known = {each.name for each in fields(End)}
    return End(**{name: value for name, value in cause.items() if name in known})
