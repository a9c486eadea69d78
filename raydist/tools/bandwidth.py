"""`python -m raydist.tools.bandwidth`, with the words of train: how fast the job's own ranks talk. (driver)"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raydist.errors import ConfigError, RaydistError, suggest
from raydist.events import read
from raydist.result import Result
from raydist.run import run
from raydist.tools import bandwidth_figures as figures
from raydist.tools.bandwidth_figures import OPS, Pair, Row
from raydist.tools.bandwidth_plot import plot
from raydist.train import Parser, tell
from raydist.watch import wording

USAGE = """\
usage: python -m raydist.tools.bandwidth [flags] [words]

Measures the collectives of torch.distributed (or Horovod's) on the ranks that a job with these words would have, checks
every result, and says how fast they are. The words are those of python -m raydist.train: backend=nccl scale=2x8 ...

  --ops A,B     only these of: {ops}
  --min SIZE    the smallest message: 8, 4K, 1M, 1G (1K)
  --max SIZE    the largest message (32M)
  --factor X    each size so many times the one before (4)
  --iters N     timed calls of each (10)
  --warmup N    calls before them (2)
  --pairs       also measure every node against every other, and name the slow ones
  --json        print data instead of tables
"""
RANK_SIDE = "raydist.tools.bandwidth_ranks:measure"
# Ranks that wait for a slow pair are not stuck.
QUIET = ("hang.end=false", "watch.progress=none")


@dataclass(frozen=True)
class Measured:
    """What a measurement came to."""

    backend: str
    ranks: int
    rows: Sequence[Row]
    matrix: dict[Pair, float]
    """GB/s by the positions of two nodes in `names`; ranks, where there is one node only."""
    names: Sequence[str]
    network: dict[str, Any]
    """The run's `network` event."""
    dir: Path

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. The exit code: 0; 1 where the run failed or a result was wrong; 2 for a wrong word."""
    try:
        typed = parse(sys.argv[1:] if argv is None else argv)
        if typed.help:
            print(USAGE.format(ops=", ".join(OPS)), end="")
            return 0
        with contextlib.redirect_stdout(sys.stderr if typed.json else sys.stdout):
            measured = measure(typed)
    except RaydistError as error:
        return tell(error)
    print(json.dumps(as_data(measured), indent=2) if typed.json else "\n".join(as_text(measured)))
    return 1 if measured.wrong else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked, and the words."""
    made = Parser(prog="bandwidth", add_help=False, allow_abbrev=False)
    for name, default in (("min", "1K"), ("max", "32M"), ("factor", "4"), ("iters", "10"), ("warmup", "2")):
        made.add_argument(f"--{name}", default=default)
    made.add_argument("--ops", default=",".join(OPS))
    for name in ("pairs", "json", "help"):
        made.add_argument(f"--{name}", *(["-h"] if name == "help" else []), action="store_true")
    made.add_argument("words", nargs="*")
    typed, unknown = made.parse_known_intermixed_args(list(argv))
    if wrong := [word for word in unknown if word.startswith("-")]:
        flags = [f"--{name}" for name in vars(typed) if name != "words"]
        raise ConfigError(f"{wrong[0]}: there is no such flag; {suggest(wrong[0], flags)}")
    typed.ops = typed.ops.split(",")
    for op in typed.ops:
        if op not in OPS:
            raise ConfigError(f"--ops {op}: {suggest(op, OPS, '--ops ')}")
    low, high = figures.in_bytes("--min", typed.min), figures.in_bytes("--max", typed.max)
    if low > high:
        raise ConfigError(f"--min {typed.min} is more than --max {typed.max}: say --max {typed.min}")
    typed.sizes = figures.sizes(low, high, _number("--factor", typed.factor, 1.1))
    typed.iters = int(_number("--iters", typed.iters, 1))
    typed.warmup = int(_number("--warmup", typed.warmup, 0))
    if typed.pairs and any(word.startswith("backend=horovod") for word in typed.words):
        raise ConfigError("--pairs: Horovod has no point to point; say backend=gloo, or backend=nccl on GPUs")
    return typed


def _number(flag: str, text: str, low: float) -> float:
    try:
        value = float(text) if flag == "--factor" else int(text)
    except ValueError:
        value = low - 1
    if not low <= value < 1e9:
        raise ConfigError(f"{flag} {text}: must be a number from {low:g}; say {flag} {max(2, int(low))}")
    return value


def measure(typed: argparse.Namespace) -> Measured:
    """Run it on the ranks that the words ask for."""
    settings = {"ops": typed.ops, "sizes": typed.sizes, "iters": typed.iters, "warmup": typed.warmup}
    words = [f"+job.args.{name}={json.dumps(value, separators=(',', ':'))}".replace('"', "")
             for name, value in {**settings, "pairs": typed.pairs}.items()]  # fmt: skip
    done = run(RANK_SIDE, "name=bandwidth", *QUIET, *words, *typed.words)
    measured = gather(done)
    (done.dir / "bandwidth.json").write_text(json.dumps(as_data(measured), indent=2) + "\n", encoding="utf-8")
    (done.dir / "bandwidth.svg").write_text(plot(measured.rows), encoding="utf-8")
    return measured


def gather(done: Result[Any]) -> Measured:
    """What all ranks found as one: the time of the slowest rank, the wrong numbers of all."""
    told = [value for value in done.values if value]
    rows = []
    for every in zip(*(value["rows"] for value in told), strict=True):
        first, times = every[0], [one["seconds"] for one in every]
        slowest = None if None in times else max(times)
        wrong = sum(one["wrong"] for one in every)
        rows.append(figures.row(first["op"], first["size"], slowest, wrong, len(told)))
    events = {happened["kind"]: happened for happened in read(done.dir / "events.jsonl")}
    seats = {seat["rank"]: seat for seat in events["plan"]["seats"]}
    found = {(a, b): speed for value in told for a, b, speed in value["pairs"]}
    who = sorted({rank for pair in found for rank in pair})
    several = len({seats[rank]["host"] for rank in who}) == len(who)
    return Measured(
        backend=events["plan"]["backend"],
        ranks=len(told),
        rows=rows,
        matrix={(who.index(a), who.index(b)): speed for (a, b), speed in found.items()},
        names=[seats[rank]["host"] if several else f"rank {rank}" for rank in who],
        network=events.get("network", {}),
        dir=done.dir,
    )


def as_data(measured: Measured) -> dict[str, Any]:
    """The measurement as JSON-able data."""
    nodes, pairs = figures.slow(measured.matrix) if measured.matrix else ([], [])
    names = measured.names
    return {
        "backend": measured.backend,
        "ranks": measured.ranks,
        "rows": [asdict(row) for row in measured.rows],
        "pairs": [{"nodes": [names[a], names[b]], "GB/s": speed} for (a, b), speed in measured.matrix.items()],
        "slow_nodes": [names[node] for node in nodes],
        "slow_pairs": [[names[a], names[b]] for a, b in pairs],
        "network": measured.network.get("text", ""),
        "ports": possible(measured),
        "dir": str(measured.dir),
    }


def as_text(measured: Measured) -> Iterator[str]:
    """The measurement for a person."""
    yield from wording.table(figures.as_table(measured.rows, measured.backend))
    if measured.matrix:
        yield "\neach pair, both ways at a time"
        yield from wording.table(figures.as_matrix(measured.matrix, measured.names))
        yield from figures.told_slow(measured.matrix, measured.names)
    yield from compared(measured)
    if measured.wrong:
        yield f"WRONG: {measured.wrong} numbers came out wrong; nothing that this network carries can be trusted"
    yield f"plot and data: {measured.dir}/bandwidth.svg, bandwidth.json"


def compared(measured: Measured) -> Iterator[str]:
    """What was reached beside what the ports could do, where it is known and the ranks sit on several nodes."""
    ports = possible(measured)
    reduced = [row.busbw for row in measured.rows if row.op == "all_reduce" and row.time_us is not None]
    if ports and reduced:
        yield f"all_reduce, busbw: {figures.verdict(max(reduced), ports)}"
    if ports and measured.matrix:
        yield f"slowest pair: {figures.verdict(min(measured.matrix.values()), ports)}"


def possible(measured: Measured) -> float:
    """GB/s that the slowest node's ports in use could carry; 0 where that is not known, or one node talks to itself."""
    rates = [float(node.get("rate", 0.0)) for node in measured.network.get("nodes", [])]
    return min(rates) if len(rates) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
