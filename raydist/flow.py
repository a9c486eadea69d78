"""The flow: settings -> Job -> cluster -> plan -> worker group -> ranks -> Result. (driver)"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from raydist.cluster import connect, drain, placement
from raydist.cluster.nodes import ResourceRequest
from raydist.cluster.queue.turn import Turn, settle_queue, turn_of
from raydist.launch import (
    inline,
    network_check,
    placement_group,
    preload,
    run_storage,
    warm_server,
)
from raydist.launch.deputies import Deputies
from raydist.launch.gangs import OneOfMany
from raydist.launch.model_check import ModelCheck
from raydist.launch.payload import RemoteCall
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.deputy import Duty
from raydist.recovery.attempts import Attempts, explain_failure
from raydist.recovery.policy import settle_job
from raydist.reporting import result
from raydist.reporting.page_files import last_page
from raydist.reporting.result import Result
from raydist.settings import compose
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.errors import ConfigError, as_raydist_error
from raydist.shared.events import Events, Reader
from raydist.shared.outcome import Attempt
from raydist.shared.signals import stoppable, stopper
from raydist.watch.operate.answers import OperatedRun
from raydist.watch.operate.profiling import collecting
from raydist.watch.operate.server import OperateServer
from raydist.watch.track import Trackers
from raydist.watch.watching import watching
from raydist.worker import backends

T = TypeVar("T")


@overload
def run(
    job: Callable[..., T],
    *overrides: str,
    args: Sequence[Any] = (),
    on_event: Reader | None = None,
    **kwargs: Any,
) -> Result[T]: ...
@overload
def run(job: str, *overrides: str, on_event: Reader | None = None) -> Result[Any]: ...
def run(
    job: str | Callable[..., T],
    *overrides: str,
    args: Sequence[Any] = (),
    on_event: Reader | None = None,
    **kwargs: Any,
) -> Result[Any]:
    """Run a job on every rank and return its Result. It blocks until the run is over.

    - `job`: a function, or the text after `job=` on a command line.
    - `overrides`: settings as typed after `raydist train`.
    - `args`, `kwargs`: for a function. It is called on each rank with them, with the settings if it
      has a parameter `config`, and with `job.args`; `args` are the parameters beside `config`. They
      travel by cloudpickle, as does what it returns: `Result.values`, by rank.
    - `on_event`: called in this process with each event of the run as it happens, an object of a
      class of `raydist.events`. An exception in it is a warning of the run, and does not end it.

    ConfigError: a wrong setting, or an argument that cannot be pickled; nothing was started.
    LaunchError: the cluster, a node or a rank could not be started. RunFailed: a rank failed and
    was not restarted. Stopped: SIGINT, SIGTERM or SIGHUP.

        raydist.run(train, "scale=2x8", "backend=nccl", args=(0.1,)).values
    """
    return run_job(*create_run(job, overrides, args, kwargs), on_event=on_event)


def create_run(
    job: str | Callable[..., Any],
    overrides: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Job, RemoteCall | None]:
    """Return the settings of a run, whose folder is created, and the call if the job is a function.

    The arguments and the errors are those of `run`.
    """
    if isinstance(job, str):
        return compose.compose([f"job={job}", *overrides], claim=True), None
    settings = compose.compose(overrides, function=job, claim=True)
    return settings, RemoteCall.of(job, args, kwargs)


def run_job(
    job: Job,
    call: RemoteCall | None = None,
    many: OneOfMany | None = None,
    on_event: Reader | None = None,
) -> Result[Any]:
    """THE FLOW: run the job, make its Result, write and upload the records.

    `many`: the run is one of several.
    """
    folder = Path(job.dir)
    halt, shown = (many.halt, many.reader) if many else (None, None)
    with stoppable(halt), watching(job, shown, on_event) as (events, figures):
        # The connection to Ray closes after the event `result`: what its readers count goes out
        # over it.
        with Trackers(job, events) as trackers, ExitStack() as connection:
            try:
                events.add(
                    kinds.Run(
                        name=job.name,
                        dir=str(folder),
                        target=job.job.target,
                        pages=last_page(folder),
                    )
                )
                duty = trackers.duty()
                attempt = attempt_job(trackers.for_ranks(), call, events, connection, many, duty)
            except Exception as error:  # Ray's errors too: whatever happens, there is a result
                attempt = Attempt(error=as_raydist_error(error))
            outcome: Result[Any] = result.make_result(folder, attempt, figures)
            outcome.save()
            events.add(kinds.Result(**outcome.to_json()))
        run_storage.upload_records(job, events)
    if attempt.error is not None:
        raise attempt.error
    return outcome.or_raise()


def attempt_job(
    job: Job,
    call: RemoteCall | None,
    events: Events,
    connection: ExitStack,
    many: OneOfMany | None = None,
    duty: Duty | None = None,
) -> Attempt:
    """Connect, then place and attempt the job until the run is over.

    Nearly always one placement is enough. `connection`: disconnects from Ray when it is closed.
    `duty`: what the nodes tell if this machine is lost; None: nothing.
    """
    backends.check_installed(job.backend.name, job.script)
    run_storage.reserve_run(job)
    group, job = job.group, connect.settle_group(job)
    check = ModelCheck(job)
    if job.group == "inline":
        events.add(kinds.Cluster(address="", requested=group))
        check.refuse()
        return attempt_inline(job, call, events, alone=many is None)
    warm_server.prepare(job)  # while Ray answers
    connection.enter_context(connect.connect(job, events))
    check.refuse()
    job = settle_queue(job)
    deputies = Deputies(duty, events) if duty else None
    attempts, turn = Attempts(job, call, events, deputies), turn_of(job, events)
    while attempts.outcome is None:
        attempt_placed(job, events, attempts, turn, many)
    return attempts.conclude()


def attempt_placed(
    job: Job, events: Events, attempts: Attempts, turn: Turn, many: OneOfMany | None
) -> None:
    """Place the job, and attempt it there until the run is over or must leave its nodes."""
    try:
        request = attempts.request = next_request(job, attempts.request, events.warn)
        with placement_group.placed_group(
            job, request, events, turn, many.gangs if many else None
        ) as group:
            carry_out(job, group, events, attempts)
    except Exception as error:
        attempts.cut_short(as_raydist_error(error))


def next_request(
    job: Job, earlier: ResourceRequest | None, warn: Callable[[str], None] = lambda text: None
) -> ResourceRequest:
    """Return the resources that the next placement of a job requests.

    `earlier`: those of the placement before. A run keeps its size, unless that may change; it does
    not wait for spares that were lost. If the cluster has too few nodes for an elastic run now, or
    none with GPUs, some were lost since then: the run waits until it can have its minimum
    (scale.wait_s). ConfigError: it has too few for the first placement.
    """
    # scale=cluster is the nodes of the beginning: with another number of ranks the global batch
    # would be another, and nothing would say so.
    if earlier is not None and job.scale.max_nodes is None:
        if not earlier.spares:
            return earlier
        nodes, types = connect.remaining_nodes(), connect.node_types()
        return placement.with_possible_spares(earlier, nodes, types)
    nodes, types = drain.usable_nodes(job, connect.alive_nodes()), connect.node_types()
    try:
        request = placement.resources_for(job, nodes, types)
    except ConfigError:
        if earlier is None:
            raise
    else:
        if earlier is None and types is None and placement.without_gpus_now(job, nodes):
            warn(
                "no node has a GPU now, and Ray does not say which nodes may come: the ranks use "
                "CPUs; type backend=nccl scale=NODESxGPUS for GPUs, or backend=gloo"
            )
        if earlier is None or request.backend == earlier.backend:
            return request
    return placement.with_bundles(earlier, job.scale.nodes or 1)


def attempt_inline(job: Job, call: RemoteCall | None, events: Events, alone: bool) -> Attempt:
    """Attempt the job without Ray, on this machine.

    `alone`: this is the only run of the process, which can be the only rank itself.
    """
    node = inline.inline_node(job)
    plan = placement.assign_ranks(
        request := placement.resources_for(job, [node]), [node] * len(request.bundles)
    )
    # a profile is made, and a person attended to, in a process of the rank's own
    own_process = job.script or job.watch.profile or job.watch.post_mortem
    if alone and plan.world_size == 1 and not own_process:
        return explain_failure(inline.run_here(settle_job(job, plan), plan, call, events), events)
    attempts = Attempts(job, call, events)
    try:
        with inline.in_thread(plan, events) as group:
            carry_out(job, group, events, attempts)
    except Exception as error:
        attempts.cut_short(as_raydist_error(error))
    return attempts.conclude()


def settle_start(job: Job, events: Events, again: bool) -> Job:
    """Return the job with start=spawn if forked ranks would not see what its file has set.

    `again`: whether the warning about it has been given.
    """
    if job.start == "spawn" or not (name := preload.variable_set_early(job)):
        return job
    if not again:
        what = Path(job.script or job.job.target.rpartition(":")[0]).name
        events.warn(
            f"{what} sets {name} before it imports a package that may read it: each rank starts as "
            "a new interpreter, as with start=spawn. With env.NAME=VALUE on the command line "
            "instead, ranks are forked, which is quicker"
        )
    return replace(job, start="spawn")


def carry_out(job: Job, group: WorkerGroup, events: Events, attempts: Attempts) -> None:
    """Open the agents, then make attempts with them until the run is over or leaves its nodes."""
    events.add(kinds.Plan(**group.plan.as_event()))
    job = settle_start(settle_job(job, group.plan), events, attempts.count > 0)
    try:
        warm, paused = warm_server.acquire(job), attempts.take_paused()
        group.open(job, preload.of(job), warm, attempts.count, paused)
        network_check.check_network(group, events.warn)
    except Exception as error:
        if not attempts.lost_while_opening(job, group, error):
            raise
        return
    folder, node, buttons = Path(job.dir), connect.own_node(), job.watch.operate
    run = OperatedRun(folder, group, events, node, stopper(), attempts.changes, buttons)
    with OperateServer(run), collecting(job.watch.profile, group, events):
        attempts.make(job, group)
