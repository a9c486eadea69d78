"""Attempts of a run: what follows each is decided once, and carried out where the decision says."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster import connect, drain
from raydist.cluster.nodes import Node, ResourceRequest
from raydist.cluster.placement import Plan, assign_ranks
from raydist.cluster.queue.turn import MakesWay
from raydist.flow import next_request
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import GetValue, IsOpen, Open, RankValue
from raydist.messages.checkup import ListenForPeers
from raydist.recovery import attempts, policy
from raydist.recovery.arrival import RestartCost
from raydist.recovery.attempts import Attempts
from raydist.recovery.policy import GiveUp, Retry
from raydist.settings.config import Job, Restart, Scale, Target
from raydist.shared import kinds, signals
from raydist.shared.errors import LaunchError, RaydistError, Stopped
from raydist.shared.events import Events
from raydist.shared.outcome import Attempt, End
from raydist.state import checkpoint_files
from raydist.state.write import SaveRequest
from tests import canned
from tests.launch.test_worker_group import (
    FakeHosts,
    fails_on,
    gone_from,
    node,
    silent,
    two_nodes,
)
from tests.records import Seen

JOB = Job(restart=Restart(max=3))
KILLED = End(1, "b", "killed", 1.0, step=5, signal=9)
DRAINED = End(1, "b", "drained", 1.0, step=5, preempted=True)
GOOD = Attempt(ends=[End(0, "a", "finished", 9.0, 9), End(1, "b", "finished", 9.0, 9)])


def failed(end: End, step: int = 5) -> Attempt:
    return Attempt(ends=[End(0, "a", "stopped", 1.0, step), replace(end, step=step)])


@dataclass
class Group:
    """A worker group that notes what it is asked for."""

    replaceable: bool = False
    lost: bool = False
    """There are no nodes for another attempt."""
    interrupted: bool = False
    """A person types Ctrl-C while the last checkpoint is being written."""
    wanted_by: str = ""
    """The run that needs the room while this one waits for a node."""
    unwritten: str = ""
    """Why no agent could have the last state written."""
    held: int | None = None
    """The step of the newest state that the fork server of rank 0 holds."""
    silent: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    """The ranks whose agents are known to be lost, when another attempt is prepared."""
    acts: list[str] = field(default_factory=list)
    first_world_size: int = 0
    plan: Any = field(
        default_factory=lambda: SimpleNamespace(world_size=2, as_event=lambda: {"slots": ["both"]})
    )

    def draining_ranks(self) -> list[int]:
        return [1] if self.replaceable else []

    def give_up(self, silent: set[int]) -> None:
        self.silent = silent

    def finish_saves(self) -> None:
        """Be interrupted, or do nothing: no checkpoint is being written."""
        if self.interrupted:
            signal.raise_signal(signal.SIGINT)
            self.acts.append("saved")

    def flush(self) -> str:
        self.acts.append("flush")
        return self.unwritten

    def newest_state(self, within_s: float) -> int | None:
        self.acts.append("newest_state")
        return self.held

    def prepare_attempt(
        self, job: Job, number: int, resize: bool, gone: set[int], keep: bool
    ) -> list[int]:
        self.acts.append("again")
        self.gone = gone
        if self.wanted_by:
            raise MakesWay(self.wanted_by)
        if self.lost:
            raise LaunchError("no place for rank 1")
        return [1]

    def values(self) -> list[RankValue]:
        return [RankValue(), RankValue()]

    def report_network(self) -> None:
        self.acts.append("say_network")


@dataclass
class Rig:
    """Attempts whose ranks end as the test says, one after the other."""

    history: Attempts
    events: Events
    seen: Seen
    retries: list[Retry | None]
    decisions: list[Retry | GiveUp]
    """What followed each attempt: decided once."""

    def make(self, group: Group, job: Job = JOB) -> None:
        self.history.make(job, cast("WorkerGroup", group))

    @property
    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.seen]


def rig(folder: Path, patch: pytest.MonkeyPatch, *ends: Attempt) -> Rig:
    seen = Seen()
    events = Events(folder / "e", (seen,))
    attempt, todo = (
        Rig(Attempts(replace(JOB, dir=str(folder)), None, events), events, seen, [], []),
        iter(ends),
    )

    def run(*given: Any) -> Attempt:
        attempt.retries.append(given[-1])
        return next(todo)

    def decide(
        rule: Restart, past: Sequence[Attempt], replaceable: bool = False, program: bool = False
    ) -> Retry | GiveUp:
        attempt.decisions.append(choose(rule, past, replaceable, program))
        return attempt.decisions[-1]

    choose = policy.decide
    patch.setattr(attempts, "run_attempt", run)
    patch.setattr(policy, "decide", decide)
    return attempt


def test_a_good_attempt_is_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, group = rig(tmp_path, monkeypatch, GOOD), Group()
    it.make(group)
    assert it.decisions == [GiveUp("")]
    assert it.history.outcome is not None
    assert (it.history.outcome.ends, it.history.outcome.earlier, it.history.count) == (
        GOOD.ends,
        (),
        1,
    )
    assert group.acts == ["say_network"]  # what went well needs no flush


def test_a_retry_in_place_keeps_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(KILLED), GOOD), Group()
    it.make(group)
    retry, last = it.decisions
    assert isinstance(retry, Retry)
    assert not retry.elsewhere
    assert last == GiveUp("")
    assert it.kinds == ["restart", "placed"]
    assert (it.seen[1]["moved"], it.seen[1]["slots"]) == ([1], ["both"])
    assert it.retries == [None, retry]
    assert it.history.outcome is not None
    assert it.history.outcome.earlier == (failed(KILLED),)


@pytest.mark.parametrize(
    ("end", "gone"),
    [
        (KILLED, set()),
        (replace(KILLED, how="lost", message="The actor died"), {1}),
        (replace(KILLED, how="lost", silent=True), {1}),
        (replace(KILLED, how="exited", silent=True), {1}),
        (replace(KILLED, how="lost", stuck=True), set()),
    ],
)
def test_agents_that_are_lost_are_not_asked_in_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: End, gone: set[int]
) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(end), GOOD), Group()
    it.make(group)
    assert group.gone == gone


def test_a_run_that_ends_by_an_error_that_is_not_raydists_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ray's errors when a node is lost between two of its answers."""

    def lose(*_: Any) -> Attempt:
        raise KeyError("id-3")

    run_flow = import_module("raydist.flow")
    monkeypatch.setattr(run_flow, "attempt_job", lose)
    with pytest.raises(LaunchError, match="KeyError: 'id-3'") as ended:
        run_flow.run_job(replace(JOB, dir=str(tmp_path), group="inline"))
    assert isinstance(ended.value.__cause__, KeyError)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "KeyError" in json.dumps(result)


def test_drained_nodes_are_left_with_all_ranks_if_too_few_others_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, group, other = rig(tmp_path, monkeypatch, failed(DRAINED), GOOD), Group(), Group()
    it.make(group)
    (retry,) = it.decisions
    assert isinstance(retry, Retry)
    assert retry.elsewhere
    assert it.history.outcome is None
    assert group.acts == ["flush"]
    it.make(other)
    assert it.decisions == [retry, GiveUp("")]
    assert it.kinds == ["restart", "placed"]
    assert (it.seen[1]["number"], it.seen[1]["moved"]) == (1, [0, 1])
    assert (it.retries, other.first_world_size) == ([None, retry], 2)
    assert it.history.outcome is not None
    assert it.history.outcome.earlier == (failed(DRAINED),)


def one_node() -> Plan:
    request = ResourceRequest("gloo", 2, ({},), 2, "STRICT_SPREAD", {})
    return assign_ranks(request, [node(1)])


def left_for_another_placement(tmp_path: Path, patch: pytest.MonkeyPatch) -> tuple[Rig, Job]:
    """Return a run whose nodes were drained, and whose next attempt ends well."""
    it = rig(tmp_path, patch, failed(DRAINED), GOOD)
    it.make(Group())
    assert it.history.outcome is None
    job = replace(JOB, dir=str(tmp_path), job=Target("json:dumps"), restart=Restart(max=1))
    return it, job


def carry_out(it: Rig, job: Job, plan: Plan, hosts: FakeHosts) -> None:
    """Go on with a run on other nodes, as the flow does."""
    with WorkerGroup(plan, hosts, it.events) as group:
        import_module("raydist.flow").carry_out(job, group, it.events, it.history)


@pytest.mark.parametrize("asked", [Open, ListenForPeers])
def test_a_node_lost_while_agents_open_elsewhere_is_a_failure_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: type[Any]
) -> None:
    """It ended the run, though restarts were left."""
    it, job = left_for_another_placement(tmp_path, monkeypatch)
    lost = FakeHosts(replies={asked: gone_from(2), IsOpen: gone_from(2, 3)})
    if asked is Open:
        lost.replies[Open] = lambda rank, request: (
            gone_from(2)(rank, request) if rank == 2 else lost.reply(rank, request)
        )
    carry_out(it, job, two_nodes(), lost)
    assert it.history.outcome is None
    assert it.history.count == 2
    carry_out(it, job, one_node(), FakeHosts(replies={GetValue: lambda *_: RankValue()}))
    outcome = it.history.outcome
    assert outcome is not None
    assert (outcome.ends, outcome.error) == (GOOD.ends, None)
    drained, lost_one = outcome.earlier
    assert drained == failed(DRAINED)
    assert [end.how for end in lost_one.ends] == ["stopped", "stopped", "lost", "lost"]
    assert "rank 2 on host2" in lost_one.failure
    assert [event["number"] for event in it.seen if event["kind"] == "placed"] == [2]
    assert [event["rank"] for event in it.seen if event["kind"] == "restart"] == [1, 2]


def test_nodes_lost_while_agents_open_elsewhere_count_as_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, job = left_for_another_placement(tmp_path, monkeypatch)
    for _ in range(2):
        assert it.history.outcome is None
        carry_out(it, job, two_nodes(), FakeHosts(replies={Open: gone_from(0, 1, 2, 3)}))
    assert it.history.outcome is not None
    assert it.history.outcome.error is None
    assert "restart.max=1" in it.history.outcome.why_last
    assert len(it.history.outcome.earlier) == 2


def test_an_agent_that_fails_to_open_elsewhere_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, job = left_for_another_placement(tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=r"rank 2 on host2 .*too many open files"):
        carry_out(it, job, two_nodes(), FakeHosts(replies={Open: fails_on(2), IsOpen: silent}))


def test_drained_nodes_are_replaced_if_others_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(DRAINED), GOOD), Group(replaceable=True)
    it.make(group)
    assert isinstance(it.decisions[0], Retry)
    assert not it.decisions[0].elsewhere
    assert group.acts == ["flush", "again", "say_network"]  # the nodes that stay may go too


def test_a_run_that_waits_for_a_node_makes_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = failed(replace(KILLED, how="lost", message="The actor died"))
    it, group = rig(tmp_path, monkeypatch, lost, GOOD), Group(wanted_by="gpt of ana@login")
    it.make(group)
    assert it.history.outcome is None
    assert it.kinds == ["restart", "pause"]
    assert it.seen[1]["text"] == "made way for gpt of ana@login"
    assert (group.acts, group.silent) == (["again", "flush"], {1})
    it.make(Group())
    assert it.history.outcome is not None
    assert [each.made_way for each in it.history.outcome.earlier] == ["gpt of ana@login"]
    assert it.seen[2]["moved"] == [0, 1]


def test_another_number_of_nodes_is_a_retry_without_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized = Attempt(
        ends=[End(rank, "a", "stopped", 1.0, 5) for rank in (0, 1)], resize="3 nodes now, 2 before"
    )
    it, group = rig(tmp_path, monkeypatch, resized, GOOD), Group()
    it.make(group)
    assert isinstance(it.decisions[0], Retry)
    assert it.kinds == ["regroup", "placed"]
    assert it.seen[0]["text"] == resized.resize
    assert group.acts == ["again", "say_network"]


def test_another_number_of_nodes_is_not_counted_as_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resized = Attempt(
        ends=[End(rank, "a", "stopped", 1.0, 7) for rank in (0, 1)], resize="3 nodes now, 2 before"
    )
    it = rig(tmp_path, monkeypatch, failed(KILLED), resized, failed(KILLED, step=9), GOOD)
    it.make(Group())
    assert [event["number"] for event in it.seen if event["kind"] == "restart"] == [1, 2]
    assert [event["number"] for event in it.seen if event["kind"] == "placed"] == [
        1,
        2,
        3,
    ]  # attempts
    report = kinds.Report(rank=0, step=1, values={}, t=2.0)
    costs = [RestartCost(retry).add(0, report) for retry in it.retries if retry is not None]
    assert [(cost.number, cost.resized) for cost in costs if cost] == [
        (1, False),
        (1, True),
        (2, False),
    ]


def test_a_retry_without_nodes_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(KILLED)), Group(lost=True)
    it.make(group)
    assert it.decisions[1:] == [GiveUp("")]
    assert it.history.outcome is not None
    assert (str(it.history.outcome.error), it.history.outcome.ends) == (
        "no place for rank 1",
        failed(KILLED).ends,
    )
    assert group.acts == ["again", "say_network", "flush"]


def test_a_signal_after_the_last_end_of_an_attempt_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(KILLED), GOOD), Group()
    with signals.stoppable():
        with signals.passed_to(lambda _: None):  # a supervisor that has all ends
            signal.raise_signal(signal.SIGTERM)
        it.make(group)
    assert it.history.outcome is not None
    assert isinstance(it.history.outcome.error, Stopped)
    assert it.history.outcome.ends == failed(KILLED).ends
    assert group.acts == ["say_network", "flush"]


@pytest.mark.parametrize(
    ("last", "acts"),
    [(failed(KILLED), ["saved", "say_network", "flush"]), (failed(DRAINED), ["saved", "flush"])],
    ids=["failed", "drained"],
)
def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: Attempt, acts: list[str]
) -> None:
    """The shards in memory were lost, and the last state with them."""
    it, group = rig(tmp_path, monkeypatch, last), Group(interrupted=True)
    with signals.stoppable():
        it.make(group, replace(JOB, restart=Restart(max=0 if last == failed(KILLED) else 3)))
        assert group.acts == acts
        with pytest.raises(Stopped):  # what would follow, such as another placement
            signals.raise_again()


def test_why_there_is_no_other_attempt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, group = rig(tmp_path, monkeypatch, failed(KILLED), failed(KILLED, step=9)), Group()
    once = replace(JOB, restart=Restart(max=1))
    it.make(group, once)
    decision = it.decisions[-1]
    assert isinstance(decision, GiveUp)
    assert it.history.outcome is not None
    assert it.history.outcome.why_last == decision.reason != ""


def test_an_error_between_two_placements_keeps_the_attempts_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, error = rig(tmp_path, monkeypatch, failed(KILLED), failed(DRAINED)), LaunchError("no nodes")
    with pytest.raises(LaunchError):
        it.history.cut_short(error)
    it.make(Group())
    it.history.cut_short(error)
    assert it.history.outcome is not None
    assert (it.history.outcome.error, it.history.outcome.ends) == (error, failed(DRAINED).ends)
    assert it.history.outcome.earlier == (failed(KILLED),)


@pytest.mark.parametrize("error", [LaunchError("Ray does not answer"), Stopped(signal.SIGINT)])
def test_an_error_after_the_end_of_a_run_leaves_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RaydistError
) -> None:
    """The run had no values, and another exit code."""
    it = rig(tmp_path, monkeypatch, GOOD)
    it.make(Group())
    outcome = it.history.outcome
    assert outcome is not None
    it.history.cut_short(error)
    assert it.history.conclude() is outcome
    assert [str(error) in event["text"] for event in it.seen] == [True]


@pytest.mark.parametrize("written", [True, False])
def test_a_state_that_fork_servers_write_after_their_agents_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    silent = replace(KILLED, how="lost", signal=0, silent=True)
    it, group = rig(tmp_path, monkeypatch, failed(silent)), Group(unwritten="no agent answers")
    monkeypatch.setattr(attempts, "SAVED_S", 60.0 if written else 0.0)
    job = replace(JOB, dir=str(tmp_path), restart=Restart(max=0))
    it.make(group, job)
    assert group.silent == {1}
    request = SaveRequest(7, {"n": 1}, {}, 2, str(tmp_path / "checkpoints"), str(tmp_path), 3, None)
    writer = threading.Timer(0.5, checkpoint_files.write_and_prune, [request])
    if written:
        writer.start()
    assert it.history.conclude() is it.history.outcome
    events = [(each["kind"], each.get("step"), each.get("text")) for each in it.seen]
    assert events == [("saved", 7, None) if written else ("warning", None, "no agent answers")]


@pytest.mark.parametrize("held", [-1, 7, 9, None])
def test_nothing_is_lost_if_the_newest_state_in_memory_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int | None
) -> None:
    """Step 7 was saved, and told, before the agents were stopped; 9 is never written, and None is
    not known."""
    silent = [End(rank, "a", "lost", 1.0, step=5, silent=True) for rank in (0, 1)]
    it, group = (
        rig(tmp_path, monkeypatch, Attempt(ends=silent)),
        Group(unwritten="no agent answers", held=held),
    )
    monkeypatch.setattr(attempts, "SAVED_S", 60.0 if held in (-1, 7) else 0.1)
    job = replace(JOB, dir=str(tmp_path), restart=Restart(max=0))
    if held != -1:
        checkpoint_files.write_and_prune(
            SaveRequest(7, {"n": 1}, {}, 2, str(tmp_path / "checkpoints"), str(tmp_path), 3, None)
        )
        it.events.add(kinds.Saved(rank=0, step=7))
    it.make(group, job)
    assert group.acts == ["say_network", "flush", "newest_state"]
    it.history.conclude()
    assert [each["text"] for each in it.seen if each["kind"] == "warning"] == (
        [] if held in (-1, 7) else ["no agent answers"]
    )


def has(patch: pytest.MonkeyPatch, nodes: Sequence[Node]) -> None:
    """Let the cluster have these nodes."""
    patch.setattr(connect, "alive_nodes", lambda: nodes)
    patch.setattr(connect, "node_types", list)
    patch.setattr(drain, "drain_deadlines", dict)


@pytest.mark.parametrize(
    ("scale", "before"), [(Scale(nodes=None, per_node=4), 16), (Scale(nodes=2), 32)]
)
@pytest.mark.parametrize("later", [3, 5])
def test_a_run_that_is_placed_again_has_the_ranks_that_it_had(
    monkeypatch: pytest.MonkeyPatch, scale: Scale, before: int, later: int
) -> None:
    """Other nodes would be other ranks, and so another global batch: the cluster's, or smaller
    ones."""
    job = Job(scale=scale)
    has(monkeypatch, canned.nodes(4))
    request = next_request(job, None)
    assert request.world_size == before
    small = [replace(node, total={"CPU": 8.0}) for node in canned.nodes(later)]
    has(monkeypatch, small)
    assert next_request(job, request) == request
    assert next_request(job, None).world_size != before  # a new command, resume= too


def test_a_run_does_not_wait_for_spares_that_were_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gave up after scale.wait_s, though it had as many nodes as it has ranks for."""
    job = Job(scale=Scale(nodes=3, spares=2, per_node=2))
    has(monkeypatch, canned.nodes(5))
    request = next_request(job, None)
    assert (len(request.bundles), request.spares, request.world_size) == (5, 2, 6)
    for nodes, spares in ((7, 2), (5, 2), (4, 1), (3, 0), (2, 0)):
        has(monkeypatch, canned.nodes(nodes))
        found = next_request(job, request)
        assert (len(found.bundles), found.spares, found.world_size) == (3 + spares, spares, 6)


def test_only_an_elastic_run_is_placed_again_with_the_nodes_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If its GPUs are gone, it waits for them: with backend=auto it would continue on the CPUs."""
    job = Job(scale=Scale(nodes=2, max_nodes=8, per_node=2))
    has(monkeypatch, canned.nodes(4, gpus=2))
    request = next_request(job, None)
    assert (request.backend, request.world_size) == ("nccl", 8)
    has(monkeypatch, canned.nodes(3, gpus=2))
    assert next_request(job, request).world_size == 6
    least = replace(request, world_size=4, bundles=request.bundles[:2])
    has(monkeypatch, canned.nodes(3))
    assert next_request(job, request) == least
    has(monkeypatch, canned.nodes(1, gpus=2))
    assert next_request(job, request) == least
