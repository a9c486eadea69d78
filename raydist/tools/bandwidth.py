"""The command `raydist bandwidth`: measure collectives on the ranks of a job. (driver)

`python -m raydist.tools.bandwidth` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raydist.flow import run
from raydist.reporting import wording
from raydist.reporting.result import Result
from raydist.shared import kinds
from raydist.shared.errors import ConfigError
from raydist.shared.events import read_kind
from raydist.shared.record_names import EVENTS
from raydist.tools import bandwidth_figures as figures
from raydist.tools.bandwidth_figures import OPS, Pair, RankMeasurement, Row
from raydist.tools.bandwidth_plot import plot
from raydist.tools.command_line import ToolParser, number, run_tool

DESCRIPTION = """\
Measures the collectives of torch.distributed (or Horovod's) on the ranks that a job with
these overrides would have, and checks every result.
"""
RANK_SIDE = "raydist.tools.bandwidth_ranks:measure_operations"
# hang.end=false: ranks that wait for a slow pair do not hang.
QUIET = ("hang.end=false", "watch.progress=none")


@dataclass(frozen=True)
class Measurement:
    """The results of all ranks."""

    backend: str
    ranks: int
    rows: Sequence[Row]
    matrix: dict[Pair, float]
    """(index, index) in `names` -> GB/s."""
    names: Sequence[str]
    """The nodes that were measured in pairs; the ranks if there is only one node."""
    network: dict[str, Any]
    """The run's `network` event."""
    dir: Path

    @property
    def wrong(self) -> int:
        return sum(row.wrong for row in self.rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    The exit code: 0; 1 if the run failed or a result was wrong; 2 for a wrong setting.
    """

    def bandwidth() -> int:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            measured = run_measurement(arguments)
        print(
            json.dumps(measured_as_data(measured), indent=2)
            if arguments.json
            else "\n".join(measured_as_text(measured))
        )
        return 1 if measured.wrong else 0

    return run_tool(bandwidth)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked flags, and the overrides."""
    parser = ToolParser("bandwidth", DESCRIPTION)
    parser.add_argument(
        "--ops", metavar="A,B", default=",".join(OPS), help=f"only these of: {', '.join(OPS)}"
    )
    parser.add_argument(
        "--min", metavar="SIZE", default="1K", help="smallest message: 8, 4K, 1M, 1G (1K)"
    )
    parser.add_argument("--max", metavar="SIZE", default="32M", help="largest message (32M)")
    parser.add_argument(
        "--factor", metavar="X", default="4", help="ratio of one size to the next (4)"
    )
    parser.add_argument("--iters", metavar="N", default="10", help="timed calls for each size (10)")
    parser.add_argument(
        "--warmup", metavar="N", default="2", help="calls before the timed ones (2)"
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="also measure each pair of nodes, and name the slow ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse(argv)
    arguments.ops = arguments.ops.split(",")
    for op in arguments.ops:
        if op not in OPS:
            raise ConfigError.unknown("--ops", op, OPS)
    low, high = figures.in_bytes("--min", arguments.min), figures.in_bytes("--max", arguments.max)
    if low > high:
        raise ConfigError.of(
            "--min", arguments.min, f"more than --max {arguments.max}", f"--max {arguments.min}"
        )
    arguments.sizes = figures.message_sizes(low, high, number("--factor", arguments.factor, 1.1))
    arguments.iters = int(number("--iters", arguments.iters, 1, whole=True))
    arguments.warmup = int(number("--warmup", arguments.warmup, 0, whole=True))
    if arguments.pairs and any(
        override.startswith("backend=horovod") for override in arguments.overrides
    ):
        cause = "Horovod has no point-to-point operation"
        raise ConfigError.of("--pairs", None, cause, "backend=gloo", "backend=nccl")
    return arguments


def run_measurement(arguments: argparse.Namespace) -> Measurement:
    """Run the measurement on the ranks that the overrides request, and write its files."""
    job_arguments = {
        "ops": arguments.ops,
        "sizes": arguments.sizes,
        "iters": arguments.iters,
        "warmup": arguments.warmup,
    }
    overrides = [
        f"+job.args.{name}={json.dumps(value, separators=(',', ':'))}".replace('"', "")
        for name, value in {**job_arguments, "pairs": arguments.pairs}.items()
    ]
    typed = [below_run_folder(text) for text in arguments.overrides if not _names_job(text)]
    done = run(RANK_SIDE, "name=bandwidth", *QUIET, *overrides, *typed)
    measured = gather_rows(done)
    (done.dir / "bandwidth.json").write_text(
        json.dumps(measured_as_data(measured), indent=2) + "\n", encoding="utf-8"
    )
    (done.dir / "bandwidth.svg").write_text(plot(measured.rows), encoding="utf-8")
    return measured


def _names_job(override: str) -> bool:
    """Report whether an override is about the job: the doctor advises to type its overrides here.

    The measurement is a job of its own.
    """
    name, _, value = override.lstrip("+~").partition("=")
    if (name, value) == ("backend", "script"):  # torchrun's variables, for a program
        return True
    return name in ("job", "script", "args", "resume") or name.startswith("job.args")


def below_run_folder(override: str) -> str:
    """Return an override with a folder for the measurement below the run folder that it names.

    A training there would begin anew with resume=auto: the newest result would be a finished one.
    """
    if not override.lstrip("+").startswith("hydra.run.dir="):
        return override
    quote = override[-1] if override[-1] in "'\"" else ""
    return f"{override.removesuffix(quote)}/bandwidth{quote}"


def gather_rows(done: Result[RankMeasurement]) -> Measurement:
    """Merge the results of all ranks: the time of the slowest rank, the sum of wrong elements."""
    measured = [value for value in done.values if value]
    rows = []
    for row in zip(*(value["rows"] for value in measured), strict=True):
        times = [of_rank["seconds"] for of_rank in row]
        slowest = None if None in times else max(s for s in times if s is not None)
        wrong = sum(of_rank["wrong"] for of_rank in row)
        rows.append(figures.row(row[0]["op"], row[0]["size"], slowest, wrong, len(measured)))
    *_, plan = read_kind(kinds.Plan, done.dir / EVENTS)
    network = [event.to_json() for event in read_kind(kinds.Network, done.dir / EVENTS)]
    slots = {slot["rank"]: slot for slot in plan.slots}
    speeds = {(a, b): speed for value in measured for a, b, speed in value["pairs"]}
    ranks = sorted({rank for pair in speeds for rank in pair})
    several_nodes = len({slots[rank]["host"] for rank in ranks}) == len(ranks)
    return Measurement(
        backend=plan.backend,
        ranks=len(measured),
        rows=rows,
        matrix={(ranks.index(a), ranks.index(b)): speed for (a, b), speed in speeds.items()},
        names=[slots[rank]["host"] if several_nodes else f"rank {rank}" for rank in ranks],
        network=network[-1] if network else {},
        dir=done.dir,
    )


def measured_as_data(measured: Measurement) -> dict[str, Any]:
    """Return the measurement for --json and bandwidth.json."""
    nodes, pairs = figures.slow(measured.matrix) if measured.matrix else ([], [])
    names = measured.names
    return {
        "backend": measured.backend,
        "ranks": measured.ranks,
        "rows": [asdict(row) for row in measured.rows],
        "pairs": [
            {"nodes": [names[a], names[b]], "GB/s": speed}
            for (a, b), speed in measured.matrix.items()
        ],
        "slow_nodes": [names[node] for node in nodes],
        "slow_pairs": [[names[a], names[b]] for a, b in pairs],
        "network": measured.network.get("text", ""),
        "ports": port_rate(measured),
        "dir": str(measured.dir),
    }


def measured_as_text(measured: Measurement) -> Iterator[str]:
    """Yield the measurement as lines."""
    yield from wording.table(figures.as_table(measured.rows, measured.backend))
    if measured.matrix:
        yield "\neach pair, both directions at once"
        yield from wording.table(figures.as_matrix(measured.matrix, measured.names))
        yield from figures.slow_lines(measured.matrix, measured.names)
    yield from verdict_lines(measured)
    if measured.wrong:
        yield f"WRONG: {measured.wrong} elements are wrong: this network corrupts data"
    yield f"plot and data: {measured.dir}/bandwidth.svg, bandwidth.json"


def verdict_lines(measured: Measurement) -> Iterator[str]:
    """Compare the measured bandwidth with the rate of the ports; no line if the rate is unknown."""
    nodes = measured.network.get("nodes", [])
    rate = port_rate(measured, measured.ranks / max(1, len(nodes)))
    reduced = [
        row.busbw for row in measured.rows if row.op == "all_reduce" and row.time_us is not None
    ]
    if rate and reduced:
        yield f"all_reduce, busbw: {figures.bandwidth_verdict(max(reduced), rate)}"
    rate = port_rate(measured, 1)
    if rate and measured.matrix:
        yield f"slowest pair: {figures.bandwidth_verdict(min(measured.matrix.values()), rate)}"


def port_rate(measured: Measurement, ranks: float = math.inf) -> float:
    """Return the GB/s of the ports in use on the slowest node.

    With `ranks`, only of those of as many GPUs: NCCL sends the data of a GPU over the nearest port,
    or over several where a node has more ports than GPUs. 0 if it is unknown, or if there is only
    one node.
    """

    def share(ports: int, gpus: int) -> float:
        return min(1.0, ranks * max(1.0, ports / (gpus or ports)) / ports)

    rates = [
        float(node.get("rate", 0.0)) * share(node.get("ports", 1), node.get("gpus", 0))
        for node in measured.network.get("nodes", [])
    ]
    return min(rates) if len(rates) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
