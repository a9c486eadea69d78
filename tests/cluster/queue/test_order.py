"""Which run of the queue may be placed, and which one makes way: tables, and what always holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.cluster.nodes import Node, NodeType
from raydist.cluster.queue.entry import (
    LEAVING,
    PLACING,
    RUNNING,
    VERSION,
    Demand,
    Entry,
    WayRequest,
    read_entry,
    read_request,
)
from raydist.cluster.queue.order import MAX_EXACT, Cluster, Verdict, order_runs, place_bundles
from raydist.cluster.queue.stop_cost import StopCost

NOW = 1000.0
EXEMPT_S = 60.0


def node(number: int, free: float, total: float = 8.0, **labels: str) -> Node:
    name = f"n{number}"
    return Node(name, f"10.0.0.{number}", name, {"GPU": total}, {"GPU": free}, labels)


def demand(bundles: int, gpus: float = 8.0, strategy: str = "STRICT_SPREAD") -> Demand:
    return Demand(bundles, {"GPU": gpus}, strategy, {})


def waits(id: str, bundles: int = 1, priority: int = 0, since: float = 0.0) -> Entry:
    """Return a run in line for whole nodes."""
    return Entry(
        id=f"{id}/0",
        name=id,
        folder=f"/runs/{id}",
        owner="ana@login",
        priority=priority,
        since=since,
        exempt_s=EXEMPT_S,
        yields=True,
        demand=demand(bundles),
    )


def runs(
    id: str, *nodes: int, priority: int = 0, placed: float = 0.0, limit_s: float = 0.0
) -> Entry:
    """Return a run that holds these nodes."""
    held = {f"n{number}": 1 for number in nodes}
    entry = waits(id, len(nodes), priority)
    return replace(entry, state=RUNNING, placed=placed, held=held, limit_s=limit_s)


def outcome(entries: Sequence[Entry], nodes: Sequence[Node]) -> Mapping[str, bool]:
    """Return which runs in line may start."""
    verdicts = order_runs(entries, Cluster(nodes), {}, NOW)
    return {id.partition("/")[0]: verdict.start for id, verdict in verdicts.items()}


def asked(entries: Sequence[Entry], nodes: Sequence[Node], before: Sequence[str] = ()) -> list[str]:
    """Return the runs that are asked to make way."""
    asked_before = {f"{id}/0": WayRequest("urgent") for id in before}
    verdicts = order_runs(entries, Cluster(nodes), asked_before, NOW)
    return sorted(id.partition("/")[0] for each in verdicts.values() for id in each.asks)


def test_runs_start_in_order_while_there_is_room() -> None:
    line = [waits("b", since=2), waits("a", since=1), waits("c", since=3)]
    assert outcome(line, [node(1, 8), node(2, 8)]) == {"a": True, "b": True, "c": False}


def test_priority_comes_before_time() -> None:
    line = [waits("a", since=1), waits("urgent", priority=100, since=2)]
    assert outcome(line, [node(1, 8)]) == {"urgent": True, "a": False}


def test_a_small_run_does_not_pass_a_large_one() -> None:
    line = [waits("large", bundles=2, since=1), waits("small", since=2)]
    assert outcome(line, [node(1, 8), node(2, 0)]) == {"large": False, "small": False}


def test_reasons_name_what_lacks_and_who_holds_it() -> None:
    entries = [runs("gpt", 2), waits("a", bundles=2), waits("b", since=1), waits("c", since=2)]
    verdicts = order_runs(entries, Cluster([node(1, 8), node(2, 0)]), {}, NOW)
    assert verdicts["a/0"].reason == (
        "waiting for 1 more node with 8 GPU: 1 of 2 ready; n2 has 8 GPU but 8 are taken; "
        "held by gpt of ana@login"
    )
    assert verdicts["a/0"].first
    assert verdicts["b/0"].reason == "waiting behind a of ana@login"
    assert verdicts["c/0"].reason == "waiting behind a of ana@login and 1 other run"


def test_room_that_a_run_before_will_take_is_not_free() -> None:
    line = [replace(waits("a", since=1), state=PLACING), waits("b", since=2)]
    assert outcome(line, [node(1, 8)]) == {"a": True, "b": False}


def test_a_group_without_room_is_given_back_for_a_run_of_higher_priority() -> None:
    line = [replace(waits("a"), state=PLACING), waits("urgent", priority=1, since=5)]
    assert outcome(line, [node(1, 0)]) == {"a": False, "urgent": False}


def test_the_autoscaler_sees_the_first_run_alone() -> None:
    line = [waits("a", bundles=2, since=1), waits("b", since=2)]
    gpus = [(NodeType("gpus", {"GPU": 8.0}, 1), 1)]
    for coming in (None, gpus):
        verdicts = order_runs(line, Cluster([node(1, 8)], coming), {}, NOW)
        assert [verdicts[id].start for id in ("a/0", "b/0")] == [True, False]
    too_few = order_runs(line, Cluster([node(1, 0)], gpus), {}, NOW)
    assert not too_few["a/0"].start


def outside(entry: Entry) -> Entry:
    """Return the run in line as one that has said that it lacks room outside of the queue."""
    return replace(entry, outside=True)


@pytest.mark.parametrize(
    ("entries", "coming", "expected"),
    [
        pytest.param(
            [waits("a", 2), waits("b", since=1)], (), "a: may_try outside, b:", id="others"
        ),
        pytest.param(
            [outside(waits("a", 2)), waits("b", since=1)],
            (),
            "a: may_try outside, b: start may_try",
            id="it holds nobody back",
        ),
        pytest.param(
            [outside(waits("a", 2)), outside(waits("b", 3, since=1)), waits("c", since=2)],
            (),
            "a: may_try outside, b: outside, c: start may_try",
            id="only the first of them asks Ray",
        ),
        pytest.param([runs("r", 2), waits("a", 2)], (), "a:", id="a run in the queue"),
        pytest.param(
            [runs("r", 2), outside(waits("a", 2)), waits("b", since=1)],
            (),
            "a:, b:",
            id="outside only a moment ago",
        ),
        pytest.param([runs("r", 2), waits("a", 3)], (), "a: may_try outside", id="too few nodes"),
        pytest.param(
            [replace(waits("p"), state=PLACING, priority=1), waits("a", 2)],
            (),
            "p: start may_try, a:",
            id="another run is being placed",
        ),
        pytest.param([waits("a", 2)], 1, "a: start may_try outside", id="nodes may come"),
        pytest.param([runs("r", 2), waits("a", 2)], 1, "a: start may_try", id="either will do"),
        pytest.param([runs("r", 2), waits("a", 3)], 1, "a:", id="both are needed"),
    ],
)
def test_room_outside_the_queue(entries: list[Entry], coming: Any, expected: str) -> None:
    types = [(NodeType("gpus", {"GPU": 8.0}, coming), coming)] if coming else ()
    found = order_runs(entries, Cluster([node(1, 8), node(2, 0)], types), {}, NOW)
    flags = ("start", "may_try", "outside")
    said = {
        id: " ".join(["", *(each for each in flags if getattr(verdict, each))])
        for id, verdict in found.items()
    }
    assert ", ".join(f"{id.partition('/')[0]}:{text}" for id, text in said.items()) == expected


@pytest.mark.parametrize(
    ("labels", "held_back"), [({"pool": "a"}, False), ({"pool": "b"}, True), (None, True)]
)
def test_only_nodes_with_its_labels_come_for_a_run(
    labels: dict[str, str] | None, held_back: bool
) -> None:
    """The run behind it fits. Its own driver, whose labels are others, sees the same."""
    first = outside(waits("first"))
    first = replace(first, demand=replace(first.demand, selector={"pool": "b"}))
    coming = [(NodeType("gpus", {"GPU": 8.0}, 1, labels), 1)]
    line = [first, waits("fits", since=1)]
    verdicts = order_runs(line, Cluster([node(1, 8, pool="a")], coming), {}, NOW)
    assert verdicts["first/0"].start == held_back
    assert verdicts["fits/0"].start != held_back


FULL = [node(1, 0), node(2, 0), node(3, 0)]


@pytest.mark.parametrize(
    ("running", "line", "expected"),
    [
        pytest.param([runs("a", 1)], [waits("b")], [], id="equal priority"),
        pytest.param([runs("a", 1)], [waits("b", priority=1)], ["a"], id="higher priority"),
        pytest.param(
            [runs("a", 1, placed=NOW - EXEMPT_S / 2)],
            [waits("b", priority=1)],
            [],
            id="its exemption",
        ),
        pytest.param(
            [replace(runs("a", 1), yields=False)], [waits("b", priority=1)], [], id="cannot stop"
        ),
        pytest.param(
            [runs("a", 1, priority=-1, placed=1.0), runs("b", 2, placed=2.0)],
            [waits("c", priority=1)],
            ["a"],
            id="the lowest priority",
        ),
        pytest.param(
            [runs("a", 1, placed=1.0), runs("b", 2, placed=2.0)],
            [waits("c", priority=1)],
            ["b"],
            id="the last one placed",
        ),
        pytest.param(
            [runs("a", 1, placed=1.0), runs("b", 2, placed=2.0)],
            [waits("c", 2, priority=1)],
            ["a", "b"],
            id="as many as are needed",
        ),
        pytest.param(
            [runs("small", 1, placed=2.0), runs("large", 2, 3, placed=1.0)],
            [waits("c", 2, priority=1)],
            ["large"],
            id="none in vain",
        ),
        pytest.param(
            [runs("a", 1), replace(runs("b", 2), yields=False)],
            [waits("c", 3, priority=1)],
            [],
            id="not enough anyway",
        ),
        pytest.param(
            [replace(runs("a", 1), state=LEAVING), runs("b", 2)],
            [waits("c", priority=1)],
            [],
            id="one is leaving",
        ),
        pytest.param(
            [runs("a", 1), runs("b", 2)],
            [waits("c", priority=2), waits("d", priority=1, since=1)],
            ["a"],
            id="only for the first in line",
        ),
        pytest.param(
            [runs("a", 1, limit_s=NOW - 1), runs("b", 2)], [waits("c")], ["a"], id="past its limit"
        ),
        pytest.param(
            [runs("a", 1, limit_s=NOW + 1)], [waits("c")], [], id="equal priority, before its limit"
        ),
        pytest.param(
            [replace(runs("a", 1, limit_s=NOW - 1), yields=False)],
            [waits("c")],
            ["a"],
            id="a program past its limit",
        ),
        pytest.param(
            [runs("a", 1, placed=NOW - 5, limit_s=5.0)],
            [waits("c")],
            ["a"],
            id="a limit shorter than the exemption",
        ),
        pytest.param(
            [runs("a", 1, priority=1, limit_s=NOW - 1)],
            [waits("c")],
            [],
            id="past its limit, but of higher priority",
        ),
    ],
)
def test_who_makes_way(running: list[Entry], line: list[Entry], expected: list[str]) -> None:
    assert asked([*running, *line], FULL) == expected


def costs(entry: Entry, rank_seconds: float) -> Entry:
    """Return the run with one rank that has had no new state for so long."""
    return replace(entry, stop=StopCost(state_at=NOW - rank_seconds))


@pytest.mark.parametrize(
    ("running", "bundles", "expected"),
    [
        pytest.param(
            [costs(runs("a", 1, placed=1.0), 12), costs(runs("b", 2, placed=2.0), 340)],
            1,
            ["a"],
            id="the cheapest one",
        ),
        pytest.param(
            [costs(runs("a", 1, placed=1.0), 12.2), costs(runs("b", 2, placed=2.0), 12.4)],
            1,
            ["b"],
            id="less than a rank-second is noise: the last one placed",
        ),
        pytest.param(
            [replace(runs("a", 1), stop=StopCost(8, save_s=2.0)), costs(runs("b", 2), 15)],
            1,
            ["b"],
            id="the number of ranks and the time of a save count",
        ),
        pytest.param(
            [costs(runs("a", 1, priority=-1), 5000), costs(runs("b", 2), 1)],
            1,
            ["a"],
            id="priority comes before cost",
        ),
        pytest.param(
            [
                costs(runs("a", 1, priority=-1), 5000),
                costs(runs("b", 2), 9),
                costs(runs("c", 3), 3),
            ],
            2,
            ["a", "c"],
            id="one more of a higher priority: the cheapest",
        ),
        pytest.param(
            [costs(runs("a", 1), 10), costs(runs("b", 2), 20), costs(runs("c", 3, 4), 29)],
            2,
            ["c"],
            id="one large run for less than two small ones",
        ),
        pytest.param(
            [costs(runs("a", 1), 10), costs(runs("b", 2), 20), costs(runs("c", 3, 4), 31)],
            2,
            ["a", "b"],
            id="two small ones for less than a large one",
        ),
        pytest.param(
            [costs(runs("a", 1), 0), costs(runs("b", 2, 3), 0)],
            2,
            ["b"],
            id="none in vain, even for nothing",
        ),
        pytest.param(
            [costs(replace(runs("a", 1), yields=False), 0), costs(runs("b", 2), 340)],
            1,
            ["b"],
            id="one that cannot stop costs nothing in vain",
        ),
        pytest.param(
            [costs(runs("a", 1, placed=NOW - 1), 0), costs(runs("b", 2), 340)],
            1,
            ["b"],
            id="its exemption",
        ),
    ],
)
def test_those_make_way_whose_stop_costs_least(
    running: list[Entry], bundles: int, expected: list[str]
) -> None:
    nodes = [node(number, 0) for number in range(1, 5)]
    assert asked([*running, waits("urgent", bundles, priority=1)], nodes) == expected


def test_among_many_runs_no_one_makes_way_in_vain() -> None:
    count = MAX_EXACT + 1
    nodes = [node(number, 0) for number in range(count + 2)]
    running = [costs(runs(f"r{number}", number), 9 - number) for number in range(count)]
    running.append(costs(runs("large", count, count + 1), 100))
    assert asked([*running, waits("urgent", 1, priority=1)], nodes) == ["r8"]
    # The large one completes the room; of the others the most expensive one stays.
    urgent = waits("urgent", count + 1, priority=1)
    assert asked([*running, urgent], nodes) == ["large", *(f"r{n}" for n in range(1, count))]


def test_a_run_that_makes_way_is_told_why() -> None:
    running = [costs(runs("a", 1), 12), costs(runs("b", 2), 340), costs(runs("c", 3), 41)]
    verdicts = order_runs([*running, waits("urgent", priority=1)], Cluster(FULL), {}, NOW)
    assert verdicts["urgent/0"].asks == {
        "a/0": "its stop costs 12 rank-seconds, that of c 41, that of b 340"
    }
    no_choice = order_runs([running[0], waits("urgent", priority=1)], Cluster(FULL[:1]), {}, NOW)
    assert no_choice["urgent/0"].asks == {"a/0": ""}


def elastic(id: str, *nodes: int, spare: Sequence[int], priority: int = 0) -> Entry:
    """Return a run that can give up some of its nodes."""
    entry = runs(id, *nodes, priority=priority)
    return replace(entry, spare=tuple(f"n{number}" for number in spare))


@pytest.mark.parametrize(
    ("running", "bundles", "shrinks", "stops"),
    [
        pytest.param(
            [elastic("e", 1, 2, 3, spare=[3, 2]), runs("a", 4, priority=-1)],
            1,
            {"e": ["n3"]},
            [],
            id="before another run is stopped, even one of lower priority",
        ),
        pytest.param(
            [elastic("e", 1, 2, 3, spare=[3, 2])], 2, {"e": ["n2", "n3"]}, [], id="all it can"
        ),
        pytest.param(
            [elastic("e", 1, 2, spare=[2]), elastic("f", 3, 4, spare=[4], priority=-1)],
            1,
            {"f": ["n4"]},
            [],
            id="the lowest priority",
        ),
        pytest.param(
            [elastic("e", 1, 2, spare=[2]), elastic("f", 3, 4, spare=[4])],
            2,
            {"e": ["n2"], "f": ["n4"]},
            [],
            id="two of them",
        ),
        pytest.param(
            [elastic("e", 1, 2, spare=[2]), replace(runs("a", 3, 4), placed=1.0)],
            2,
            {},
            ["a"],
            id="not in vain if that is not enough",
        ),
        pytest.param([elastic("e", 1, 2, spare=[2])], 3, {}, [], id="not enough anyway"),
        pytest.param(
            [replace(elastic("e", 1, 2, spare=[2]), placed=NOW - 1), runs("a", 3)],
            1,
            {},
            ["a"],
            id="its exemption",
        ),
        pytest.param(
            [elastic("e", 1, 2, spare=[2], priority=1), runs("a", 3)],
            1,
            {},
            ["a"],
            id="equal priority",
        ),
        pytest.param(
            [costs(elastic("e", 1, 2, spare=[2]), 9), runs("a", 3)],
            1,
            {},
            ["a"],
            id="one that does not stop after a step",
        ),
    ],
)
def test_an_elastic_run_shrinks_first(
    running: list[Entry], bundles: int, shrinks: dict[str, list[str]], stops: list[str]
) -> None:
    nodes = [node(number, 0) for number in range(1, 5)]
    urgent = waits("urgent", bundles, priority=1)
    verdict = order_runs([*running, urgent], Cluster(nodes), {}, NOW)["urgent/0"]
    found = {id.partition("/")[0]: sorted(given) for id, given in verdict.shrinks.items()}
    assert found == shrinks
    assert sorted(id.partition("/")[0] for id in verdict.asks) == stops


def test_nodes_that_are_being_given_up_are_counted_once() -> None:
    nodes = [node(number, 0) for number in range(1, 5)]
    running = [elastic("e", 1, 2, 3, spare=[3, 2]), runs("a", 4)]
    asked_before = {"e/0": WayRequest("urgent", ("n3",))}

    def verdict(bundles: int) -> Verdict:
        urgent = waits("urgent", bundles, priority=1)
        return order_runs([*running, urgent], Cluster(nodes), asked_before, NOW)["urgent/0"]

    assert (verdict(1).shrinks, verdict(1).asks) == ({}, {})
    assert verdict(2).shrinks == {"e/0": ("n2",)}
    assert verdict(3).asks.keys() == {"e/0"}


def limited(id: str, limit_s: float, since: float = 1.0, bundles: int = 1) -> Entry:
    return replace(waits(id, bundles, since=since), limit_s=limit_s)


@pytest.mark.parametrize(
    ("running", "behind", "expected"),
    [
        # n1 is free; the first in line needs two nodes, and has n2 at NOW + 100
        pytest.param(runs("r", 2, limit_s=NOW + 100), [limited("s", 90)], ["s"], id="in time"),
        pytest.param(runs("r", 2, limit_s=NOW + 100), [limited("s", 91)], [], id="too late"),
        pytest.param(runs("r", 2, limit_s=NOW + 100), [waits("s", since=1)], [], id="no limit"),
        pytest.param(runs("r", 2), [limited("s", 1)], [], id="when it has room is unknown"),
        pytest.param(
            runs("r", 2, limit_s=NOW + 100),
            [limited("s", 95), limited("t", 5, 2), limited("u", 5, 3)],
            ["t"],
            id="only those that fit together",
        ),
        pytest.param(
            runs("r", 2, limit_s=NOW + 100), [limited("s", 5, bundles=2)], [], id="no room"
        ),
        pytest.param(
            runs("r", 2, priority=1, limit_s=NOW + 100), [limited("s", 5)], [],
            id="its room is held by a run that does not make way for it",
        ),
        pytest.param(
            replace(runs("r", 2, limit_s=NOW + 100), state=LEAVING), [limited("s", 5)], [],
            id="it is about to have room",
        ),
    ],
)  # fmt: skip
def test_who_passes_the_first_in_line(
    running: Entry, behind: list[Entry], expected: list[str]
) -> None:
    first = waits("first", bundles=2)
    started = outcome([running, first, *behind], [node(1, 8), node(2, 0)])
    assert [id for id, start in started.items() if start] == expected


def test_when_the_first_in_line_has_room_at_the_latest() -> None:
    nodes = [node(1, 0), node(2, 0), node(3, 0)]
    held = [runs("a", 1, limit_s=NOW + 50), runs("b", 2, limit_s=NOW + 70), runs("c", 3)]

    def room_at(bundles: int) -> float | None:
        first = waits("first", bundles)
        return order_runs([*held, first], Cluster(nodes), {}, NOW)["first/0"].room_at

    assert [room_at(bundles) for bundles in (1, 2, 3)] == [NOW + 50, NOW + 70, None]


def test_a_paused_run_is_in_nobodys_way() -> None:
    paused = replace(waits("paused", bundles=2), paused_by="ana@login")
    assert outcome([paused, waits("b", since=1)], [node(1, 8), node(2, 0)]) == {"b": True}
    assert asked([paused, runs("r", 2), waits("c", priority=1)], FULL[1:]) == ["r"]


def test_nobody_is_asked_twice_for_the_same_room() -> None:
    entries = [runs("a", 1), runs("b", 2), waits("c", priority=1)]
    assert asked(entries, FULL, before=["a"]) == []
    entries[-1] = waits("c", 2, priority=1)
    assert asked(entries, FULL, before=["a"]) == ["b"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (demand(2), {"n1": 1, "n3": 1}),
        (demand(3), None),
        (demand(12, 1, "PACK"), {"n1": 8, "n2": 0, "n3": 4}),
        (demand(8, 1, "STRICT_PACK"), {"n1": 8}),
        (demand(9, 1, "STRICT_PACK"), None),
        (demand(21, 1, "PACK"), None),
        (replace(demand(1), selector={"zone": "b"}), {"n3": 1}),
        (replace(demand(2), selector={"zone": "b"}), None),
    ],
)
def test_where_bundles_fit(wanted: Demand, expected: dict[str, int] | None) -> None:
    nodes = [node(1, 8, zone="a"), node(2, 4, zone="a"), node(3, 8, zone="b")]
    found = place_bundles(wanted, Cluster(nodes).free, nodes)
    assert found == (expected and {name: n for name, n in expected.items() if n})


RUNS = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(-2, 2), st.booleans(), st.sampled_from((0.0, NOW - 1))
    ),
    max_size=6,
)


@given(RUNS, st.lists(st.sampled_from((0.0, 8.0)), min_size=1, max_size=4))
def test_what_always_holds(line: list[tuple[int, int, bool, float]], free: list[float]) -> None:
    """Those that start fit together, nobody passes, and only lower priorities make way."""
    nodes = [node(number, gpus) for number, gpus in enumerate(free)]
    entries = [
        waits(f"w{number}", bundles, priority, float(number))
        for number, (bundles, priority, _, _) in enumerate(line)
    ]
    held = [
        replace(runs(f"r{number}", number, priority=line[0][1] - 1), yields=line[0][2])
        for number, gpus in enumerate(free)
        if line and not gpus
    ]
    verdicts = order_runs([*entries, *held], Cluster(nodes), {}, NOW)
    in_order = [verdicts[each.id] for each in sorted(entries, key=lambda each: each.order)]
    starts = [verdict.start for verdict in in_order]
    assert starts == sorted(starts, reverse=True)
    assert sum(each.demand.bundles for each in entries if verdicts[each.id].start) <= sum(
        gpus > 0 for gpus in free
    )
    assert sum(verdict.first for verdict in in_order) == (not all(starts))
    by_id = {each.id: each for each in held}
    for entry in entries:
        for id in verdicts[entry.id].asks:
            assert by_id[id].priority < entry.priority
            assert by_id[id].yields


def test_an_entry_survives_the_store() -> None:
    entry = replace(runs("a", 1, 2), beat=3, spare=("n2",), stop=StopCost(4, 2.5, NOW))
    assert read_entry(entry.to_json()) == entry
    newer = json.dumps({**json.loads(entry.to_json()), "version": VERSION + 1}).encode()
    assert read_entry(newer) is None
    assert read_entry(b"not JSON") is None
    assert read_entry(b"[]") is None


def test_a_request_survives_the_store() -> None:
    for request in (WayRequest("gpt of ana@login"), WayRequest("gpt", ("n1", "n2"))):
        assert read_request(request.to_json()) == request
