"""Profiles of the same steps of all ranks, joined in one file. (driver)"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from raydist.launch.limits import ANSWER_S, longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetStatus
from raydist.messages.command import ReadCommand, RunCommand
from raydist.messages.operate import MakeProfile, TextReply
from raydist.messages.profile import ARMED
from raydist.messages.rank import PrepareProfile, ProfileNow
from raydist.shared import kinds
from raydist.shared.errors import LaunchError, last_line
from raydist.shared.events import Events
from raydist.shared.rank_names import name_ranks
from raydist.watch.operate import agreement, traces
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.records import follow_events, new_file, record
from raydist.watch.operate.traces import Part

PREPARE_S = 60.0
"""Limit on the wait for the profiler to be loaded in each rank."""
READ_S = 1.0
"""Seconds that an agent waits for a further piece of a file."""
COLLECT_S = 120.0
"""Limit on the wait, at the end of the ranks, for the profile of watch.profile."""
AT_ONCE = 8
"""Files that are read from nodes at a time."""
ASKED = 5
"""Times that a node is asked for its clock; the quickest reply counts."""


class Profile(NamedTuple):
    """A profile that is being made."""

    name: str
    ranks: Sequence[int]
    since: int
    """The size of the file of events at the time of the request."""
    leads: Mapping[str, float]
    """By node: the lead of its clock over the driver's, in seconds."""


def make_profile(
    group: WorkerGroup,
    events: Events,
    request: MakeProfile,
    connection: CommandLink,
    ended: threading.Event,
) -> None:
    """Profile the ranks, and write one file into the run folder.

    `ended`: set once no rank runs.

    ConfigError: the program has no steps. LaunchError: a rank can't be profiled, was started again
    meanwhile, or has ended.
    """
    ranks = sorted(set(request.ranks)) or list(range(group.plan.world_size))
    name = f"profile-{secrets.token_hex(4)}"
    prepare_ranks(group, ranks, name, request.memory)
    leads = clock_leads(group, ranks)
    profile = Profile(name, ranks, events.path.stat().st_size, leads)
    if request.steps:
        step = agreement.agree_on_step(group, "profile", {"steps": request.steps}, ranks)
        what = f"steps {step + 1} to {step + request.steps}"
    else:
        for rank in ranks:
            group.call(rank, ProfileNow(request.seconds))
        what = f"{request.seconds:g} s"
    connection.send(TextReply([f"profiling {what} of {name_ranks(ranks)}"]))
    reports = await_reports(events, profile, ended)
    lines, file = gather(group, events.path.parent, profile, reports)
    record(events, "profile", "; ".join([what, *lines]), request.ranks, file)
    connection.send(TextReply(lines, file))


def prepare_ranks(group: WorkerGroup, ranks: Sequence[int], name: str, memory: bool) -> None:
    """Have all ranks load the profiler. LaunchError: one can't be profiled, and why."""
    calls = {rank: group.call(rank, PrepareProfile(name, memory)) for rank in ranks}
    wait(calls.values(), timeout=longest(PREPARE_S, len(calls)))
    replies = {rank: reply_or_error(call) for rank, call in calls.items()}
    if silent := [rank for rank, why in replies.items() if why is None]:
        raise LaunchError(agreement.no_answer(silent))
    refused = {rank: why for rank, why in replies.items() if why}
    if refused:
        why = next(iter(refused.values()))
        which = name_ranks([rank for rank, each in refused.items() if each == why])
        raise LaunchError(f"{which} can't be profiled: {why}")


def reply_or_error(call: Future[str]) -> str | None:
    """Return why a rank can't be profiled; None: it does not answer."""
    if not call.done():
        return None
    error = call.exception()
    return str(error) if error is not None else call.result()


def clock_leads(group: WorkerGroup, ranks: Iterable[int]) -> dict[str, float]:
    """Return the lead of each node's clock over the driver's; exact to half a round trip."""
    leads: dict[str, float] = {}
    for rank in ranks:
        node = group.plan.slots[rank].node.id
        if node in leads:
            continue
        timings: list[tuple[float, float]] = []
        for _ in range(ASKED):
            began, at = time.perf_counter(), time.time()
            status = group.call(rank, GetStatus()).result(ANSWER_S)
            took = time.perf_counter() - began
            if status is not None:
                timings.append((took, status.at - at - took / 2))
        leads[node] = min(timings)[1] if timings else 0.0
    return leads


def await_reports(
    events: Events, profile: Profile, ended: threading.Event
) -> dict[int, kinds.Profiled]:
    """Return what each rank reports. LaunchError: the ranks were started again, or have ended."""
    reports: dict[int, kinds.Profiled] = {}
    for event in follow_events(events.path, profile.since, ended=ended):
        if isinstance(event, kinds.Profiled) and event.name == profile.name:
            reports[event.rank] = event
        elif isinstance(event, kinds.StartsAttempt | kinds.Result):
            break
        if len(reports) == len(profile.ranks):
            return reports
    raise LaunchError("the ranks ended before their profile was complete")


def gather(
    group: WorkerGroup, folder: Path, profile: Profile, reports: Mapping[int, kinds.Profiled]
) -> tuple[list[str], str]:
    """Fetch the files of the ranks, and join them; return lines for a person, and the file.

    LaunchError: there is no trace, or they could not be joined.
    """
    made = {rank: each for rank, each in sorted(reports.items()) if each.path}
    lines = [f"rank {rank}: {each.error}" for rank, each in sorted(reports.items()) if each.error]
    if not made:
        raise LaunchError(lines[0])
    out = new_file(folder, "profile", ".json.gz")
    parts_folder = out.parent / f".{profile.name}"
    snapshots = out.parent / out.name.replace(".json.gz", "-memory")
    wanted = [
        (rank, each.path, parts_folder / f"rank-{rank}.json.gz") for rank, each in made.items()
    ]
    if memories := [(rank, each.memory) for rank, each in made.items() if each.memory]:
        wanted += [(rank, path, snapshots / f"rank-{rank}.pickle") for rank, path in memories]
    try:
        parts_folder.mkdir()
        if memories:
            snapshots.mkdir()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for _ in pool.map(lambda each: bring(group, *each), wanted):
                pass
        slots = group.plan.slots
        parts = [
            Part(
                rank,
                slots[rank].node.host,
                f"rank-{rank}.json.gz",
                profile.leads.get(slots[rank].node.id, 0.0),
            )
            for rank in made
        ]
        (parts_folder / traces.LIST).write_text(json.dumps(parts), encoding="utf-8")
        join_parts(parts_folder, out)
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(parts_folder, ignore_errors=True)
    if memories:
        lines.append(f"memory of the GPUs: {snapshots.relative_to(folder)}")
    return lines, str(out.relative_to(folder))


def bring(group: WorkerGroup, rank: int, path: str, to: Path) -> None:
    """Move a file from a rank's node to this machine. LaunchError: it can't be read."""
    move = ("sh", "-c", 'cat "$0" && rm -f "$0"', path)
    pid = group.call(rank, RunCommand(move)).result(ANSWER_S)
    errors = b""
    with to.open("wb") as file:
        while True:
            output = group.call(rank, ReadCommand(pid, READ_S)).result(ANSWER_S)
            file.write(output.out)
            errors += output.err
            if output.end is not None:
                break
    if output.end.code or output.end.signal:
        raise LaunchError(f"rank {rank}: {errors.decode(errors='replace').strip()}")


def join_parts(folder: Path, out: Path) -> None:
    """Join the traces of a folder in a separate process. LaunchError: it failed."""
    command = [sys.executable, "-m", traces.__name__, str(folder), str(out)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        raise LaunchError(f"the traces could not be joined: {last}")


@contextlib.contextmanager
def collecting(steps: str, group: WorkerGroup, events: Events) -> Iterator[None]:
    """Gather the profiles of `watch.profile` while the block runs. A failure does not end the run.

    `steps`: the setting.
    """
    if not steps:
        yield
        return
    ended, since = threading.Event(), events.path.stat().st_size
    thread = threading.Thread(
        target=collect, args=(steps, group, events, since, ended), name="raydist-profile"
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(COLLECT_S)


def collect(
    steps: str, group: WorkerGroup, events: Events, since: int, ended: threading.Event
) -> None:
    """Gather each profile that all ranks of an attempt have reported."""
    reports: dict[int, kinds.Profiled] = {}
    leads: dict[str, float] = {}
    try:
        for event in follow_events(events.path, since, ended=ended):
            if isinstance(event, kinds.StartsAttempt):
                reports.clear()
                leads.clear()
            elif isinstance(event, kinds.Profiled) and event.name == ARMED:
                reports[event.rank] = event
                leads = leads or clock_leads(group, range(group.plan.world_size))
            if len(reports) == group.plan.world_size:
                profile = Profile(ARMED, sorted(reports), since, leads)
                lines, file = gather(group, events.path.parent, profile, reports)
                record(events, "profile", "; ".join([f"steps {steps}", *lines]), (), file)
                reports.clear()
    except Exception as error:
        events.warn(f"there is no profile of steps {steps}: {last_line(error)}")
