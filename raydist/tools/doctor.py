"""`python -m raydist.tools.doctor`, with the words of train: would these nodes and this network carry the job? (driver)

It places the job's gang, opens its nodes and looks; no rank is started, and nothing is left.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raydist import backends, cluster, inline, placement, preload
from raydist.attempts import settled
from raydist.config import Job
from raydist.errors import ConfigError, RaydistError, Stopped, suggest
from raydist.events import Event, Events
from raydist.findings import Finding
from raydist.group import Gang
from raydist.signals import stoppable
from raydist.tools import doctor_report
from raydist.tools.doctor_findings import CHECKS
from raydist.tools.doctor_report import Report
from raydist.tools.doctor_rounds import Rounds
from raydist.train import tell
from raydist.watch import wording
from raydist.words import compose

USAGE = """\
usage: python -m raydist.tools.doctor [--json] [--timeout=S] [words]

Places the job as train would, then checks its nodes and every connection between them; starts no rank.
The words are those of python -m raydist.train: backend=nccl scale=2x8 job=resnet ...
--timeout: seconds that one connection may take (3). Exit code: 0 fine, 1 something would break the job, 2 a wrong word.

What it checks, beside what train checks at each start:
"""
FLAGS = ("--json", "--timeout", "--help", "-h")
TIMEOUT_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check and tell. The exit code: 0, 1 where something would break the job, 2 for a wrong word."""
    try:
        flags, words = read_flags(sys.argv[1:] if argv is None else argv)
        if "--help" in flags or "-h" in flags:
            print(USAGE, *wording.table([*map(list, CHECKS.items())]), sep="\n")
            return 0
        with stoppable():
            report = examine(compose.compose(words), seconds(flags.get("--timeout")))
    except RaydistError as error:
        return tell(error)
    doctor_report.show(report, as_json="--json" in flags)
    return int(report.broken)


def read_flags(typed: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags with their values, and all other words."""
    flags: dict[str, str] = {}
    words: list[str] = []
    rest = iter(typed)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif name not in FLAGS:
            raise ConfigError(f"{word}: there is no such flag; {suggest(name, FLAGS)}")
        else:
            flags[name] = next(rest, "") if name == "--timeout" and not equals else value
    return flags, words


def seconds(typed: str | None) -> float:
    """The timeout; ConfigError if it is none."""
    try:
        number = TIMEOUT_S if typed is None else float(typed)
    except ValueError:
        number = 0.0
    if not 0 < number < 3600:
        raise ConfigError(f"--timeout={typed}: must be seconds, more than 0; say --timeout={TIMEOUT_S:g}")
    return number


def examine(job: Job, timeout: float) -> Report:
    """All checks. What train would refuse is a ConfigError; any other failure to launch is a finding."""
    backends.check_there(job.backend.name)
    report = Report()
    with trial_folder(job, report) as folder, Events(folder / "events.jsonl", (tell_wait,)) as events:
        trial = replace(job, dir=str(folder), storage="")
        try:
            with placed(trial, events) as gang:
                gang.open(trial, preload.modules(job.job.target, gang.plan.ask.backend))
                report.passed("launch")
                Rounds(settled(trial, gang.plan), gang, report, timeout).make()
        except (ConfigError, Stopped):
            raise
        except RaydistError as error:
            report.add("launch", Finding("launch", "fail", (), str(error), ""))
    return report


@contextlib.contextmanager
def placed(job: Job, events: Events) -> Iterator[Gang]:
    """The gang that train would start."""
    if job.group == "inline":
        here = inline.this_machine(job)
        ask = placement.ask(job, [here])
        with inline.in_thread(placement.seat(ask, [here] * len(ask.bundles)), events) as gang:
            yield gang
        return
    with cluster.connect(job, events):
        ask = placement.ask(job, cluster.nodes(), cluster.node_types())
        with cluster.placed(job, ask, events) as gang:
            yield gang


@contextlib.contextmanager
def trial_folder(job: Job, report: Report) -> Iterator[Path]:
    """A folder of ours where the run folder would be made, gone afterwards; elsewhere if nothing can be made there."""
    parent = next(place for place in Path(job.dir).absolute().parents if place.is_dir())
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix=".raydist-doctor-", dir=parent))
            report.passed("run folder")
        except OSError as error:
            text = f"no run folder can be made in {parent}: {error.strerror}"
            report.add("run folder", Finding("run folder", "fail", (), text, "hydra.run.dir=<a folder that you own>"))
            made = stack.enter_context(tempfile.TemporaryDirectory())
        yield Path(made)


def tell_wait(happened: Event) -> None:
    """What the gang waits for, while it waits."""
    if happened["kind"] in ("wait", "warning"):
        print(happened["text"], file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
