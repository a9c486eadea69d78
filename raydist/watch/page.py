"""A failure -> the page that a person reads: what broke first, where, why that one, what it cost, what to do. (pure)"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from raydist.blame import End, name_ranks
from raydist.failures import PARTS, Failure
from raydist.remedy import remedy
from raydist.watch.wording import clean, count


def page(failure: Failure, dir: str) -> str:
    """The whole page. `dir`: the run folder, for the words to go on with."""
    sections = (
        ("what broke first", [*failure.text.splitlines(), *place(failure)]),
        ("why that one", [failure.reason]),
        ("what it cost", cost(failure)),
        ("what was done", done(failure)),
        ("what to do", advice(failure, dir)),
    )
    blocks = ["\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.at))
    return clean("\n\n".join([f"failure {failure.number}, {when}, in {dir}", *blocks])) + "\n"


def brief(failure: Failure, dir: str) -> list[str]:
    """What the page adds to the text of a failure that ended the run, and where the page is."""
    rows = [("why this one", failure.reason), *(("cost", line) for line in cost(failure))]
    rows += [("what to do", line) for line in advice(failure, dir)]
    return [*(f"{name}: {line}" for name, line in rows if line), f"page: {dir}/{failure.page}"]


def place(failure: Failure) -> list[str]:
    """Where its rank sat, and where the stacks are."""
    seat = failure.seat
    known = {"host": seat.get("host"), "address": seat.get("ip"), "GPU": gpus(seat.get("gpus"))}
    told = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    stacks = f"{Path(failure.cause['log']).parent}/rank-*.stacks" if failure.cause["how"] == "hung" else ""
    return [f"  {name}: {value}" for name, value in (("place", told), ("stacks of all ranks", stacks)) if value]


def gpus(held: Any) -> str:
    """The GPUs of a seat: ids, or how many; empty where it has none."""
    if isinstance(held, Sequence) and not isinstance(held, str):
        return ", ".join(str(one) for one in held)
    return f"x {held:g}" if isinstance(held, int | float) and held else ""


def cost(failure: Failure) -> list[str]:
    """Time and steps."""
    lines = []
    if failure.status == "restarted" and failure.s is not None:
        lines.append(f"{failure.s:.2f} s until the next step, {steps(failure.repeated or 0)}")
    elif failure.status in ("failed", "stopped"):
        kept = (
            f"step {failure.reached - (failure.repeated or 0)} is on the disk"
            if failure.checkpoint
            else "no checkpoint"
        )
        lines.append(f"the run; {kept}, {count(failure.repeated or 0, 'step')} after it lost")
    if failure.parts:
        lines.append("time went: " + times(failure.parts))
    return lines


def times(parts: Mapping[str, float]) -> str:
    """`detect 0.02 + kill 0.01 = 0.03 s`, in the order in which they happen."""
    known = [(name, parts[name]) for name in PARTS if name in parts]
    told = " + ".join(f"{name} {s:.2f}" for name, s in known)
    return f"{told} = {sum(s for _, s in known):.2f} s"


def steps(repeated: int) -> str:
    """The steps that a restart has cost."""
    return f"{count(repeated, 'step')} done again" if repeated else "no step lost"


def done(failure: Failure) -> list[str]:
    """What raydist did."""
    restart = failure.restart
    if not restart:
        if failure.status in ("failed", "stopped"):
            return [
                f"ended: {failure.why_last}" if failure.why_last else "ended: no failure is forgiven (restart.max=0)"
            ]
        return []
    free = restart.get("free")
    number = f"restart {restart['number']}" + ("" if free else f", up to {restart['most']} are forgiven")
    if "place" in failure.parts and failure.status in ("failed", "stopped"):
        return [f"{number}, but there was no place for all ranks: {failure.why_last or failure.status}"]
    lines = [f"{number}: all ranks forked again" + (", in another place" if failure.moved else " where they were")]
    for what, ranks in (("another node", failure.moved), ("a new actor", failure.renewed)):
        hosts = sorted(set(ranks.values()) - {""})
        lines += [f"{what} for {name_ranks(ranks)}" + (f": {', '.join(hosts)}" if hosts else "")] if ranks else []
    if failure.resized:
        before, after = failure.resized
        lines.append(f"{'fewer' if after < before else 'more'} nodes: {after}, there were {before}")
    if failure.resumed is not None:
        lines.append(f"went on from step {failure.resumed}")
    if failure.status in ("failed", "stopped"):
        lines.append(f"then ended: {failure.why_last or failure.status}")
    return lines


def advice(failure: Failure, dir: str) -> list[str]:
    """What the person may do."""
    words = remedy(end_of(failure.cause))
    lines = [words] if words else []
    if failure.status in ("failed", "stopped") and failure.checkpoint:
        lines.append(f"go on from there: the same command with resume={dir}")
    return lines


def end_of(cause: Mapping[str, Any]) -> End:
    """The End that was told."""
    known = {each.name for each in fields(End)}
    return End(**{name: value for name, value in cause.items() if name in known})
