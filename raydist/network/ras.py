"""NCCL's RAS: the variable with its address, and its answer about a hang -> lines of text. (pure)

Since 2.24 each process that uses NCCL has a thread that knows all communicators, those of other
processes too: RAS, for reliability, availability, serviceability. It answers on a local port, in
JSON since 2.28 (src/ras/client_support.cc).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.cluster.placement import Plan
from raydist.network.facts import Facts, version_numbers
from raydist.network.names import RAS_PORT, EnvVar
from raydist.settings.config import Job
from raydist.shared.rank_names import joined_names, name_ranks

ADDRESS = "NCCL_RAS_ADDR"
"""NCCL's variable: the host and port on which RAS answers, by default localhost:28028."""
ENABLE = "NCCL_RAS_ENABLE"
HAS_RAS = (2, 24)
WHO = "NCCL's RAS"
LINES = 8
"""Limit on the lines about one answer; the file of the answer has all."""
SECTIONS = ("Errors", "Warnings")
"""The headings in the text of versions before 2.28 below which RAS says what is wrong."""
IN_PROGRESS = 7
"""ncclInProgress: no error, but not complete."""
RESULTS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}
"""ncclResult_t (nccl.h)."""


def ras_variables(job: Job, plan: Plan, node: Facts) -> Iterator[EnvVar]:
    """Yield the variable that gives RAS of each rank a port of its own.

    The default port is one for all processes of a node: a second job of the same user would share
    it, and that of another user would have none.
    """
    version = version_numbers(node.versions.get("nccl", ""))
    settings = {**{name: value for name, (value, _) in node.nccl_conf.items()}, **node.environment}
    enabled = str({**settings, **job.env}.get(ENABLE, "1")).strip() != "0"
    gpus = plan.request.rank_resources.get("GPU")
    if not gpus or plan.world_size < 2 or not enabled or (version and version < HAS_RAS):
        return
    why = "NCCL's RAS says there which ranks lag, if the run hangs"
    yield EnvVar(ADDRESS, f"127.0.0.1:{RAS_PORT}", why)


@dataclass(frozen=True)
class RasRank:
    """What RAS says of one rank of a communicator."""

    host: str
    """Its address on the network of NCCL's bootstrap."""
    pid: int
    counts: Mapping[str, int]
    """How many collectives of each kind it has launched; empty if it is missing."""
    state: str
    """What is unusual of it, as a verb in the past and its object; empty: nothing is."""


@dataclass(frozen=True)
class RasCommunicator:
    """What RAS says of one communicator."""

    size: int
    ranks: Sequence[RasRank]
    """Those that RAS knows, and those that are missing."""


def parse_ras(text: str) -> list[RasCommunicator] | None:
    """Return the communicators in RAS's answer, the largest first; None: it is not that JSON."""
    try:
        found = [_communicator(each) for each in json.loads(text)["communicators"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return sorted(found, key=lambda each: -each.size)


def _communicator(found: Mapping[str, Any]) -> RasCommunicator:
    ranks = [
        RasRank(
            str(each["host"]),
            int(each["pid"]),
            {str(name): int(count) for name, count in each["collective_counts"].items()},
            _state(each["status"]),
        )
        for each in found["ranks"]
    ]
    missing = [
        RasRank(str(each["host"]), int(each["pid"]), {}, _why_missing(each["status"]))
        for each in found["missing_ranks"]
    ]
    return RasCommunicator(int(found["size"]), [*ranks, *missing])


def _state(status: Mapping[str, Any]) -> str:
    """Return what is unusual of a rank that answers."""
    error = next(
        (
            code
            for code in (int(status["init_state"]), int(status["async_error"]))
            if code not in (0, IN_PROGRESS)
        ),
        0,
    )
    if error:
        return f"reported an error ({RESULTS.get(error, f'number {error}')})"
    if status["abort_flag"]:
        return "aborted it"
    if status["finalize_called"] or status["destroy_flag"]:
        return "left it"
    return "did not initialise it yet" if int(status["init_state"]) else ""


def _why_missing(status: Mapping[str, Any]) -> str:
    """Return why RAS knows nothing of a rank."""
    if status["considered_dead"]:
        return "gave no answer for a minute or more"
    return "gave no answer" if status["unresponsive"] else "left it, or did not come yet"


def describe_ras(text: str, rank_of: Callable[[str, int], int | None], file: str) -> list[str]:
    """Return what RAS's answer says of a hang, a line each.

    `rank_of`: returns the rank with this address and process, if one has it. `file`: where the
    whole answer is.
    """
    communicators = parse_ras(text)
    if communicators is None:
        return [f"{WHO}: {line}" for line in _lines_of_text(text, file)]
    if not communicators:
        return [f"{WHO}: no rank has a communicator"]
    lines = [line for each in communicators for line in _describe(each, rank_of)]
    if not lines:
        lines = ["in each communicator all ranks launched equally many collectives"]
    return [f"{WHO}: {line}" for line in _limited([*dict.fromkeys(lines)], file)]


def _describe(found: RasCommunicator, rank_of: Callable[[str, int], int | None]) -> list[str]:
    """Return what is odd in a communicator."""
    odd: dict[str, list[RasRank]] = {}
    for each in found.ranks:
        if each.state:
            odd.setdefault(each.state, []).append(each)
    lines = [f"{_named(own, rank_of)} {state}" for state, own in odd.items()]
    present = [each for each in found.ranks if each.counts]
    kinds = dict.fromkeys(kind for each in present for kind in each.counts)
    for kind in kinds:
        by_count: dict[int, list[RasRank]] = {}
        for each in present:
            by_count.setdefault(each.counts.get(kind, 0), []).append(each)
        if len(by_count) > 1:
            groups = sorted(by_count.items(), key=lambda group: (-len(group[1]), -group[0]))
            counts = [f"{_named(own, rank_of)} launched {count}" for count, own in groups]
            lines.append(f"{kind}: {', '.join(counts)}")
    where = f"communicator of {_named(found.ranks, rank_of)}: "
    return [where + line for line in lines]


def _named(ranks: Sequence[RasRank], rank_of: Callable[[str, int], int | None]) -> str:
    """Return a text such as `ranks 0-2`; processes that are no rank's own are named as such."""
    known = [(each, rank_of(each.host, each.pid)) for each in ranks]
    own = [rank for _, rank in known if rank is not None]
    others = [f"process {each.pid} on {each.host}" for each, rank in known if rank is None]
    return joined_names([*([name_ranks(own)] if own else []), *others])


def _lines_of_text(text: str, file: str) -> list[str]:
    """Return what the text of a version before 2.28 says is wrong, in its words.

    An answer that is not understood is referred to only.
    """
    lines = [line.strip() for line in text.splitlines()]
    if not all(section in lines for section in SECTIONS):
        return [f"{file} has its answer, which raydist does not understand"]
    below = lines[lines.index(SECTIONS[0]) :]
    report = [line for line in below if line and line not in SECTIONS and line.strip("=")]
    return _limited(report, file) or ["it sees no error, and no mismatch between ranks"]


def _limited(lines: list[str], file: str) -> list[str]:
    """Return at most LINES of them; the last one then says where the others are."""
    if len(lines) <= LINES:
        return lines
    more = len(lines) - LINES + 1
    return [*lines[: LINES - 1], f"{more} more such lines: {file}"]
