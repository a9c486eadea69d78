"""The command `raydist doctor`: test whether nodes and network can run the job. (driver)

`python -m raydist.tools.doctor` is the same. It places the job's worker group and runs checks in
its agents. It starts no rank and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raydist.cluster import connect, drain, placement
from raydist.launch import inline, placement_group, preload
from raydist.launch.worker_group import WorkerGroup
from raydist.network.finding import Finding
from raydist.recovery.policy import settle_job
from raydist.reporting import wording
from raydist.settings import compose
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, RaydistError, Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.shared.signals import stoppable
from raydist.state import object_store
from raydist.state.object_store import Remote
from raydist.tools import doctor_report
from raydist.tools.command_line import ToolParser, number, run_tool
from raydist.tools.doctor_findings import CHECKS
from raydist.tools.doctor_report import Report
from raydist.tools.doctor_rounds import Rounds
from raydist.worker import backends

DESCRIPTION = """\
Places the job as raydist.train would, then tests its nodes and every connection between them.
Starts no rank.
Exit code: 0 if the job can run, 1 if something would break it, 2 for a wrong setting.
"""
CHECKED = "\n".join(
    ["checks in addition to those of each launch:", *wording.table([*map(list, CHECKS.items())])]
)
TIMEOUT_S = 3.0


def main(argv: Sequence[str] | None = None) -> int:
    """Test and report.

    The exit code: 0, 1 if something would break the job, 2 for a wrong setting.
    """

    def doctor() -> int:
        parser = ToolParser("doctor", DESCRIPTION)
        parser.epilog = CHECKED
        parser.add_argument("--json", action="store_true", help="print JSON instead of the report")
        parser.add_argument(
            "--timeout",
            metavar="S",
            default=f"{TIMEOUT_S:g}",
            help="seconds for one connection (3)",
        )
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        timeout = number("--timeout", arguments.timeout, low=0.001, high=3600)
        with stoppable():
            report = examine_cluster(compose.compose(arguments.overrides), timeout)
        doctor_report.show_report(report, as_json=arguments.json)
        return int(report.broken)

    return run_tool(doctor)


def examine_cluster(job: Job, timeout: float) -> Report:
    """Run all checks.

    ConfigError: raydist.train would refuse the job. Other launch failures become findings.
    """
    backends.check_installed(job.backend.name, job.script)
    report = Report()
    with (
        storage_probe(job, report) as probe,
        trial_folder(job, report) as folder,
        Events(folder / EVENTS, (print_waiting,)) as events,
    ):
        trial = replace(job, dir=str(folder), storage="", scale=replace(job.scale, keep_warm_s=0))
        try:
            with checked_group(trial, events) as group:
                settled = settle_job(trial, group.plan)
                group.open(settled, preload.of(settled))
                report.note_check("launch")
                Rounds(settled, group, report, timeout, probe).make()
        except (ConfigError, Stopped):
            raise
        except RaydistError as error:
            report.add("launch", Finding("launch", "fail", (), str(error), ""))
    return report


@contextlib.contextmanager
def checked_group(job: Job, events: Events) -> Iterator[WorkerGroup]:
    """Open the worker group that raydist.train would start."""
    if connect.settle_group(job).group == "inline":
        node = inline.inline_node(job)
        request = placement.resources_for(job, [node])
        with inline.in_thread(
            placement.assign_ranks(request, [node] * len(request.bundles)), events
        ) as group:
            yield group
        return
    with connect.connect(job, events):
        nodes = drain.usable_nodes(job, connect.alive_nodes())  # those of raydist.train
        request = placement.resources_for(job, nodes, connect.node_types())
        with placement_group.placed_group(job, request, events) as group:
            yield group


@contextlib.contextmanager
def trial_folder(job: Job, report: Report) -> Iterator[Path]:
    """Yield a temporary folder next to the run folder.

    If it can't be created there, add a finding and yield a folder elsewhere.
    """
    parent = next(folder for folder in Path(job.dir).absolute().parents if folder.is_dir())
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".raydist-doctor-", dir=parent)
            )
            report.note_check("run folder")
        except OSError as error:
            text = f"can't make a run folder in {parent}: {error.strerror}"
            report.add(
                "run folder",
                Finding("run folder", "fail", (), text, "hydra.run.dir=<a folder that you own>"),
            )
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield Path(folder)


@contextlib.contextmanager
def storage_probe(job: Job, report: Report) -> Iterator[str]:
    """Yield a file in the job's storage, removed at the end.

    Empty without storage, or with a finding. ConfigError: the storage can't be right.
    """
    if not job.storage:
        yield ""
        return
    object_store.check_url("storage", job.storage)
    place = object_store.parse_path(job.storage)
    if not isinstance(place, Remote):  # a run creates the folder; the doctor leaves nothing behind
        place = next(folder for folder in (place, *place.parents) if folder.is_dir())
    probe = place / f".raydist-doctor-{secrets.token_hex(4)}"
    try:
        with object_store.environment(job.env):
            probe.write_text("written by raydist.tools.doctor")
        report.note_check("storage")
    except Exception as error:
        text = f"storage={job.storage} can't be written here ({object_store.reason(error)})"
        fix = "storage=FOLDER or storage=s3://BUCKET/FOLDER, with its credentials in env_file="
        report.add("storage", Finding("storage", "fail", (), text, fix))
        yield ""
        return
    try:
        yield str(probe)
    finally:
        with contextlib.suppress(Exception), object_store.environment(job.env):
            probe.drop() if isinstance(probe, Remote) else probe.unlink()


def print_waiting(event: Event) -> None:
    """Print the warnings of the launch, and what it waits for."""
    if isinstance(event, kinds.Wait | kinds.Warning):
        print(event.text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
