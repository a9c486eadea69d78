"""The worker group, on hosts whose replies the tests choose: no agent, no Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, Slot, assign_ranks
from raydist.launch import calls, worker_group
from raydist.launch.inline import LocalHosts
from raydist.launch.paused_states import PausedStates
from raydist.launch.run_storage import RunCheckpoints
from raydist.launch.standby import StandbyNodes
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import (
    Close,
    FindUnreachablePaths,
    Flush,
    Flushed,
    GetNetworkUse,
    GetValue,
    IsOpen,
    KeepCall,
    Open,
    Opened,
    ProcessId,
    RankValue,
    StartRank,
    StopRank,
    WaitForWriter,
    WarmServer,
)
from raydist.messages.request import Request
from raydist.messages.server import KeptSteps, ListSteps, OpenStore, StoreAddress, Warm
from raydist.messages.writer import CommitShards, SavedShards, WriteShards, WrittenShards
from raydist.network import checks_node
from raydist.network.facts import Facts
from raydist.network.names import EnvVar
from raydist.recovery import attempts, policy
from raydist.settings.config import Backend, Job, Restart, Target
from raydist.shared import kinds
from raydist.shared.errors import CallLost, ConfigError, LaunchError, Stopped
from raydist.shared.events import Events
from raydist.shared.signals import raise_again, stoppable
from tests.records import read_events

JOB = Job(name="digits", backend=Backend(name="gloo"), job=Target(target="json:dumps"))


def node(number: int) -> Node:
    return Node(f"id-{number}", f"10.0.0.{number}", f"host{number}", {}, {})


def two_nodes() -> Plan:
    """Ranks 0 and 1 on host1, 2 and 3 on host2."""
    return assign_ranks(
        ResourceRequest("gloo", 4, ({}, {}), 2, "STRICT_SPREAD", {}), [node(1), node(2)]
    )


@dataclass
class FakeHosts(LocalHosts):
    """Replies as healthy agents do, or by `replies`; after a reply of NotImplemented the future
    stays pending."""

    calls: list[tuple[int, Request[Any], Future[Any]]] = field(default_factory=list)
    replies: dict[type[Any], Callable[[int, Any], Any]] = field(default_factory=dict)
    stores: int = 0

    def call(self, rank: int, request: Request[Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append((rank, request, future))
        try:
            choose: Callable[[int, Any], Any] = self.replies.get(type(request), self.reply)
            reply = choose(rank, request)
        except Exception as error:
            future.set_exception(error)
        else:
            if reply is not NotImplemented:
                future.set_result(reply)
        return future

    def reply(self, rank: int, request: Request[Any]) -> Any:
        """Return the reply of a healthy agent."""
        match request:
            case Open():
                facts = (
                    Facts(request.node_id, request.node_ip, "eth0", request.node_ip)
                    if request.lead
                    else None
                )
                store = self.open_store() if request.store else None
                return Opened(
                    facts,
                    1.0,
                    Warm({f"missing{rank}": "ImportError"}),
                    store,
                    {} if request.lead else None,
                )
            case OpenStore():
                return self.open_store()
            case IsOpen():
                return True
            case FindUnreachablePaths():
                return {}
            case StartRank():
                return ProcessId(1000 + rank, 7)
            case Flush():
                return Flushed([], had_state=True)
            case GetValue():
                return RankValue(value=bytes([rank]))
        return None

    def open_store(self) -> StoreAddress:
        self.stores += 1
        return StoreAddress(4000 + self.stores, "")

    def sent(self, kind: type[Request[Any]]) -> list[tuple[int, Any]]:
        """Return the requests of a type, each with its rank."""
        return [(rank, request) for rank, request, _ in self.calls if isinstance(request, kind)]


def silent(rank: int, request: Request[Any]) -> Any:
    return NotImplemented


def gone_from(*ranks: int) -> Callable[[int, Any], Any]:
    """Agents of these ranks are gone; the others are open."""

    def reply(rank: int, request: Request[Any]) -> bool:
        if rank in ranks:
            raise CallLost(ConnectionError("actor died"))
        return True

    return reply


def fails_on(*ranks: int) -> Callable[[int, Any], Any]:
    """Agents of these ranks answer that they have failed; the others are healthy."""

    def reply(rank: int, request: Request[Any]) -> ProcessId:
        if rank in ranks:
            raise OSError("too many open files")
        return ProcessId(1000 + rank, 7)

    return reply


def lose_once(hosts: FakeHosts, kind: type[Request[Any]], lost: int) -> None:
    """Lose the next call of this kind to the agent of a rank, which answers all others."""

    def reply(rank: int, request: Request[Any]) -> Any:
        if rank == lost:
            del hosts.replies[kind]
            raise CallLost(ConnectionError("temporarily unavailable"))
        return hosts.reply(rank, request)

    hosts.replies[kind] = reply


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    with Events(tmp_path / "events.jsonl") as stream:
        yield stream


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return replace(JOB, dir=str(tmp_path))


@pytest.fixture
def hosts() -> FakeHosts:
    return FakeHosts()


def opened(hosts: FakeHosts, events: Events, job: Job, **of_hosts: Any) -> WorkerGroup:
    vars(hosts).update(of_hosts)
    group = WorkerGroup(two_nodes(), hosts, events)
    group.open(job, ("torch",))
    return group


def test_each_agent_gets_its_own_open_request(hosts: FakeHosts, events: Events, job: Job) -> None:
    opened(hosts, events, job)
    requests = hosts.sent(Open)
    assert [rank for rank, _ in requests] == [0, 1, 2, 3]
    fields = [(r.rank, r.node_id, r.node_ip, r.lead, r.store) for _, r in requests]
    assert fields == [
        (0, "id-1", "10.0.0.1", True, "tcp"),
        (1, "id-1", "10.0.0.1", False, None),
        (2, "id-2", "10.0.0.2", True, None),
        (3, "id-2", "10.0.0.2", False, None),
    ]
    assert {(r.run, r.secret, r.modules) for _, r in requests} == {
        (requests[0][1].run, requests[0][1].secret, ("torch",))
    }


def test_the_group_knows_the_facts_of_each_rank_and_the_rendezvous(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    gpus = [("0",), ("1",), ("0",), ("1",)]
    group = opened(hosts, events, job, gpus=lambda: gpus)
    assert [facts.hostname for facts in group.facts] == ["id-1", "id-1", "id-2", "id-2"]
    assert [facts.gpus for facts in group.facts] == gpus
    assert [list(failed) for failed in map(group.nodes.failed_imports, group.plan.slots)] == [
        ["missing0"]
    ] * 2 + [["missing2"]] * 2
    assert (group.rendezvous.address, group.rendezvous.port, group.rendezvous.file) == (
        "10.0.0.1",
        4001,
        None,
    )


def test_ranks_that_meet_in_a_file_have_no_store(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, replace(job, init_method="file"))
    assert [request.store for _, request in hosts.sent(Open)] == [None] * 4
    assert group.rendezvous.port is None
    assert group.rendezvous.file == str(Path(job.dir) / "rendezvous")
    group.prepare_attempt(replace(job, init_method="file"), 1)
    assert group.rendezvous.file == str(Path(job.dir) / "rendezvous-1")


@pytest.mark.parametrize("kind", [ConfigError, LaunchError])
def test_an_agent_that_fails_is_named_by_rank_and_host(
    hosts: FakeHosts, events: Events, job: Job, kind: type[Exception]
) -> None:
    def fail(rank: int, request: Open) -> Any:
        if rank == 2:
            raise kind("no interface eth7")
        return NotImplemented  # the others still import torch

    hosts.replies[Open] = fail
    with pytest.raises(kind, match=r"rank 2 on host2 \(10\.0\.0\.2\): .*no interface eth7"):
        opened(hosts, events, job)


class FakeStates:
    """States that no node holds."""

    def __init__(self) -> None:
        self.settled: list[bool] = []

    def server(self, slot: Slot) -> None:
        return None

    def settle(self, used: bool) -> None:
        self.settled.append(used)


def test_held_states_are_freed_if_an_agent_does_not_open(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """They stayed in the memory of the nodes until the run was over."""
    hosts.replies[Open] = gone_from(2)
    states = FakeStates()
    with pytest.raises(LaunchError):
        WorkerGroup(two_nodes(), hosts, events).open(job, (), paused=cast("PausedStates", states))
    assert states.settled == [False]


def test_agents_that_do_not_answer_are_counted(
    hosts: FakeHosts, events: Events, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "OPEN_S", 0.05)
    hosts.replies[Open] = lambda rank, request: (
        NotImplemented if rank in (1, 3) else hosts.reply(rank, request)
    )
    with pytest.raises(
        LaunchError, match=r"2 of 4 agents .* Open within 0\.06\d* s.* rank 1 on host1"
    ):
        opened(hosts, events, job)


def test_an_agent_that_is_late_is_named_while_the_run_waits_for_it(
    hosts: FakeHosts, events: Events, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LATE_S", 0.05)

    def answer_late() -> None:
        for rank, request, pending in hosts.calls:
            if rank == 2 and isinstance(request, Open):
                pending.set_result(hosts.reply(rank, request))

    hosts.replies[Open] = lambda rank, request: (
        NotImplemented if rank == 2 else hosts.reply(rank, request)
    )
    threading.Timer(0.5, answer_late).start()
    opened(hosts, events, job)
    (told,) = [event for event in read_events(events.path) if event["kind"] == "wait"]
    assert "1 of 4 agents did not answer Open within 0.05 s; the first is rank 2" in told["text"]


def test_replies_come_in_the_order_of_the_requests(events: Events) -> None:
    class Late(FakeHosts):
        """Resolves all futures with the last call, the last future first."""

        def call(self, rank: int, request: Request[Any]) -> Future[Any]:
            future = super().call(rank, request)
            if len(self.calls) == 2:
                for called, _, pending in reversed(self.calls):
                    pending.set_result(called)
            return future

    group = WorkerGroup(two_nodes(), Late(replies={GetValue: silent}), events)
    assert cast("list[int]", group.call_each([GetValue(), GetValue()], ranks=[3, 1])) == [3, 1]


def test_only_the_first_agent_of_a_node_looks_for_paths(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    stored = replace(job, storage="/shared/runs")
    hosts.replies[FindUnreachablePaths] = lambda rank, _: (
        {"storage": "no such file"} if rank == 2 else {}
    )
    with pytest.raises(ConfigError, match=r"storage=/shared/runs: host2 .*no such file"):
        opened(hosts, events, stored)
    assert [rank for rank, _ in hosts.sent(FindUnreachablePaths)] == [0, 2]


def test_a_file_that_a_setting_names_must_be_visible_on_all_nodes(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    group.require_visible("resume=/data/x", "/data/x/meta.json", "each rank reads it")
    hosts.replies[FindUnreachablePaths] = lambda rank, _: (
        {"file": "no such file"} if rank == 0 else {}
    )
    with pytest.raises(ConfigError, match=r"resume=/data/x: host1 .*each rank reads it"):
        group.require_visible("resume=/data/x", "/data/x/meta.json", "each rank reads it")


def test_each_rank_starts_with_its_own_variables(
    hosts: FakeHosts, events: Events, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_node, "check_nodes", lambda *_: None)
    group = opened(hosts, events, job)
    group.start(job, [[EnvVar("RANK", str(rank), "")] for rank in range(4)], b"pickled")
    requests = hosts.sent(StartRank)
    assert [(rank, request.rank, dict(request.env)) for rank, request in requests] == [
        (rank, rank, {"RANK": str(rank)}) for rank in range(4)
    ]
    assert {request.call for _, request in requests} == {True}
    assert json.loads(requests[0][1].job)["name"] == "digits"
    began = [event for event in read_events(events.path) if event["kind"] == "began"]
    assert [(event["rank"], event["host"], event["pid"]) for event in began] == [
        (0, "host1", 1000), (1, "host1", 1001), (2, "host2", 1002), (3, "host2", 1003)
    ]  # fmt: skip


def test_each_node_gets_the_pickled_call_once_for_each_attempt(
    hosts: FakeHosts, events: Events, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_node, "check_nodes", lambda *_: None)
    put: list[bytes] = []

    def keep(call: bytes) -> bytes:
        put.append(call)
        return b"reference"

    def replace_nodes(lost: Sequence[int]) -> Plan:
        del hosts.replies[IsOpen]
        return placement.replace_nodes(group.plan, dict(enumerate([node(1), node(3)])))

    group = opened(hosts, events, job, put=keep, replace_nodes=replace_nodes)
    group.start(job, [()] * 4, b"pickled")
    assert hosts.sent(KeepCall) == [(0, KeepCall(b"reference")), (2, KeepCall(b"reference"))]
    group.start(job, [()] * 4, b"pickled")
    assert [rank for rank, _ in hosts.sent(KeepCall)] == [0, 2] * 2
    hosts.replies[IsOpen] = gone_from(2, 3)
    group.prepare_attempt(job, 1)
    group.start(job, [()] * 4, b"pickled")
    assert [rank for rank, _ in hosts.sent(KeepCall)] == [0, 2] * 3
    assert put == [b"pickled"]
    group.start(job, [()] * 4, None)
    assert [request.call for _, request in hosts.sent(StartRank)][-4:] == [False] * 4


def test_another_attempt_on_the_same_nodes_has_a_new_store(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    assert group.prepare_attempt(job, 1) == []
    assert [rank for rank, _ in hosts.sent(WaitForWriter)] == [0]
    assert (group.rendezvous.port, group.rendezvous.attempt) == (4002, 1)
    assert len(hosts.sent(Open)) == 4


def test_lost_agents_are_replaced_on_another_node(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    calls: list[Sequence[int]] = []

    def replace_nodes(lost: Sequence[int]) -> Plan:
        calls.append(lost)
        del hosts.replies[IsOpen]
        return placement.replace_nodes(group.plan, dict(enumerate([node(1), node(3)])))

    vars(hosts).update(replace_nodes=replace_nodes)
    group = WorkerGroup(two_nodes(), hosts, events)
    group.open(job, ("torch",), WarmServer("/tmp/warm", ()))
    hosts.replies[IsOpen] = gone_from(2, 3)
    assert group.prepare_attempt(job, 1) == [2, 3]
    assert calls == [[2, 3]]
    first, new = hosts.sent(Open)[:4], hosts.sent(Open)[4:]
    assert [(rank, request.node_id, request.lead) for rank, request in new] == [
        (2, "id-3", True),
        (3, "id-3", False),
    ]
    assert len({request.run for _, request in new}) == 1  # one fork server for both
    assert {request.run for _, request in new}.isdisjoint(request.run for _, request in first)
    assert {request.secret for _, request in new} == {request.secret for _, request in first}
    assert {request.warm_server for _, request in new} == {None}
    assert [facts.hostname for facts in group.facts] == ["id-1", "id-1", "id-3", "id-3"]


@pytest.mark.parametrize("lost", [(2, 3), (0, 1)])
def test_ranks_stay_when_another_node_is_lost(
    hosts: FakeHosts,
    events: Events,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    lost: tuple[int, int],
) -> None:
    monkeypatch.setattr(checks_node, "check_nodes", lambda *_: None)

    def replace_nodes(gone: Sequence[int]) -> Plan:
        del hosts.replies[IsOpen]
        nodes = [node(3), node(2)] if 0 in gone else [node(1), node(3)]
        return placement.replace_nodes(group.plan, dict(enumerate(nodes)))

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    group.start(job, [()] * 4, None)
    hosts.replies[IsOpen] = gone_from(*lost)
    assert group.prepare_attempt(job, 1, keep=True) == [*lost]
    group.start(job, [()] * 4, None)
    assert [request.keep for _, request in hosts.sent(StartRank)] == [False] * 4 + [True] * 4
    # the new ranks have the same process ids here, as on a host that has just been booted
    assert group.rendezvous.kept == ((2, 3) if 0 in lost else (0, 1))
    # the store was on the node of rank 0
    assert group.rendezvous.port == (4002 if 0 in lost else 4001)


def test_an_agent_that_is_new_and_not_open_counts_as_lost(hosts: FakeHosts, events: Events) -> None:
    hosts.replies[IsOpen] = lambda rank, request: rank != 1
    assert WorkerGroup(two_nodes(), hosts, events).lost_ranks() == [1]


def test_without_other_nodes_a_lost_agent_ends_the_run(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    hosts.replies[IsOpen] = gone_from(3)
    with pytest.raises(LaunchError, match="rank 2"):  # the first on its node
        group.prepare_attempt(job, 1)


def test_an_agent_whose_reply_was_not_read_is_opened_again(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """Two hosts lost their power, and one of the new agents was lost while both opened."""
    placed = [[node(3), node(4)], [node(3), node(5)]]

    def lose_one(rank: int, request: Open) -> Any:
        if request.node_id == "id-4":
            hosts.replies[IsOpen] = gone_from(2, 3)
            raise CallLost(ConnectionError("actor died"))
        return hosts.reply(rank, request)

    def replace_nodes(lost: Sequence[int]) -> Plan:
        hosts.replies.pop(IsOpen)
        return placement.replace_nodes(group.plan, dict(enumerate(placed.pop(0))))

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    hosts.replies |= {IsOpen: gone_from(0, 1, 2, 3), Open: lose_one}
    assert group.prepare_attempt(job, 1) == [0, 1, 2, 3]
    assert [facts.hostname for facts in group.facts] == ["id-3", "id-3", "id-5", "id-5"]


def test_lost_agents_are_asked_nothing(hosts: FakeHosts, events: Events, job: Job) -> None:
    """Ray fails a call to a dead host after 20 s: each restart waited ten seconds for one."""

    def replace_nodes(lost: Sequence[int]) -> Plan:
        requested = {rank for rank, _ in hosts.sent(IsOpen)}
        assert (requested, lost) == ({0, 1}, [2, 3])
        return placement.replace_nodes(group.plan, dict(enumerate([node(1), node(3)])))

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    assert group.prepare_attempt(job, 1, gone={3}) == [2, 3]
    assert [facts.hostname for facts in group.facts] == ["id-1", "id-1", "id-3", "id-3"]


def test_a_node_that_is_lost_while_the_rendezvous_is_opened_is_replaced(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """The run ended with Ray's traceback."""

    def lose(rank: int, request: OpenStore) -> Any:
        hosts.replies[IsOpen] = gone_from(0, 1)
        raise CallLost(ConnectionError("actor died"))

    def replace_nodes(lost: Sequence[int]) -> Plan:
        assert lost == [0, 1]
        hosts.replies.clear()
        return placement.replace_nodes(group.plan, dict(enumerate([node(3), node(2)])))

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    hosts.replies[OpenStore] = lose
    assert group.prepare_attempt(job, 1) == [0, 1]
    assert [slot.node.id for slot in group.plan.slots] == ["id-3", "id-3", "id-2", "id-2"]
    assert (group.rendezvous.address, group.rendezvous.port) == ("10.0.0.3", 4002)


def test_a_rendezvous_that_cannot_be_opened_ends_the_run(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    hosts.replies[OpenStore] = fails_on(0)
    with pytest.raises(LaunchError, match="no rendezvous on host1: too many open files"):
        group.prepare_attempt(job, 1)


def test_a_lost_call_for_the_rendezvous_is_made_again(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """A connection broke, and nothing else: the run ended."""
    group = opened(hosts, events, job)
    lose_once(hosts, OpenStore, 0)
    assert group.prepare_attempt(job, 1) == []
    assert len(hosts.sent(OpenStore)) == 2
    assert (group.rendezvous.port, group.rendezvous.attempt) == (4002, 1)


def test_a_node_that_is_lost_as_ranks_start_is_a_failure_of_the_attempt(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """It ended the run, though restarts were left."""
    group = opened(hosts, events, job)
    hosts.replies[StartRank] = gone_from(2)
    hosts.replies[IsOpen] = gone_from(2, 3)
    attempt = attempts.run_attempt(job, None, group, events, RunCheckpoints(job))
    assert [end.how for end in attempt.ends] == ["stopped", "stopped", "lost", "lost"]
    assert attempt.ends[2].message == "actor died"
    assert "rank 2 on host2" in attempt.failure
    assert [rank for rank, _ in hosts.sent(StopRank)] == [0, 1, 2, 3]
    assert isinstance(policy.decide(Restart(max=1), [attempt]), policy.Retry)


def test_a_rank_that_cannot_be_started_where_its_agent_answers_ends_the_run(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    hosts.replies[StartRank] = fails_on(2)
    with pytest.raises(LaunchError, match=r"rank 2 on host2 .*too many open files"):
        attempts.run_attempt(job, None, group, events, RunCheckpoints(job))


def test_a_lost_call_to_start_a_rank_is_a_failure_of_the_attempt(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """A connection broke, and the agent answers again: the run ended, though restarts were left."""
    group = opened(hosts, events, job)
    lose_once(hosts, StartRank, 2)
    attempt = attempts.run_attempt(job, None, group, events, RunCheckpoints(job))
    assert [end.how for end in attempt.ends] == ["stopped", "stopped", "lost", "stopped"]
    assert attempt.ends[2].message == "temporarily unavailable"
    assert [end.gone for end in attempt.ends] == [False] * 4  # no agent is replaced for it
    assert isinstance(policy.decide(Restart(max=1), [attempt]), policy.Retry)


def test_new_agents_of_a_node_know_what_those_before_them_have_started(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """Two processes shared a GPU while the old one released its memory."""

    def replace_nodes(lost: Sequence[int]) -> Plan:
        del hosts.replies[IsOpen]
        return group.plan  # as Ray does for a living node

    def after() -> list[tuple[ProcessId, ...]]:
        group.start(job, [()] * 4, None)
        return [request.after for _, request in hosts.sent(StartRank)[-4:]]

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    assert after() == [()] * 4
    hosts.replies[IsOpen] = gone_from(2)
    group.prepare_attempt(job, 1)
    old = (ProcessId(1002, 7), ProcessId(1003, 7))
    assert after() == [(), (), old, old]
    group.prepare_attempt(job, 2)
    assert after() == [()] * 4


def test_a_writer_that_is_gone_is_a_warning(hosts: FakeHosts, events: Events, job: Job) -> None:
    group = opened(hosts, events, job)
    hosts.replies[WaitForWriter] = gone_from(0)
    group.prepare_attempt(job, 1)
    (warning,) = (event["text"] for event in read_events(events.path) if event["kind"] == "warning")
    assert "host1" in warning
    assert "ConnectionError: actor died" in warning


@contextlib.contextmanager
def signal_during(hosts: FakeHosts, kind: type[Request[Any]]) -> Iterator[None]:
    """Send SIGINT to this process while the driver waits for the first reply to this request."""

    def interrupt(rank: int, request: Request[Any]) -> Any:
        del hosts.replies[kind]
        threading.Timer(0.2, reply, [len(hosts.calls) - 1]).start()
        return NotImplemented

    def reply(number: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # it interrupts the main thread
        time.sleep(0.2)
        rank, request, future = hosts.calls[number]
        future.set_result(hosts.reply(rank, request))

    hosts.replies[kind] = interrupt
    with stoppable():
        yield


def test_ctrl_c_ends_the_wait_for_a_writer(hosts: FakeHosts, events: Events, job: Job) -> None:
    """It was a warning about the writer, and the next attempt began."""
    group = opened(hosts, events, job)
    with signal_during(hosts, WaitForWriter), pytest.raises(Stopped):
        group.prepare_attempt(job, 1)
    assert "warning" not in {event["kind"] for event in read_events(events.path)}


def test_ctrl_c_does_not_end_the_wait_for_the_last_state(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """A warning said that no node could write it."""
    group = opened(hosts, events, job)
    hosts.replies[ListSteps] = lambda rank, request: KeptSteps([])
    with signal_during(hosts, Flush):
        assert group.flush() == ""
        with pytest.raises(Stopped):
            raise_again()


def test_a_restart_waits_for_the_node_that_had_rank_0(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    placed = [[node(1), node(3)], [node(2), node(1)], [node(2), node(3)]]

    def replace_nodes(lost: Sequence[int]) -> Plan:
        del hosts.replies[IsOpen]
        return placement.replace_nodes(two_nodes(), dict(enumerate(placed.pop(0))))

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    hosts.replies[IsOpen] = gone_from(2, 3)
    group.prepare_attempt(job, 1)
    assert [rank for rank, _ in hosts.sent(WaitForWriter)] == [0]
    hosts.replies[IsOpen] = gone_from(2, 3)
    group.prepare_attempt(job, 2)  # its ranks are 2 and 3 now
    assert [rank for rank, _ in hosts.sent(WaitForWriter)] == [0, 2]
    hosts.replies[IsOpen] = gone_from(0, 1)
    group.plan = two_nodes()
    group.prepare_attempt(job, 3)  # it is lost
    assert [rank for rank, _ in hosts.sent(WaitForWriter)] == [0, 2]


def test_a_restart_waits_for_shards_that_it_needs_if_no_node_is_lost(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    """With another number of nodes it continued from the checkpoint before."""
    order: list[str] = []

    def write(rank: int, request: WriteShards) -> WrittenShards:
        return WrittenShards({})

    def commit(rank: int, request: CommitShards) -> SavedShards:
        time.sleep(0.2)
        order.append("saved")
        return SavedShards("step-00000007")

    def replace_nodes(lost: Sequence[int]) -> Plan:
        order.append("replaced")
        return group.plan

    group = opened(hosts, events, job, replace_nodes=replace_nodes)
    hosts.replies |= {WriteShards: write, CommitShards: commit}
    request: dict[str, Any] = {"step": 7, "folder": "checkpoints", "keep": 1, "best": None}
    group.save_shards(kinds.SaveShards(rank=0, metrics={}, reported={}, **request))
    group.prepare_attempt(job, 1, resize=True)
    assert order == ["saved", "replaced"]


def test_values_of_agents_that_are_gone_or_silent_are_empty(
    hosts: FakeHosts, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "ANSWER_S", 0.05)

    def reply(rank: int, request: GetValue) -> Any:
        if rank == 1:
            raise CallLost(ConnectionError("actor died"))
        return NotImplemented if rank == 2 else hosts.reply(rank, request)

    hosts.replies[GetValue] = reply
    group = WorkerGroup(two_nodes(), hosts, events)
    values = group.values()
    assert values == [RankValue(value=b"\0"), RankValue(), RankValue(), RankValue(value=b"\3")]
    group.give_up({1, 2})  # known to be silent
    assert group.values() == values
    (warning,) = (event["text"] for event in read_events(events.path) if event["kind"] == "warning")
    assert warning.startswith("what ranks 1-2 returned has not arrived")


class FakeStandby:
    """Standby nodes that are enough, or not."""

    def __init__(self, enough: bool, given_up: set[str], needed: bool = False) -> None:
        """`given_up`: ids of nodes that another run needs. `needed`: this one cannot do without."""
        self.enough = enough
        self.given_up = given_up
        self.needed = needed
        self.request: Open | None = None

    def set_request(self, request: Open) -> None:
        self.request = request

    def enough_remain(self, without: Collection[str] = ()) -> bool:
        return self.enough and not (self.needed and without)

    def leaving(self) -> set[str]:
        return self.given_up

    def close(self) -> list[Future[Any]]:
        return []


@pytest.mark.parametrize(
    ("enough", "given_up", "ranks"),
    [(True, "", [2, 3]), (False, "", []), (True, "id-1", [0, 1, 2, 3]), (False, "id-1", [])],
)
def test_ranks_of_draining_nodes_move_if_enough_nodes_remain(
    hosts: FakeHosts, events: Events, job: Job, enough: bool, given_up: str, ranks: list[int]
) -> None:
    standby = FakeStandby(enough, {given_up})
    group = opened(
        hosts,
        events,
        job,
        standby=cast("StandbyNodes", standby),
        draining=lambda: {"id-2": 0.0},
    )
    assert group.draining_ranks() == ranks
    assert standby.request is not None
    assert standby.request.modules == ("torch",)


@pytest.mark.parametrize(("needed", "ranks"), [(False, [0, 1]), (True, [])])
def test_a_node_that_the_run_needs_since_it_lost_another_is_not_given_up(
    hosts: FakeHosts, events: Events, job: Job, needed: bool, ranks: list[int]
) -> None:
    """The run fell below its minimum, and waited for another node."""
    standby = cast("StandbyNodes", FakeStandby(True, {"id-1"}, needed))
    group = opened(hosts, events, job, standby=standby)
    assert group.draining_ranks() == ranks


def test_a_run_on_one_node_has_no_network_to_report(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = WorkerGroup(
        assign_ranks(ResourceRequest("gloo", 2, ({},), 2, "STRICT_SPREAD", {}), [node(1)]),
        hosts,
        events,
    )
    group.open(job, ())
    group.report_network()
    assert hosts.sent(GetNetworkUse) == []


def test_a_network_of_which_a_node_is_gone_is_not_reported(
    hosts: FakeHosts, events: Events, job: Job
) -> None:
    group = opened(hosts, events, job)
    hosts.replies[GetNetworkUse] = gone_from(3)
    group.report_network()
    assert "network" not in {event["kind"] for event in read_events(events.path)}


def test_ranks_are_stopped_and_agents_closed(hosts: FakeHosts, events: Events, job: Job) -> None:
    with opened(hosts, events, job) as group:
        group.stop([1, 3], 2.5)
    assert hosts.sent(StopRank) == [(1, StopRank(2.5)), (3, StopRank(2.5))]
    assert [rank for rank, _ in hosts.sent(Close)] == [0, 1, 2, 3]
