"""A run's turn: which other runs count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from raydist.cluster import connect, placement, ray_private
from raydist.cluster.nodes import NodeType
from raydist.cluster.queue import others, store, turn, wait_limits
from raydist.cluster.queue.entry import (
    CANCEL,
    LEAVING,
    PAUSE,
    PLACING,
    RESUME,
    RUNNING,
    WAITING,
    Demand,
    Entry,
    Instruction,
    WayRequest,
)
from raydist.cluster.queue.order import Cluster, Verdict
from raydist.cluster.queue.outer import KUBERAY_TAGS, has_outer_queue
from raydist.settings.config import Backend, Job, Queue, Scale
from raydist.shared.errors import ConfigError, LaunchError, Stopped
from raydist.shared.events import Events
from raydist.shared.kinds import Event
from raydist.tools.queue import Wish, follow_wish
from tests.cluster.queue.test_order import NOW, node, runs, waits


class Clock:
    """A clock that the test turns on."""

    now = NOW

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (turn, others, wait_limits):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(turn, "seen_cluster", lambda: Cluster([node(1, 0), node(2, 0)]))
    return clock


def test_every_run_sees_the_types_of_all_nodes_that_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that saw only those with its labels took them for what another run waits for."""
    here = replace(node(1, 0), labels={"pool": "gpu", "ray.io/node-group": "gpus"})
    gpus = NodeType("gpus", {"GPU": 8.0}, 2, {"pool": "gpu"})
    cpus = NodeType("cpus", {"CPU": 8.0}, 3, {"pool": "cpu"})
    monkeypatch.setattr(connect, "remaining_nodes", lambda: [here])
    monkeypatch.setattr(connect, "node_types", lambda: [gpus, cpus])
    assert turn.seen_cluster() == Cluster([here], [(gpus, 1), (cpus, 3)])
    monkeypatch.setattr(connect, "node_types", lambda: None)
    assert turn.seen_cluster() == Cluster([here], None)


JOB = Job(scale=Scale(per_node=1), backend=Backend(name="gloo"))
NODES = [replace(node(1, 0), total={"CPU": 1.0}, free={"CPU": 1.0})]


class Unread:
    """Events that nobody reads."""

    def add(self, event: Event) -> None:
        """Do nothing."""


def urgent(monkeypatch: pytest.MonkeyPatch, found: store.Everything) -> turn.QueuedTurn:
    """Return the turn of an urgent run that sees these entries in the store."""
    own: Any = turn.QueuedTurn(Job(queue=Queue(enabled=True)), cast("Events", Unread()))
    own._entry = waits("urgent", priority=100)
    monkeypatch.setattr(store, "read_all", lambda: found)
    return own  # type: ignore[no-any-return]


def beaten(entry: Entry) -> Entry:
    return replace(entry, beat=entry.beat + 1)


def test_nobody_counts_on_a_run_whose_driver_is_silent(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    silent, other = runs("silent", 1, placed=2.0), runs("other", 2, placed=1.0)
    found = store.Everything([silent, other], {})
    own = urgent(monkeypatch, found)
    assert own._look().asks.keys() == {"silent/0"}
    found.requests["silent/0"] = WayRequest("urgent of ana@login")
    assert own._look().asks == {}
    clock.now += others.SILENT_S
    found.entries[1] = beaten(other)
    assert own._look().asks.keys() == {"other/0"}
    found.entries[:] = [beaten(silent), beaten(beaten(other))]
    assert own._look().asks == {}


@pytest.mark.parametrize(("shrink", "size"), [(False, 2), (True, 1)])
def test_an_elastic_run_asks_for_the_nodes_that_have_room_in_its_turn(
    shrink: bool, size: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    own = urgent(monkeypatch, store.Everything([], {}))
    scale = Scale(1, 3, per_node=1)
    own._job = replace(JOB, queue=Queue(enabled=True, shrink=shrink), scale=scale)
    free = [replace(NODES[0], id=f"n{n}") for n in (1, 2, 3)]
    own._write(replace(own._own, demand=Demand.of(placement.resources_for(own._job, free))))
    request = placement.resources_for(own._job, free)
    taken = replace(free[2], free={})
    monkeypatch.setattr(turn, "seen_cluster", lambda: Cluster([*free[:2], taken]))
    own.wait()
    assert (own._own.state, len(own.fit(request).bundles)) == (PLACING, size)
    clock.now += turn.TRY_S + 1
    own.check()
    taken_too = [free[0], replace(free[1], free={}), taken]
    monkeypatch.setattr(turn, "seen_cluster", lambda: Cluster(taken_too))
    if not shrink:
        with pytest.raises(turn.TurnPassed):
            own.check()
        own.wait()
    assert own.fit(request).world_size == 1


def test_a_silent_run_in_line_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    first = waits("first", priority=200)
    monkeypatch.setattr(turn, "seen_cluster", lambda: Cluster([node(1, 8)]))
    own = urgent(monkeypatch, store.Everything([first], {}))
    assert not own._look().start
    clock.now += others.SILENT_S
    assert own._look().start


@pytest.mark.parametrize("part", [False, True])
def test_room_just_given_back_is_waited_for(
    part: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Ray shows it as free up to 0.1 s after the run's entry is gone, or has fewer nodes."""
    first, other = runs("first", 1, placed=2.0), runs("other", 2, placed=1.0)
    first = replace(first, held={"n1": 1, "n3": 1})
    found = store.Everything([first, other], {})
    own = urgent(monkeypatch, found)
    assert own._look().asks.keys() == {"first/0"}
    found.entries[:] = [*([replace(first, held={"n3": 1})] if part else []), other]
    assert own._look().asks == {}
    clock.now += others.FREED_S
    assert own._look().asks.keys() == {"other/0"}


@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("act", [PAUSE, CANCEL])
def test_a_run_that_is_paused_or_cancelled_while_it_is_placed_leaves(
    act: str, yields: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Its ranks started first; a program was then stopped after a minute, wherever it was."""
    own = urgent(monkeypatch, store.Everything([], {}))
    own._change(state=PLACING, yields=yields)
    own._follow(Instruction(act, "ana@login"))
    with pytest.raises(turn.TurnPassed):
        own.note_placement([node(1, 0)])
    assert (own.wanted_by(), own._own.state, own._own.held) == ("", WAITING, {})
    if act == PAUSE:
        assert own._look().reason.startswith("paused by ana@login")
    else:
        with pytest.raises(Stopped):
            own._look()


@pytest.mark.parametrize("act", [PAUSE, CANCEL])
def test_a_program_that_got_its_room_meanwhile_is_not_stopped(
    act: str, monkeypatch: pytest.MonkeyPatch, clock: Clock, tmp_path: Path
) -> None:
    """The driver reads the instruction up to a second after it was typed."""
    own = urgent(monkeypatch, store.Everything([], {}))
    own._change(state=PLACING, yields=False)
    typed: list[Instruction] = []

    def read_by_driver(id: str) -> Instruction | None:
        if own._own.state == PLACING:
            own.note_placement([node(1, 0)])
            own._follow(typed.pop())
        return None

    monkeypatch.setattr(store, "read_all", lambda: store.Everything([own._own], {}))
    monkeypatch.setattr(store, "instruct", lambda id, instruction: typed.append(instruction))
    monkeypatch.setattr(store, "instruction_for", read_by_driver)
    with pytest.raises(ConfigError, match=r"urgent: raydist can't stop it after a step"):
        follow_wish(Wish(act, "urgent"))
    assert (own._own.state, own.wanted_by(), own._own.paused_by) == (RUNNING, "", "")


def test_a_run_that_is_resumed_while_it_leaves_waits_again(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """With queue.requeue=false it ended, although no other run had asked for its room."""
    own = urgent(monkeypatch, store.Everything([], {}))
    own._job = Job(queue=Queue(enabled=True, requeue=False))
    own.note_placement([node(1, 8)])
    own._follow(Instruction(PAUSE, "ana@login"))
    assert (own._own.state, own.wanted_by()) == (LEAVING, "`raydist queue pause` of ana@login")
    own._follow(Instruction(RESUME, "ana@login"))
    with own.entered(placement.resources_for(JOB, NODES)):
        assert own._look().reason.startswith("waiting for 1 more node")
    own._change(state=RUNNING)
    own._obey(WayRequest("other of eve@login"))
    with own.entered(placement.resources_for(JOB, NODES)), pytest.raises(Stopped):
        own._look()


def test_a_run_that_can_give_up_a_node_no_more_forgets_the_request(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The run that had asked, and all behind it, counted on the node and waited without end."""
    own = urgent(monkeypatch, store.Everything([], {}))
    own._job = Job(queue=Queue(enabled=True, shrink=True))
    forgotten: list[str] = []
    monkeypatch.setattr(store, "forget_request", forgotten.append)
    request = WayRequest("other of eve@login", ("n2",))
    three = {"n1": 1, "n2": 1, "n3": 1}
    own.note_size(three, ("n3", "n2"))
    own._obey(request)
    own.note_size(three, ("n2",))
    assert (own.nodes_wanted(), forgotten) == (request, [])
    own.note_size({"n1": 1, "n2": 1}, ())  # the other was lost: the run is at its minimum
    assert (own.nodes_wanted(), forgotten) == (None, ["urgent/0"])
    own._obey(request)  # it was read before
    assert (own.nodes_wanted(), forgotten) == (None, ["urgent/0"] * 2)


@pytest.mark.parametrize("act", [PAUSE, CANCEL])
def test_an_instruction_of_the_last_second_of_leaving_is_followed(
    act: str, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """It was removed with the entry, and reported as followed."""
    own = urgent(monkeypatch, store.Everything([], {}))

    def late(id: str) -> Instruction | None:
        return Instruction(act, "ana@login") if own._over.is_set() else None

    monkeypatch.setattr(store, "instruction_for", late)
    monkeypatch.setattr(store, "put_entry", lambda entry: None)
    monkeypatch.setattr(store, "remove_entry", lambda id: None)
    with own.entered(placement.resources_for(JOB, NODES)):
        own.note_placement([node(1, 8)])
        own._obey(WayRequest("other of eve@login"))
    monkeypatch.setattr(store, "instruction_for", lambda id: None)
    with own.entered(placement.resources_for(JOB, NODES)):
        if act == PAUSE:
            assert own._look().reason.startswith("paused by ana@login")
        else:
            with pytest.raises(Stopped):
                own._look()


def test_the_wait_for_room_outside_the_queue_has_a_limit(clock: Clock) -> None:
    limits = wait_limits.WaitLimits(600.0)
    others_hold, outside = Verdict(False, "held by a"), Verdict(False, "too few", outside=True)
    for verdict, looks in (  # one each second
        (others_hold, 1000),
        (outside, 500),
        (others_hold, 5),  # the limit begins again
        (outside, 500),
        (others_hold, 2),  # for a moment room was counted twice
        (outside, 99),
    ):
        for _ in range(looks):
            limits.note(verdict)
            clock.now += 1
    with pytest.raises(LaunchError, match=r"^gave up after 600 s \(scale.wait_s\): too few$"):
        limits.note(outside)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7"}, True),
        ({KUBERAY_TAGS: "kuberay_version=v1.5.1;kuberay_crd=RayJob"}, True),
        ({KUBERAY_TAGS: "kuberay_version=v1.5.1;kuberay_crd=RayCluster"}, False),
        ({KUBERAY_TAGS: "kuberay_version=v1.5.1;kuberay_crd=RayJob;team=a"}, True),
    ],
)
@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_outer_queue_rules_unless_ours_is_typed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environ: dict[str, str],
    expected: bool,
    wanted: bool | None,
) -> None:
    assert has_outer_queue(environ) is expected
    for name in ("SLURM_JOB_ID", KUBERAY_TAGS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray_private, "has_store", lambda: True)
    with Events(tmp_path / "events.jsonl") as events:
        queue, scale = Queue(enabled=wanted, shrink=True), Scale(1, 2, per_node=1)
        job = turn.settle_queue(Job(queue=queue, scale=scale, backend=Backend(name="gloo")))
        found = turn.turn_of(job, events)
    queued = not expected if wanted is None else wanted
    assert isinstance(found, turn.QueuedTurn) == queued
    # Nobody asks a run outside the queue to shrink: it begins with all nodes that it may have.
    nodes = [replace(node(n, 0), total={"CPU": 1.0}, free={"CPU": 1.0}) for n in (1, 2)]
    assert len(placement.resources_for(job, nodes).bundles) == (1 if queued else 2)
