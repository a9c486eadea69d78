"""The worker group: opens, starts, queries and stops the agents of all ranks. (driver)

A call to an agent goes this way:

    WorkerGroup.call      of a rank; call_each: of all ranks at once
    Hosts.call            which machines there are: placement_group.RayHosts, inline.LocalHosts
    Actors.call           the actor that hosts the rank's agent
    Mailbox.send          waits for other requests to the same node; Mail's thread sends them
    AgentHost.exchange    on the node, in one Ray call: node/actor.py
    RankAgent.handle      matches on the class of the request: node/agent.py

The answer returns in the same Ray call, or in the next one, and resolves the future.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raydist.cluster import placement
from raydist.cluster.placement import Plan
from raydist.launch import (
    calls,
    flush,
    network_use,
    preload,
    rendezvous,
    runtime_env,
    shared_paths,
    start_requests,
)
from raydist.launch.flush import FlushNode
from raydist.launch.hosts import Hosts
from raydist.launch.limits import ANSWER_S, CLOSE_S, IDLE_S, NETWORK_S, OPEN_S, longest
from raydist.launch.opened_nodes import OpenedNodes
from raydist.launch.paused_states import PausedStates
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
    StopRank,
    WaitForWriter,
    WarmServer,
)
from raydist.messages.request import AnyReply, Request
from raydist.messages.server import StoreKind
from raydist.network import checks_node
from raydist.network.facts import Facts
from raydist.network.names import EnvVar
from raydist.network.variables import Rendezvous
from raydist.node import recorded_end
from raydist.settings.config import Job
from raydist.shared import env_names, kinds, signals
from raydist.shared.errors import (
    CallLost,
    ConfigError,
    LaunchError,
    Stopped,
    cause_of,
    last_line,
)
from raydist.shared.events import Events
from raydist.shared.rank_names import name_ranks

Reply = TypeVar("Reply")
T = TypeVar("T")


class WorkerGroup(AbstractContextManager["WorkerGroup"]):
    """The agents of a run: which there are, and what each attempt needs of them.

    `open` is the first round of requests, `start` the second; recovery.supervisor then monitors the
    ranks. Between two attempts `prepare_attempt` replaces the agents of lost nodes. `hosts` knows
    the machines, `nodes` what each of them replied.
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
        paused: PausedStates | None = None,
    ) -> None:
        """Round 1: probe all nodes, warm their fork servers, open rank 0's rendezvous store.

        `warm_server`: a fork server that is already starting on the driver's machine
        (launch.warm_server). `attempt`: the number of attempts that other groups made. `paused`:
        the states that nodes hold since the run made way.
        """
        began = time.time()
        file = rendezvous.rendezvous_file(job, attempt)
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
        self.nodes = OpenedNodes(request, paused)
        if self.hosts.standby is not None:
            self.hosts.standby.set_request(request)
        # Not in a later attempt: the run continues with the paths that its nodes see.
        files = shared_paths.files(job, str(file.parent) if file else "")
        unreachable = self._find_unreachable(files)
        store = None if file else rendezvous.store_kind(job)
        used = False
        try:
            opened = self._open(range(self.plan.world_size), store)
            used = bool(self.nodes.held_key(self.plan))
        finally:
            if paused is not None:
                paused.settle(used)  # also if a node was lost: the next placement has none of them
        self._check_paths(files, [each.result(ANSWER_S * 2) for each in unreachable])
        # Nodes measure by their own clocks, which may be wrong.
        born = min(now := time.time(), max(began, *(each.born for each in opened)))
        self._events.add(kinds.Phase(name="actors", s=born - began))
        self._events.add(kinds.Phase(name="warm-up", s=now - born))
        self._note_facts()
        self.rendezvous = rendezvous.rendezvous_at(
            self.facts[0].address, opened[0].store, file, attempt
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
        keep their processes, if all ranks keep their numbers. Raises LaunchError if no replacement
        came within scale.wait_s, or rank 0's node can't open the rendezvous.
        """
        before, pids = self.plan, self.rendezvous.pids
        if not gone:  # a node that is gone may hold a part of the checkpoint
            self._saver.rest_if_needed(flush.FLUSH_S)
        until = time.monotonic() + job.scale.wait_s
        moved = self._replace_lost(gone, resize, until)
        self._wait_for_writer(before.slots[0].node.id)
        while True:
            stay = keep and placement.numbered_alike(before, self.plan)
            has_store = stay and 0 not in moved
            if self._opens_rendezvous(job, attempt, resize or bool(moved), until, has_store):
                break
            moved |= self._replace_lost((), False, until)  # a node was lost meanwhile
        if stay:
            here = tuple(0 if rank in moved else pid for rank, pid in enumerate(pids))
            self.rendezvous = replace(self.rendezvous, pids=here)
        if self.hosts.standby is not None:  # the ranks were renumbered
            there = {slot.node.id for slot in before.slots}
            return [slot.rank for slot in self.plan.slots if slot.node.id not in there]
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
        """Return all ranks of the nodes that are lost or draining, or whose agents did not open.

        One actor hosts all agents of a node. An agent may have opened after another one, opened at
        the same time, was lost: then nobody has read its reply.
        """
        ranks = {*self.lost_ranks(gone), *self.draining_ranks()}
        ranks |= self.nodes.unopened(self.plan.slots)
        nodes = {self.plan.slots[rank].node.id for rank in ranks}
        return [slot.rank for slot in self.plan.slots if slot.node.id in nodes]

    def _opens_rendezvous(
        self, job: Job, attempt: int, replaced: bool, until: float, has_store: bool
    ) -> bool:
        """Open the rendezvous of another attempt; return False if that is to be tried again.

        A node was lost meanwhile, or only the call, as when a connection breaks. `replaced`:
        whether agents were replaced. `until`: as in _replace_lost. `has_store`: whether the store
        of the previous attempt is there still. Raises LaunchError if no node is lost, but the
        rendezvous can't be opened.
        """
        try:
            if replaced:
                self._note_facts()
                self._saver.leave()  # rank 0 may be on another node, where nobody would unlock it
            if has_store:
                self.rendezvous = replace(self.rendezvous, attempt=attempt)
                return True
            address = self.facts[0].address
            self.rendezvous = rendezvous.open_rendezvous(self.call, job, address, attempt)
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

    def _wait_for_writer(self, node_id: str) -> None:
        """Wait for the whole state that a node is writing, unless a restart does not need it.

        `node_id`: the node that had rank 0. It may have other ranks now, or be lost.
        """
        slot = next((lead for lead in self.plan.leads if lead.node.id == node_id), None)
        if slot is None:
            return
        try:
            self.call(slot.rank, WaitForWriter()).result(flush.FLUSH_S)
        except Stopped:
            raise
        except Exception as error:  # the attempt then starts from an older checkpoint
            host = slot.node.host
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
        """Return the ranks on nodes that are draining or given up to another run.

        None if too few other nodes remain for the job: a node may have been lost since the other
        run asked.
        """
        standby = self.hosts.standby
        if standby is None:
            return []
        draining, leaving = set(self.hosts.draining()), standby.leaving()
        if leaving and standby.enough_remain(leaving):
            draining |= leaving
        ranks = [slot.rank for slot in self.plan.slots if slot.node.id in draining]
        return ranks if ranks and standby.enough_remain() else []

    def values(self) -> list[RankValue]:
        """Return what each rank returned or raised, pickled.

        A rank whose agent does not answer has an empty RankValue, with a warning unless that was
        known before.
        """
        ranks = range(self.plan.world_size)
        replies = {
            rank: self.call(rank, GetValue()) for rank in ranks if rank not in self._known_values
        }
        wait(replies.values(), timeout=longest(ANSWER_S, len(replies)))
        answers = {
            rank: each.result()
            for rank, each in replies.items()
            if each.done() and each.exception() is None
        }
        if missing := replies.keys() - answers.keys():
            self._events.warn(
                f"what {name_ranks(missing)} returned has not arrived: no answer from the agent; "
                "raydist.main has None for it"
            )
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
        """Write the last snapshot to the disk; return why no node could, empty if one has.

        A first Ctrl-C does not end it: a run that ends in order does just this.
        """
        ranks = self.plan.world_size
        with signals.passed_to(lambda _: None):
            return flush.flush(self._flush_nodes, self._job.checkpoint, self._events.add, ranks)

    def save_shards(self, request: kinds.SaveShards) -> None:
        """Have all nodes write the sharded checkpoint that rank 0 requested.

        The ranks train meanwhile.
        """
        self._saver.start(self.plan, self.call, request)

    def finish_saves(self) -> None:
        """Wait for a sharded checkpoint being written, unless a node with a part of it is gone."""
        if not self._silent:
            self._saver.rest(flush.FLUSH_S)

    @property
    def _flush_nodes(self) -> list[FlushNode]:
        leads = [slot for slot in self.plan.leads if slot.rank not in self._silent]
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
            elif readers := opened.warm.rank_readers:
                self._events.warn(
                    f"{', '.join(readers)} reads its rank as it is imported: the ranks on "
                    f"{slot.node.host} import everything in this run, and only that in later ones"
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
    def _hosts(self) -> list[str]:
        return [slot.node.host for slot in self.plan.leads]

    def _find_unreachable(self, files: Mapping[str, str]) -> list[Future[dict[str, str]]]:
        """Ask each node which of these files it can't see; return the futures of the replies."""
        request = FindUnreachablePaths(dict(files), self._job.env)
        return [self.call(slot.rank, request) for slot in self.plan.leads]

    def require_visible(self, setting: str, file: str, why: str) -> None:
        """Raise ConfigError if some nodes can't see the file that a setting names."""
        unreachable = [each.result(ANSWER_S * 2) for each in self._find_unreachable({"file": file})]
        shared_paths.require_visible(setting, self._hosts, unreachable, why)

    def start(self, job: Job, variables: Sequence[Iterable[EnvVar]], call: bytes | None) -> None:
        """Round 2: send every rank its variables, and fork it.

        `call`: the pickled function, if the job is one.
        """
        checks_node.check_nodes(job, self.plan, self.facts, self._events.warn)
        self._send_call(call)
        self._known_values.clear()
        common = start_requests.common_request(
            job, call is not None, bool(self.rendezvous.pids), self._saver.locks
        )
        requests = start_requests.rank_requests(
            common, job, self.plan, self.facts, variables, self.nodes
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
        ranks = [slot.rank for slot in self.plan.leads]
        self.call_each([KeepCall(self._kept_call)] * len(ranks), ranks=ranks)

    def hold_states(self) -> PausedStates:
        """Have the nodes hold the newest states in memory: the run makes way for another one."""
        return PausedStates(self.plan, self.call, self.nodes.servers(self.plan))

    def held_variables(self) -> list[EnvVar]:
        """Return the variable with which the ranks take the states that their nodes have held."""
        key = self.nodes.held_key(self.plan)
        return [EnvVar(env_names.HELD_STATES, key, "held since the run made way")] if key else []

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
        event, warnings = network_use.network_event(
            self.plan, self.facts, self.nodes, replies, self._job.fabric.strict
        )
        for text in warnings:
            self._events.warn(text)
        self._events.add(event)

    def stop(self, ranks: Iterable[int], grace: float, keep: Collection[int] = ()) -> None:
        """Send these ranks SIGTERM, and SIGKILL after `grace` seconds.

        `keep`: leave the processes of those of these ranks that can wait for the next attempt. Does
        not wait: GetNews reports their ends.
        """
        for rank in ranks:
            self.call(rank, StopRank(grace, rank in keep))

    def call_each(
        self,
        requests: Sequence[Request[Reply]],
        limit_s: float = ANSWER_S,
        ranks: Sequence[int] | None = None,
    ) -> list[Reply]:
        """Send one request to the agent of each rank, as calls.call_each does.

        `ranks`: None for all. After half a minute a person is told which agent is late.
        """
        slots = self.plan.slots if ranks is None else [self.plan.slots[rank] for rank in ranks]
        return calls.call_each(
            self.call,
            slots,
            requests,
            limit_s,
            lambda text: self._events.add(kinds.Wait(text=text)),
        )

    def __exit__(self, *_: object) -> None:
        standby = self.hosts.standby.close() if self.hosts.standby else []
        replies = [self.call(slot.rank, Close()) for slot in self.plan.slots]
        answering = [reply for rank, reply in enumerate(replies) if rank not in self._silent]
        closing = [*standby, *answering]
        wait(closing, timeout=longest(CLOSE_S, len(closing)))

    def _note_facts(self) -> None:
        """Set the facts of each rank's node, with the rank's own GPUs."""
        gpus = self.hosts.gpus() or (None,) * self.plan.world_size
        self.facts = self.nodes.facts(self.plan.slots, gpus)
