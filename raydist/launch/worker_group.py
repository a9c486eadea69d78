"""The worker group: opens, starts, queries and stops the agents of all ranks. (driver)

It sends them typed requests.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raydist.cluster.placement import Plan, Slot
from raydist.launch import flush, preload, runtime_env, shared_paths
from raydist.launch.flush import Description, FlushNode
from raydist.launch.hosts import Hosts
from raydist.launch.limits import ANSWER_S, CLOSE_S, IDLE_S, NETWORK_S, OPEN_S, longest
from raydist.launch.opened_nodes import OpenedNodes
from raydist.launch.shard_saver import ShardSaver
from raydist.messages.agent import (
    Close,
    FindUnreachablePaths,
    GetNetworkUse,
    GetValue,
    IsOpen,
    KeepCall,
    Open,
    Opened,
    RankValue,
    RecordedEnd,
    StartRank,
    StopRank,
    WaitForWriter,
    WarmServer,
)
from raydist.messages.request import AnyReply, Request
from raydist.messages.server import OpenStore, StoreAddress, StoreKind
from raydist.network import binding, checks_node, traffic
from raydist.network.facts import Facts
from raydist.network.names import EnvVar
from raydist.network.variables import Rendezvous
from raydist.node import recorded_end
from raydist.settings.config import Job, as_dict
from raydist.shared import arguments, kinds
from raydist.shared.errors import (
    CallLost,
    ConfigError,
    LaunchError,
    Stopped,
    cause_of,
    last_line,
)
from raydist.shared.events import Events
from raydist.shared.own_path import machine_id
from raydist.state.shard_choice import WholeShards

Reply = TypeVar("Reply")
T = TypeVar("T")


class WorkerGroup(AbstractContextManager["WorkerGroup"]):
    """The agents of a run.

    One round opens them, one starts the ranks; recovery.supervisor then monitors them.
    """

    def __init__(self, plan: Plan, hosts: Hosts, events: Events) -> None:
        self.plan = plan
        self.hosts = hosts
        self.first_world_size = plan.world_size
        """The number of ranks in the first attempt."""
        self.facts: tuple[Facts, ...] = ()
        self.rendezvous = Rendezvous()
        self._events = events
        self._known_values: dict[int, RankValue] = {}
        """The values of ranks that have ended although their agents do not answer."""
        self._silent = set[int]()
        """The ranks whose agents do not answer, once the run is over."""
        self._saver = ShardSaver(events.add)
        self._kept_call: bytes | Awaitable[bytes] | None = None
        """The job's pickled function, as `put` returned it."""

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to the agent of a rank."""
        return self.hosts.call(rank, request)

    def open(
        self,
        job: Job,
        modules: Sequence[str],
        warm_server: WarmServer | None = None,
        attempt: int = 0,
    ) -> None:
        """Round 1: probe all nodes, warm their fork servers, open rank 0's rendezvous store.

        `warm_server`: a fork server that is already starting on the driver's machine
        (launch.warm_server). `attempt`: the number of attempts that other groups made.
        """
        began = time.time()
        file = self._rendezvous_file(job, attempt)
        request = Open(
            run=uuid.uuid4().hex[:8],
            start=job.start,
            modules=tuple(modules),
            env=job.env,
            interface=job.fabric.interface,
            threads=max(1, int(job.scale.cpus)),
            mpirun=job.backend.mpi.mpirun,
            secret=secrets.token_hex(32),
            keep_s=job.scale.keep_warm_s,
            installed=preload.lasting_modules(modules),
            warm_server=warm_server,
            ray_stays=self.hosts.ray_stays,
        )
        self._job = job
        self.nodes = OpenedNodes(request)
        if self.hosts.standby is not None:
            self.hosts.standby.set_request(request)
        # Not in a later attempt: the run continues with the paths that its nodes see.
        files = shared_paths.files(job, str(file.parent) if file else "")
        unreachable = self._find_unreachable(files)
        opened = self._open(range(self.plan.world_size), None if file else self._store)
        self._check_paths(files, [each.result(ANSWER_S * 2) for each in unreachable])
        # Nodes measure by their own clocks, which may be wrong.
        born = min(now := time.time(), max(began, *(each.born for each in opened)))
        self._events.add(kinds.Phase(name="actors", s=born - began))
        self._events.add(kinds.Phase(name="warm-up", s=now - born))
        self._note_facts()
        self._set_rendezvous(opened[0].store, file, attempt)

    def _set_rendezvous(self, store: StoreAddress | None, file: Path | None, attempt: int) -> None:
        port, secret = (store.port, store.secret) if store else (None, "")
        self.rendezvous = Rendezvous(
            self.facts[0].address, port, str(file) if file else None, secret, attempt
        )

    def prepare_attempt(
        self,
        job: Job,
        attempt: int,
        resize: bool = False,
        gone: Collection[int] = (),
        keep: bool = False,
    ) -> list[int]:
        """Replace lost agents and open a new rendezvous for another attempt.

        Returns the ranks that moved to other nodes. `resize`: also use the nodes that have joined.
        `gone`: the ranks whose agents are known to be lost. `keep`: ranks that wait for the attempt
        keep their processes and their rendezvous, if no node was replaced. Raises LaunchError if no
        replacement came within scale.wait_s, or rank 0's node can't open the rendezvous.
        """
        before = {slot.node.id for slot in self.plan.slots}
        until = time.monotonic() + job.scale.wait_s
        moved = self._replace_lost(gone, resize, until)
        while not self._opens_rendezvous(job, attempt, resize or bool(moved), until, keep):
            moved |= self._replace_lost((), False, until)  # a node was lost meanwhile
        if self.hosts.standby is not None:  # the ranks were renumbered
            return [slot.rank for slot in self.plan.slots if slot.node.id not in before]
        return sorted(moved)

    def _replace_lost(self, gone: Collection[int], resize: bool, until: float) -> set[int]:
        """Replace the agents of lost nodes until none is lost; return the ranks that had them.

        `gone`, `resize`: as in prepare_attempt. `until`: the time on the monotonic clock after
        which no further node is replaced.
        """
        moved = set[int]()
        lost = self._ranks_of_lost_nodes(gone)
        while lost or resize:
            moved.update(lost)
            new = self._replace(lost)
            try:
                self._open(new, None)
                resize = False
            except LaunchError:  # another node is lost
                if time.monotonic() > until:
                    raise
            lost = self._ranks_of_lost_nodes()
        return moved

    def _ranks_of_lost_nodes(self, gone: Collection[int] = ()) -> list[int]:
        """Return all ranks of the nodes that are lost or draining.

        One actor hosts all agents of a node.
        """
        ranks = {*self.lost_ranks(gone), *self.draining_ranks()}
        nodes = {self.plan.slots[rank].node.id for rank in ranks}
        return [slot.rank for slot in self.plan.slots if slot.node.id in nodes]

    def _opens_rendezvous(
        self, job: Job, attempt: int, replaced: bool, until: float, keep: bool
    ) -> bool:
        """Open the rendezvous of another attempt; return False if that is to be tried again.

        A node was lost meanwhile, or only the call, as when a connection breaks. `replaced`:
        whether agents were replaced. `until`: as in _replace_lost. `keep`: as in prepare_attempt.
        Raises LaunchError if no node is lost, but the rendezvous can't be opened.
        """
        try:
            if replaced:
                self._note_facts()
            self._wait_for_writer()
            if not replaced:  # otherwise a node that is gone may hold a part of it
                self._saver.rest(flush.FLUSH_S)
            if keep and not replaced:
                self.rendezvous = replace(self.rendezvous, attempt=attempt)
                return True
            file, store = self._rendezvous_file(job, attempt), None
            if file is None:
                request = OpenStore(self._store, self.facts[0].address)
                store = self.call(0, request).result(ANSWER_S)
            self._set_rendezvous(store, file, attempt)
        except (ConfigError, Stopped):
            raise
        # Raised by Ray for a call to an actor that is gone, or by the agent.
        except Exception as error:
            lost = time.monotonic() < until and (isinstance(error, CallLost) or self.lost_ranks())
            if lost:
                return False
            host = self.plan.slots[0].node.host
            raise LaunchError(f"no rendezvous on {host}: {last_line(error)}") from error
        return True

    def _wait_for_writer(self) -> None:
        """Wait for the checkpoint that rank 0's node is writing."""
        try:
            self.call(0, WaitForWriter()).result(flush.FLUSH_S)
        except Exception as error:  # the attempt then starts from an older checkpoint
            host = self.plan.slots[0].node.host
            why = f"{type(cause_of(error)).__name__}: {last_line(error)}"
            self._events.warn(f"not waiting for the checkpoint that {host} may be writing ({why})")

    def lost_ranks(self, gone: Collection[int] = ()) -> list[int]:
        """Return the ranks that can't be started where they are.

        Their agent is gone, or new and not open yet. `gone`: ranks known to be lost. Agents on
        their nodes get no request: a call to a dead host fails only after 20 s, during which Ray
        calls its actors temporarily unavailable.
        """
        nodes = {self.plan.slots[rank].node.id for rank in gone}
        replies = {
            slot.rank: self.call(slot.rank, IsOpen())
            for slot in self.plan.slots
            if slot.node.id not in nodes
        }
        wait(replies.values(), timeout=longest(IDLE_S, len(replies)))
        is_open = {
            rank
            for rank, reply in replies.items()
            if reply.done() and reply.exception() is None and reply.result()
        }
        return [slot.rank for slot in self.plan.slots if slot.rank not in is_open]

    def draining_ranks(self) -> list[int]:
        """Return the ranks on draining nodes; none if too few other nodes remain for the job."""
        standby = self.hosts.standby
        if standby is None:
            return []
        draining = self.hosts.draining()
        ranks = [slot.rank for slot in self.plan.slots if slot.node.id in draining]
        return ranks if ranks and standby.enough_remain() else []

    def values(self) -> list[RankValue]:
        """Return what each rank returned or raised, pickled.

        An agent that is gone has an empty RankValue.
        """
        ranks = range(self.plan.world_size)
        calls = {
            rank: self.call(rank, GetValue()) for rank in ranks if rank not in self._known_values
        }
        wait(calls.values(), timeout=longest(ANSWER_S, len(calls)))
        answers = {
            rank: each.result()
            for rank, each in calls.items()
            if each.done() and each.exception() is None
        }
        return [self._known_values.get(rank) or answers.get(rank, RankValue()) for rank in ranks]

    def recorded_end(self, rank: int) -> Future[RecordedEnd | None]:
        """Return, from its node's record, how a rank ended whose agent does not answer.

        None if the rank runs, or nothing is known.
        """
        return self._look(rank, recorded_end.read_end, rank)

    def newest_state(self, within_s: float) -> int | None:
        """Return the step of the newest state on rank 0's node if its agent does not answer.

        -1 if the node holds none; None if the node does not answer either.
        """
        try:
            return self._look(0, recorded_end.newest_state).result(within_s)
        except Exception:  # the node is gone
            return None

    def _look(self, rank: int, look: Callable[..., T | None], *args: Any) -> Future[T | None]:
        """Call a function of node.recorded_end on a rank's node, and return its result."""
        slot = self.plan.slots[rank]
        return self.hosts.on_node(rank, look, self.nodes.run_of(slot), slot.node.id, *args)

    def keep_value(self, rank: int, value: RankValue) -> None:
        """Keep the value of a rank whose agent does not answer."""
        self._known_values[rank] = value

    def give_up(self, silent: Collection[int]) -> None:
        """Send these ranks' agents no further request: they do not answer, and the run is over."""
        self._silent.update(silent)
        self._known_values = {**dict.fromkeys(silent, RankValue()), **self._known_values}

    def flush(self) -> str:
        """Write the last snapshot to the disk; return why no node could, empty if one has."""
        ranks = self.plan.world_size
        return flush.flush(self._flush_nodes, self._job.checkpoint, self._events.add, ranks)

    def save_shards(self, request: kinds.SaveShards) -> None:
        """Have all nodes write the sharded checkpoint that rank 0 requested.

        The ranks train meanwhile.
        """
        of_node = {lead.node_rank: number for number, lead in enumerate(self._leads)}
        ranks: dict[int, tuple[int, ...]] = {}
        for slot in self.plan.slots:
            number = of_node[slot.node_rank]
            ranks[number] = (*ranks.get(number, ()), slot.rank)
        described = Description(
            request.keep, request.best, request.folder, request.metrics, request.reported
        )
        nodes = [FlushNode(lead.node.host, partial(self.call, lead.rank)) for lead in self._leads]
        self._saver.start(nodes, WholeShards(request.step, self.plan.world_size, ranks), described)

    def finish_saves(self) -> None:
        """Wait for a sharded checkpoint being written, unless a node with a part of it is gone."""
        if not self._silent:
            self._saver.rest(flush.FLUSH_S)

    @property
    def _flush_nodes(self) -> list[FlushNode]:
        leads = [slot for slot in self._leads if slot.rank not in self._silent]
        return [
            FlushNode(slot.node.host, partial(self.call, slot.rank), slot.local_world_size)
            for slot in leads
        ]

    def _replace(self, lost: Sequence[int]) -> Sequence[int]:
        """Replace the agents of these ranks with agents on other nodes; return those to open."""
        self.nodes.note_lost([self.plan.slots[rank] for rank in lost])
        self.plan = self.hosts.replace_nodes(lost)
        new = lost
        if self.hosts.standby is not None:
            self.nodes.add_standby(self.hosts.standby.promote())
            new = self.lost_ranks()
        self.nodes.add_new([self.plan.slots[rank] for rank in new])
        return new

    def _open(self, ranks: Sequence[int], store: StoreKind | None) -> list[Opened]:
        """Open the agents of these ranks, and return their replies.

        `store`: the kind of store that rank 0's agent opens.
        """
        slots = [self.plan.slots[rank] for rank in ranks]
        installs = ", ".join(self._job.pip)
        if installs:
            text = f"Ray installs {installs} on each node; the first time takes minutes"
            self._events.add(kinds.Wait(text=text))
        limit = OPEN_S + (runtime_env.INSTALL_S if installs else 0.0)
        replies = self.call_each(self.nodes.requests(slots, store), limit, ranks)
        for slot, opened in zip(slots, replies, strict=True):
            self.nodes.note(slot, opened)
            if opened.warm.cuda:
                text = (
                    f"a module imported on {slot.node.host} initialised CUDA, which no fork "
                    "survives: its ranks are"
                )
                self._events.warn(
                    f"{text} started as new processes, each of which imports everything"
                )
        return replies

    def _check_paths(
        self, files: Mapping[str, str], unreachable: Sequence[Mapping[str, str]]
    ) -> None:
        """Raise for paths of the run that nodes can't see, or warn about them."""
        source = preload.source_of(self._job.job.target)
        text = (
            source.read_text(encoding="utf-8", errors="replace")
            if source and source.is_file()
            else ""
        )
        if warning := shared_paths.check_paths(self._job, self._hosts, unreachable, text, files):
            self._events.warn(warning)

    @property
    def _leads(self) -> list[Slot]:
        """The first slot of each node."""
        return [slot for slot in self.plan.slots if slot.local_rank == 0]

    @property
    def _hosts(self) -> list[str]:
        return [slot.node.host for slot in self._leads]

    def _find_unreachable(self, files: Mapping[str, str]) -> list[Future[dict[str, str]]]:
        """Ask each node which of these files it can't see; return the futures of the replies."""
        request = FindUnreachablePaths(dict(files), self._job.env)
        return [self.call(slot.rank, request) for slot in self._leads]

    def require_visible(self, setting: str, file: str, why: str) -> None:
        """Raise ConfigError if some nodes can't see the file that a setting names."""
        unreachable = [each.result(ANSWER_S * 2) for each in self._find_unreachable({"file": file})]
        shared_paths.require_visible(setting, self._hosts, unreachable, why)

    @property
    def _store(self) -> StoreKind:
        return "horovod" if self._job.backend.name == "horovod" else "tcp"

    @staticmethod
    def _rendezvous_file(job: Job, attempt: int = 0) -> Path | None:
        """Return the file of init_method=file, new for each attempt; None for other methods."""
        if job.init_method != "file":
            return None
        file = Path(job.dir).absolute() / ("rendezvous" + (f"-{attempt}" if attempt else ""))
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def start(self, job: Job, variables: Sequence[Iterable[EnvVar]], call: bytes | None) -> None:
        """Round 2: send every rank its variables, and fork it.

        `call`: the pickled function, if the job is one.
        """
        checks_node.check_nodes(job, self.plan, self.facts, self._events.warn)
        self._send_call(call)
        self._known_values.clear()
        copied = runtime_env.root(job)
        program = arguments.seen_from(copied or os.getcwd(), job.script)
        common = StartRank(
            rank=0,
            env={},
            job=json.dumps(as_dict(job)),
            argv=(program or job.job.target,),
            script=program,
            cwd=""
            if copied
            # An agent that gets no folder uses its actor's, which is the copy.
            else os.getcwd(),
            sys_path=tuple(
                path for path in sys.path if not copied or os.path.abspath(path) != copied
            ),
            nccl_aloud=job.fabric.debug,
            nccl_strict=job.fabric.strict,
            call=call is not None,
            driver=machine_id(),
            keep=bool(self.rendezvous.pids),
        )
        requests, cpus = [], binding.bind_all(job, self.plan, self.facts)
        for rank, rank_variables in enumerate(variables):
            env = {var.name: var.value for var in rank_variables}
            args = arguments.fill(job.args, env, job.init_method, self.plan.request.backend)
            argv, after = (*common.argv, *args), self.nodes.left_on(self.plan.slots[rank])
            requests.append(
                replace(common, rank=rank, env=env, argv=argv, cpus=cpus[rank], after=after)
            )
        processes = self.call_each(requests)
        self.nodes.note_started(self.plan.slots, processes)
        before, pids = self.rendezvous.pids, tuple(each.pid for each in processes)
        kept = tuple(rank for rank, pid in enumerate(pids) if before and before[rank] == pid)
        self.rendezvous = replace(self.rendezvous, pids=pids, kept=kept)
        for slot, pid in zip(self.plan.slots, pids, strict=True):
            self._events.add(kinds.Began(rank=slot.rank, host=slot.node.host, pid=pid))

    def _send_call(self, call: bytes | None) -> None:
        """Send the pickled function to each node, once for all its ranks.

        Each attempt sends it again, because a node may clean its temporary folder during a run of
        weeks. Ray sends it only to nodes that do not have it in memory.
        """
        if call is None:
            return
        if self._kept_call is None:
            self._kept_call = self.hosts.put(call)
        ranks = [slot.rank for slot in self._leads]
        self.call_each([KeepCall(self._kept_call)] * len(ranks), ranks=ranks)

    def report_network(self) -> None:
        """Report which network the run used.

        Reports nothing for a run on one node, or if a node is gone.
        """
        if len(self.plan.nodes) < 2 or self._silent:
            return
        try:
            replies = self.call_each([GetNetworkUse()] * self.plan.world_size, NETWORK_S)
        except LaunchError:
            return
        nodes = [
            traffic.NodeTraffic(
                slot.node.host,
                self.facts[slot.rank].interface,
                self.nodes.ports(slot),
                replies[slot.rank].ports or {},
            )
            for slot in self._leads
        ]
        index = {slot.node_rank: number for number, slot in enumerate(self._leads)}
        node_of_rank = [index[slot.node_rank] for slot in self.plan.slots]
        logs = [reply.nccl for reply in replies]
        strict = self._job.fabric.strict
        event, warnings = traffic.traffic_event(
            self.plan.request.backend, nodes, node_of_rank, logs, strict
        )
        for text in warnings:
            self._events.warn(text)
        self._events.add(event)

    def stop(self, ranks: Iterable[int], grace: float, keep: bool = False) -> None:
        """Send these ranks SIGTERM, and SIGKILL after `grace` seconds.

        `keep`: leave the processes of those that can wait for the next attempt. Does not
        wait: GetNews reports their ends.
        """
        for rank in ranks:
            self.call(rank, StopRank(grace, keep))

    def call_each(
        self,
        requests: Sequence[Request[Reply]],
        limit_s: float = ANSWER_S,
        ranks: Sequence[int] | None = None,
    ) -> list[Reply]:
        """Send one request to the agent of each rank, and return the replies in order.

        `ranks`: None for all. All requests are sent at once. Raises LaunchError, with the first
        rank whose agent failed or did not reply within `limit_s` seconds; its `lost` are the ranks
        whose calls failed. Hundreds of ranks get a little more time.
        """
        slots = self.plan.slots if ranks is None else [self.plan.slots[rank] for rank in ranks]
        futures = [
            self.call(slot.rank, request) for slot, request in zip(slots, requests, strict=True)
        ]
        within = longest(limit_s, len(futures))
        wait(futures, timeout=within, return_when="FIRST_EXCEPTION")
        for slot, future in zip(slots, futures, strict=True):
            if future.done() and (error := future.exception()) is not None:
                text = f"rank {slot.rank} on {slot.node.host} ({slot.node.ip}): {last_line(error)}"
                if isinstance(error, ConfigError):
                    raise ConfigError(text) from error
                raise LaunchError(text, lost=ranks_without_answer(slots, futures)) from error
        silent = [slot for slot, future in zip(slots, futures, strict=True) if not future.done()]
        if silent:
            raise LaunchError(
                f"{len(silent)} of {len(futures)} agents did not answer "
                f"{type(requests[0]).__name__} within "
                f"{within:.3g} s; the first is rank {silent[0].rank} on {silent[0].node.host} "
                f"({silent[0].node.ip})"
            )
        return [future.result() for future in futures]

    def __exit__(self, *_: object) -> None:
        standby = self.hosts.standby.close() if self.hosts.standby else []
        closing = [*standby, *(self.call(slot.rank, Close()) for slot in self.plan.slots)]
        wait(closing, timeout=longest(CLOSE_S, len(closing)))

    def _note_facts(self) -> None:
        """Set the facts of each rank's node, with the rank's own GPUs."""
        gpus = self.hosts.gpus() or (None,) * self.plan.world_size
        self.facts = self.nodes.facts(self.plan.slots, gpus)


def ranks_without_answer(slots: Sequence[Slot], futures: Sequence[Future[Any]]) -> tuple[int, ...]:
    """Return the ranks whose calls have failed, without an answer of the agent."""
    return tuple(
        slot.rank
        for slot, future in zip(slots, futures, strict=True)
        if future.done() and isinstance(future.exception(), CallLost)
    )
