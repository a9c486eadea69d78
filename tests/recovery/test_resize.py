"""A size that may change: the words, who sits where afterwards, the samples of a step. Decided,
without Ray."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.cluster.placement import Plan
from raydist.recovery import attempts
from raydist.recovery.policy import GiveUp, Retry, decide, without_progress
from raydist.settings import choices
from raydist.settings.compose import compose
from raydist.settings.config import Backend, Data, Job, Restart, Scale, Target, Train
from raydist.settings.mesh import mesh_shape
from raydist.settings.overrides import spread
from raydist.settings.validate import validate
from raydist.shared.errors import ConfigError
from raydist.shared.outcome import Attempt, End
from raydist.training import data
from tests.cluster.test_placement import node


def job(backend: str = "gloo", **scale: Any) -> Job:
    return Job(job=Target("digits"), backend=Backend(name=backend), scale=Scale(**scale))


@pytest.mark.parametrize(
    ("word", "nodes", "most", "per_node"),
    [
        ("scale=2..8x4", 2, 8, 4),
        ("scale=1..3", 1, 3, None),
        ("scale.nodes=2..8", 2, 8, None),
        ("scale=2x4", 2, None, 4),
        ("scale.nodes=3", 3, None, None),
    ],
)
def test_a_range_of_nodes(word: str, nodes: int, most: int | None, per_node: int | None) -> None:
    scale = compose([word]).scale
    assert (scale.nodes, scale.max_nodes, scale.per_node) == (nodes, most, per_node)


def test_only_a_range_is_spread() -> None:
    words = ["scale.nodes=2..8", "scale.nodes=2", "env.SPAN=2..8", "script=a..b"]
    assert [*spread(words)] == ["scale.nodes=2", "scale.max_nodes=8", *words[1:]]


@pytest.mark.parametrize(
    ("overrides", "key", "value", "suggestion"),
    [
        (["scale=8..2x4"], "scale.nodes", "8..2", "scale.nodes=2..8"),
        (["scale=0..3x1"], "scale", "0..3x1", "scale=1..3x1"),
        (["scale.nodes=0..3"], "scale.nodes", 0, "scale.nodes=1"),
        (["scale=1..3x0"], "scale", "1..3x0", "scale=1..3x1"),
        (
            ["scale=1..3x1", "backend=mpi", "script=true"],
            "scale.nodes",
            "1..3",
            "scale.max_nodes=null",
        ),
        (["scale=1..3x1", "group=inline"], "scale.nodes", "1..3", "group=ray"),
        (
            ["scale=1..3x1", "scale.placement=PACK"],
            "scale.nodes",
            "1..3",
            "scale.placement=STRICT_SPREAD",
        ),
        (["scale=1..3x1", "scale.spares=1"], "scale.spares", 1, "scale.spares=0"),
        (
            ["scale=1..3x1", "data.resize=scale", "data.global_batch=64"],
            "data.resize",
            "scale",
            "data.resize=keep",
        ),
        (["scale=2..9x2", "data.global_batch=16"], "scale.nodes", "2..9", "data.global_batch=18"),
        (["scale=2..9", "data.batch_size=4"], "scale.nodes", "2..9", "data.global_batch=9"),
        (["scale=2x1", "scale.spares=1", "restart=none"], "scale.spares", "1", "restart.max=1"),
        (["scale=cluster", "scale.spares=1"], "scale.spares", "1", "scale.nodes=1 scale.spares=1"),
        (["scale=cluster", "scale.max_nodes=3"], "scale.max_nodes", 3, "scale.nodes=1..3"),
        (
            ["scale=2x1", "scale.spares=1", "backend=mpi", "script=true"],
            "scale.spares",
            "1",
            "scale.spares=0",
        ),
        (["scale.spares=-1"], "scale.spares", -1, "scale.spares=0"),
    ],
)
def test_what_can_not_change_its_size_is_refused(
    overrides: list[str], key: str, value: object, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    assert (refused.value.key, refused.value.value, refused.value.suggestion) == (
        key,
        value,
        suggestion,
    )


def test_a_size_without_a_range_is_as_it_was() -> None:
    assert choices.parse_scale("2x8") == {"nodes": 2, "per_node": 8}
    assert validate(job(nodes=1)).scale.max_nodes is None


def test_a_spare_is_asked_for_and_gets_no_rank() -> None:
    nodes = [node(1), node(2), node(3)]
    request = placement.resources_for(job(nodes=2, per_node=2, spares=1), nodes)
    assert (request.world_size, len(request.bundles)) == (4, 3)
    plan = placement.assign_ranks(request, nodes)
    assert [slot.node.host for slot in plan.slots] == ["node-1", "node-1", "node-2", "node-2"]
    assert [spare.host for spare in plan.spares] == ["node-3"]
    assert plan.as_event()["spares"] == [{"host": "node-3", "ip": "10.0.0.3", "node": node(3).id}]


def test_spares_that_the_cluster_can_not_hold_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"scale=2x2 scale.spares=2 requests 4 nodes(.|\n)*set scale.spares=1$"
    ):
        placement.resources_for(job(nodes=2, per_node=2, spares=2), [node(1), node(2), node(3)])
    with pytest.raises(ConfigError, match=r"set scale=1x3$"):
        placement.resources_for(job(nodes=3, per_node=1, spares=1), [node(1), node(2)])
    with pytest.raises(ConfigError, match=r"set scale.spares=0$"):
        placement.resources_for(job(nodes=2, per_node=1, spares=1), [node(1), node(2)])


def planned(nodes: int, spares: int = 0, per_node: int = 2) -> Plan:
    there = [node(i) for i in range(1, nodes + spares + 1)]
    return placement.assign_ranks(
        placement.resources_for(job(nodes=nodes, per_node=per_node, spares=spares), there), there
    )


def hosts(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [one.host for one in plan.nodes]


def test_a_lost_node_leaves_and_all_others_close_up() -> None:
    before = planned(3)
    after = placement.resize_plan(before, {0: node(1), 2: node(3)}, 1, 3)
    assert after is not None
    assert hosts(after) == ["node-1", "node-3"]
    assert [(slot.rank, slot.local_rank, slot.node_rank, slot.bundle) for slot in after.slots] == [
        (0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 1, 2), (3, 1, 1, 2)
    ]  # fmt: skip
    assert (after.world_size, after.request.world_size, len(after.request.bundles)) == (4, 4, 2)
    assert not placement.numbered_alike(before, after)
    assert placement.resize_plan(before, {0: node(1), 2: node(3)}, 3, 3) is None


def test_a_newcomer_takes_the_place_of_a_lost_node_and_others_come_last() -> None:
    before = planned(3)
    ready = {0: node(1), 1: node(7), 2: node(3), 5: node(9), 6: node(8)}  # bundle 1 has moved
    assert hosts(placement.resize_plan(before, ready, 1, 5)) == [
        "node-1",
        "node-7",
        "node-3",
        "node-8",
        "node-9",
    ]
    assert hosts(placement.resize_plan(before, ready, 1, 4)) == [
        "node-1",
        "node-7",
        "node-3",
        "node-8",
    ]


def test_a_spare_takes_over_and_everybody_else_keeps_its_rank() -> None:
    before = planned(2, spares=1)
    after = placement.resize_plan(before, {1: node(2), 2: node(3)}, 2, 2)
    assert hosts(after) == ["node-3", "node-2"]
    assert after is not None
    assert after.spares == ()
    assert placement.numbered_alike(before, after)
    again = placement.resize_plan(after, {0: node(9), 1: node(2), 2: node(3)}, 2, 2)
    assert again is not None
    assert (hosts(again), [one.host for one in again.spares]) == (["node-3", "node-2"], ["node-9"])


@given(st.data())
def test_whatever_goes_and_comes_every_rank_has_one_place(draw: st.DataObject) -> None:
    size = draw.draw(st.integers(1, 5))
    plan = planned(size)
    least, most = draw.draw(st.integers(1, 3)), draw.draw(st.integers(3, 8))
    for _ in range(4):
        moved = draw.draw(st.sets(st.integers(0, 8)))
        there = {slot.bundle: slot.node for slot in plan.slots if slot.bundle not in moved}
        bundles = draw.draw(st.sets(st.integers(0, 8)))
        ready: dict[int, Node] = {b: there.get(b, node(20 + b)) for b in bundles}
        after = placement.resize_plan(plan, ready, least, most)
        if after is None:
            assert len(ready) < least
            continue
        assert least <= len(after.nodes) <= min(most, len(ready))
        assert len(after.nodes) == min(most, len(ready))
        assert [slot.rank for slot in after.slots] == [*range(2 * len(after.nodes))]
        assert len({one.id for one in after.nodes}) == len(after.nodes)
        assert all(ready[slot.bundle] == slot.node for slot in after.slots)
        plan = after


def test_more_nodes_are_no_failure_and_use_up_none() -> None:
    rule = Restart(max=1, window_s=100.0)
    lost = End(rank=1, host="a", how="lost", at=5.0, step=10)
    away = End(rank=0, host="a", how="stopped", at=9.0, step=12)
    resized = Attempt(ends=[away, replace(away, rank=1)], resize="3 nodes now, 2 before")
    verdict = decide(rule, [resized])
    assert isinstance(verdict, Retry)
    assert (verdict.number, verdict.cause, verdict.reached, verdict.since) == (1, None, 12, 9.0)
    # They may all have finished just before they were to leave.
    done = replace(resized, ends=[replace(end, how="finished") for end in resized.ends])
    assert decide(rule, [done]) == GiveUp("")
    failed = Attempt(ends=[lost, replace(away, step=10)])
    assert isinstance(decide(rule, [resized, resized, failed]), Retry)
    assert isinstance(decide(rule, [failed, resized]), Retry)
    assert decide(
        rule, [failed, resized, replace(failed, ends=[replace(lost, step=20)])]
    ) == GiveUp("2 failures within 100 s, restart.max=1")
    assert without_progress([failed, resized, failed, failed]) == 2
    # a failure on the way out counts as what it is
    verdict = decide(rule, [replace(failed, resize="3 nodes now")])
    assert isinstance(verdict, Retry)
    assert (verdict.number, verdict.cause, verdict.reached, verdict.since) == (1, lost, 10, 5.0)


@given(
    first=st.integers(1, 9),
    ranks=st.integers(1, 9),
    accumulate=st.integers(1, 4),
    batch=st.integers(1, 16),
)
def test_a_step_keeps_its_samples_and_no_pass_takes_more_than_at_first(
    first: int, ranks: int, accumulate: int, batch: int
) -> None:
    settings = replace(
        job(nodes=1, max_nodes=9), data=Data(batch_size=batch), train=Train(accumulate=accumulate)
    )
    resized = attempts.rescale(settings, first, ranks, 1)
    assert resized.data.global_batch == batch * accumulate * first
    if resized.data.global_batch >= ranks:
        passes = resized.train.accumulate * ranks
        assert resized.data.global_batch >= passes
        no_more = (
            passes + ranks > resized.data.global_batch
        )  # of another pass somebody would get nothing
        assert no_more or math.ceil(resized.data.global_batch / passes) <= batch
    assert attempts.rescale(resized, first, first, 1).data == resized.data
    assert (
        attempts.rescale(replace(settings, data=Data(resize="scale")), first, ranks, 1).train
        == settings.train
    )
    assert attempts.rescale(job(nodes=2), first, ranks, 1) == job(nodes=2)


@pytest.mark.parametrize(
    "division", ["parallel.tp=2", "parallel.pp=2", "parallel=tp parallel.tp=2 parallel.pp=2", ""]
)
def test_an_elastic_step_has_the_samples_of_a_fixed_one_under_every_division(division: str) -> None:
    words = ("job=gpt", "data.batch_size=6", "train.accumulate=2", *division.split())
    fixed, elastic = (compose([*words, f"scale={nodes}x4"]) for nodes in ("2", "2..4"))
    samples = range(999)

    def portion(job: Job, ranks: int) -> tuple[int, int]:
        resized = attempts.rescale(job, 8, ranks, 4)
        parts = mesh_shape(job.parallel, ranks, 4).data
        order = data.order(samples, resized, world_size=parts)
        return order.portion, order.global_batch

    assert portion(elastic, 8) == portion(fixed, 8)
    assert portion(elastic, 16) == portion(fixed, 8)  # in one pass, not two


@pytest.mark.parametrize(
    ("division", "text"),
    [
        ("parallel.tp=4", ""),
        ("parallel.pp=2", "10 parts of the ranks"),
        ("parallel=ddp", "20 ranks"),
    ],
)
def test_the_least_batch_of_an_elastic_run_counts_ranks_with_samples_of_their_own(
    division: str, text: str
) -> None:
    words = ["job=gpt", "data.global_batch=5", "scale=1..5x4", division]
    if not text:
        compose(words)
        return
    with pytest.raises(ConfigError, match=f"5 samples per step are too few for {text};"):
        compose(words)


@given(
    world=st.integers(1, 7),
    accumulate=st.integers(1, 3),
    batch=st.integers(21, 40),
    size=st.integers(40, 100),
)
def test_uneven_portions_are_all_samples_of_a_step_and_weigh_as_much_as_they_are(
    world: int, accumulate: int, batch: int, size: int
) -> None:
    samples = range(size)
    job = Job(
        data=Data(global_batch=batch),
        scale=Scale(max_nodes=2),
        train=Train(accumulate=accumulate),
        seed=3,
    )
    orders = [data.order(samples, job, rank, world) for rank in range(world)]
    whole = data.order(samples, replace(job, train=Train()))
    ranks = [[part.indices.tolist() for part in order] for order in orders]
    for step, (alone,) in enumerate([part.indices.tolist()] for part in whole):
        parts = [part for own in ranks for part in own[step * accumulate : (step + 1) * accumulate]]
        assert sorted(index for part in parts for index in part) == sorted(alone)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # the average over ranks of what each weighs is the mean over all samples
    assert math.isclose(sum(sum(order.shares) for order in orders) / world, 1.0)
    assert all(math.isclose(share * batch / world, len(part)) for order, own in zip(orders, ranks, strict=True)
               for share, part in zip(order.shares, own, strict=False))  # fmt: skip
    assert orders[0].even == (batch % (world * accumulate) == 0)


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data.global_batch=3: it cannot be split evenly over 4 ranks"
    ):
        data.global_batch(Data(global_batch=3), 1, 4, even=False)
