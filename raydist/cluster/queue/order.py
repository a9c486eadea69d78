"""(entries, nodes) -> which waiting run may be placed now, which run makes way. (pure)

Every driver computes this from the same entries, so no driver depends on another. Drivers that read
at different moments may disagree for a second. That is harmless: Ray never gives a resource twice,
and a run that gets no room in its turn gives its placement group back (turn.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import inf

from raydist.cluster.nodes import Node, NodeType, distribute, fit_count, matches, room
from raydist.cluster.queue.entry import LEAVING, PLACING, Demand, Entry, WayRequest
from raydist.cluster.shortage import describe_shortage
from raydist.shared.rank_names import counted

LEAVE_S = 10.0
"""Maximum time in seconds that a run takes to make way: to finish a step, write its last state and
end its processes."""
MAX_EXACT = 8
"""Number of runs up to which every set of them is compared (255 sets)."""
OTHERS_NAMED = 2
"""The cost of so many runs that stay is in the reason why another one makes way."""
Free = Mapping[str, Mapping[str, float]]
"""Node id -> resources that nobody holds."""


@dataclass(frozen=True)
class Verdict:
    """What a run in line does now."""

    start: bool
    """Whether it may be placed."""
    reason: str = ""
    """Why it waits, for a person."""
    first: bool = False
    """Whether it is the first in line: of the runs that wait for the same kind of room, see
    `outside`."""
    outside: bool = False
    """Whether it lacks room that no run in the queue holds: it would not fit if all of them ended
    now."""
    asks: Mapping[str, str] = field(default_factory=dict)
    """Id of each running entry that is to make way for it -> why that one, for a person; empty if
    there was no choice."""
    shrinks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Id of each running entry that is to give up nodes for it -> their ids."""
    room_at: float | None = None
    """The latest time at which it will have room, in seconds since the epoch; None if unknown."""

    @property
    def may_try(self) -> bool:
        """Whether the run may ask Ray for its room.

        The queue does not know when room outside of it becomes free. Ray does.
        """
        return self.start or (self.first and self.outside)


@dataclass(frozen=True)
class Cluster:
    """What the queue knows of the cluster besides the entries."""

    nodes: Sequence[Node]
    """Those that are alive and not being drained."""
    coming: Sequence[tuple[NodeType, int]] | None = ()
    """The types of which the autoscaler may add nodes, with their number, whatever their labels:
    each run selects its own. None if that is unknown."""

    @property
    def free(self) -> Free:
        """What nobody holds now."""
        return {node.id: node.free for node in self.nodes}


def order_runs(
    entries: Iterable[Entry], cluster: Cluster, requests: Mapping[str, WayRequest], now: float
) -> dict[str, Verdict]:
    """Return what each run in line does, by id.

    Runs of higher priority come first, then those that entered first. The first that does not fit
    holds back all others: otherwise small runs would pass it forever. Only runs whose own limit
    ends before it has room may pass it. A run that lacks what no run in the queue holds, and says
    so (`Entry.outside`), holds back nobody. `requests`: by the id of an entry, what others have
    asked of it. `now`: seconds since the epoch.
    """
    entries = list(entries)
    line = sorted((each for each in entries if each.in_line), key=lambda each: each.order)
    placed = [each for each in entries if each.has_room]
    nodes_given = {id: request.nodes for id, request in requests.items() if request.nodes}
    wholly = requests.keys() - nodes_given.keys()
    leaving = [each for each in placed if each.state == LEAVING or each.id in wholly]
    staying = [each for each in placed if each not in leaving]
    leaving += [only_on(each, nodes_given.get(each.id, ())) for each in staying]
    staying = [without(each, nodes_given.get(each.id, ())) for each in staying]
    free = cluster.free
    verdicts: dict[str, Verdict] = {}
    for place, entry in enumerate(line):
        taken = place_bundles(entry.demand, free, cluster.nodes)
        if taken is not None:
            verdicts[entry.id] = Verdict(True)
            free = changed(free, entry.demand.bundle, taken, -1)
            continue
        reason = why_it_waits(entry, placed, free, cluster.nodes)
        # The autoscaler learns of a demand from a placement group that waits: only from this.
        grows = can_grow(entry.demand, free, cluster)
        outside = lacks_outside(entry, entries, cluster, grows)
        first = not (outside and any(each.outside for each in verdicts.values()))
        verdicts[entry.id] = Verdict(grows, reason, first, outside)
        if outside and entry.outside and not grows:
            continue
        if not grows:
            soon = with_back(free, leaving)
            verdicts[entry.id] = with_requests(
                verdicts[entry.id], entry, staying, soon, cluster.nodes, now
            )
        verdicts |= {each.id: Verdict(False, text) for each, text in behind(line, place)}
        if (room_at := verdicts[entry.id].room_at) is not None:
            passing = backfill(line[place + 1 :], free, cluster.nodes, room_at - now)
            verdicts |= dict.fromkeys(passing, Verdict(True))
        break
    return verdicts


def lacks_outside(entry: Entry, entries: Iterable[Entry], cluster: Cluster, grows: bool) -> bool:
    """Return whether a run in line would not fit even if all runs in the queue ended now.

    Then others hold the room, or the cluster has too few nodes. False while a run is being placed:
    its room is taken, and it does not say yet that it holds it. `grows`: nodes that may come now
    would be enough; those that are enough only with the room of other runs do not count.
    """
    others = [each for each in entries if each.id != entry.id]
    if any(each.state == PLACING and not each.outside for each in others):
        return False
    all_back = with_back(cluster.free, [each for each in others if each.has_room])
    if place_bundles(entry.demand, all_back, cluster.nodes) is not None:
        return False
    return grows or not can_grow(entry.demand, all_back, cluster)


def with_requests(
    verdict: Verdict,
    entry: Entry,
    staying: Sequence[Entry],
    free: Free,
    nodes: Sequence[Node],
    now: float,
) -> Verdict:
    """Return the verdict with what the first run in line asks of others, and until when it waits.

    `free`: what will be free once the runs that were asked have left. `staying`: the other runs.
    """
    if place_bundles(entry.demand, free, nodes) is not None:
        return verdict
    shrinks = nodes_to_give_up(entry, staying, free, nodes, now)
    asks = {} if shrinks else make_way(entry, staying, free, nodes, now)
    room_at = room_by_limits(entry, staying, free, nodes, now)
    return replace(verdict, asks=asks, shrinks=shrinks, room_at=room_at)


def room_by_limits(
    entry: Entry, staying: Sequence[Entry], free: Free, nodes: Sequence[Node], now: float
) -> float | None:
    """Return the latest time at which the first run in line has room, in seconds since the epoch.

    Runs with a limit free their room when it ends; None if that is not enough. `free`: what will be
    free once the runs that were asked have left. `staying`: the other runs.
    """
    limited = [each for each in staying if each.ends < inf and each.makes_way_for(entry, inf)]
    for each in sorted(limited, key=lambda each: each.ends):
        free = with_back(free, [each])
        if place_bundles(entry.demand, free, nodes) is not None:
            return max(now, each.ends)
    return None


def backfill(
    behind: Sequence[Entry], free: Free, nodes: Sequence[Node], seconds: float
) -> Iterator[str]:
    """Yield the ids of runs that may pass the first in line, which has room after `seconds`.

    They fit now, and their limit ends before that (Slurm's backfill). A run without a limit would
    keep its room for an unknown time, and Ray may place it on nodes that the first one needs.
    """
    for entry in behind:
        if not entry.limit_s or entry.limit_s + LEAVE_S > seconds:
            continue
        taken = place_bundles(entry.demand, free, nodes)
        if taken is not None:
            yield entry.id
            free = changed(free, entry.demand.bundle, taken, -1)


def place_bundles(demand: Demand, free: Free, nodes: Sequence[Node]) -> dict[str, int] | None:
    """Return how many bundles each node would hold, by id; None if there is no room for all."""
    found = distribute(demand.as_request(), bundles_by_node(demand, free, nodes))
    return None if found is None else Counter(found)


def bundles_by_node(demand: Demand, free: Free, nodes: Sequence[Node]) -> dict[str, int]:
    """Return the number of bundles that fit on each selected node, by id."""
    return {
        node.id: bundles
        for node in nodes
        if matches(node.labels, demand.selector)
        and (bundles := fit_count(free[node.id], demand.bundle))
    }


def changed(
    free: Free, bundle: Mapping[str, float], held: Mapping[str, int], sign: int
) -> dict[str, Mapping[str, float]]:
    """Return what is free once bundles are freed (`sign` 1) or taken (-1).

    `held`: node id -> number of bundles. Nodes that are gone are ignored.
    """
    after = dict(free)
    for node, bundles in held.items():
        if node in after:
            have = after[node]
            after[node] = {
                name: round(have.get(name, 0.0) + sign * bundles * bundle.get(name, 0.0), 4)
                for name in {**have, **bundle}
            }
    return after


def can_grow(demand: Demand, free: Free, cluster: Cluster) -> bool:
    """Return whether there is room once the autoscaler has added all nodes that it may add."""
    if cluster.coming is None:
        return True
    here = [(bundles, 1) for bundles in bundles_by_node(demand, free, cluster.nodes).values()]
    more = [
        (fit_count(kind.resources, demand.bundle), number)
        for kind, number in cluster.coming
        if kind.may_match(demand.selector)
    ]
    return bool(more) and room(demand.as_request(), [*here, *more]) >= demand.bundles


def only_on(entry: Entry, nodes: Collection[str]) -> Entry:
    """Return the entry with its bundles on these nodes only."""
    return replace(entry, held={id: count for id, count in entry.held.items() if id in nodes})


def without(entry: Entry, nodes: Collection[str]) -> Entry:
    """Return the entry without these nodes."""
    return replace(
        only_on(entry, entry.held.keys() - nodes),
        spare=tuple(id for id in entry.spare if id not in nodes),
    )


def nodes_to_give_up(
    entry: Entry, staying: Sequence[Entry], free: Free, nodes: Sequence[Node], now: float
) -> dict[str, tuple[str, ...]]:
    """Return which runs give up which nodes for this one, by id; {} if that is not enough.

    The lowest priority comes first, then the run that was placed last. Only raydist.fit stops after
    a step without more ado. The arguments are those of `make_way`.
    """
    able = [each for each in staying if each.makes_way_for(entry, now) and not each.stop.state_at]
    able.sort(key=lambda each: (each.priority, -each.placed))
    parts = [only_on(each, (node,)) for each in able for node in each.spare]

    def enough(chosen: Sequence[Entry]) -> bool:
        return place_bundles(entry.demand, with_back(free, chosen), nodes) is not None

    given: dict[str, tuple[str, ...]] = {}
    for each in first_enough(parts, enough) if enough(parts) else []:
        given[each.id] = (*given.get(each.id, ()), *each.held)
    return given


def make_way(
    entry: Entry, staying: Sequence[Entry], free: Free, nodes: Sequence[Node], now: float
) -> dict[str, str]:
    """Return the ids of further runs that must make way for this one, each with the reason.

    {} if it would not fit even then. `free`: what will be free once the runs that were asked have
    left. `staying`: the other runs.
    """
    able = [each for each in staying if each.makes_way_for(entry, now)]

    def enough(chosen: Sequence[Entry]) -> bool:
        return place_bundles(entry.demand, with_back(free, chosen), nodes) is not None

    chosen = least_loss(able, enough, now) if enough(able) else []
    return {each.id: why_chosen(each, [o for o in able if o not in chosen], now) for each in chosen}


def least_loss(
    able: Sequence[Entry], enough: Callable[[Sequence[Entry]], bool], now: float
) -> list[Entry]:
    """Return the set of runs that frees enough room and loses least; all together are enough.

    Priority comes first: no run makes way if those of lower priority are enough. Among sets that
    are equal in that, the cheapest one is taken, then the smallest, then the one placed last.
    Beyond MAX_EXACT runs they are added in this order until they are enough, and those that turn
    out not to be needed stay, the most expensive one first: enough room, maybe not the cheapest.
    """
    classes = sorted({each.priority for each in able}, reverse=True)
    costs = {each.id: each.stop.rank_seconds(now) for each in able}

    def loss(chosen: Sequence[Entry]) -> tuple[tuple[float, float], ...]:
        by_class = [[each for each in chosen if each.priority == one] for one in classes]
        sums = [(sum(costs[each.id] for each in some), float(len(some))) for some in by_class]
        return *sums, (-sum(each.placed for each in chosen), 0.0)

    if len(able) <= MAX_EXACT:
        sets = chain.from_iterable(combinations(able, n) for n in range(1, len(able) + 1))
        return list(next(each for each in sorted(sets, key=loss) if enough(each)))
    return first_enough(sorted(able, key=lambda each: (each.priority, loss([each]))), enough)


def first_enough(
    in_order: Sequence[Entry], enough: Callable[[Sequence[Entry]], bool]
) -> list[Entry]:
    """Return the first entries that free enough room; all together are enough.

    Those that are not needed after all are left out, beginning with the last one.
    """
    chosen = list(next(in_order[:n] for n in range(1, len(in_order) + 1) if enough(in_order[:n])))
    for each in reversed(chosen):
        fewer = [other for other in chosen if other is not each]
        if enough(fewer):
            chosen = fewer
    return chosen


def why_chosen(entry: Entry, others: Sequence[Entry], now: float) -> str:
    """Return why this run makes way and not another of its priority; empty if there is none."""
    others = [each for each in others if each.priority == entry.priority]
    others.sort(key=lambda each: each.stop.rank_seconds(now))
    if not others:
        return ""
    named = [f"that of {each.name} {each.stop.rank_seconds(now)}" for each in others[:OTHERS_NAMED]]
    cost = counted(entry.stop.rank_seconds(now), "rank-second")
    return f"its stop costs {cost}, {', '.join(named)}"


def with_back(free: Free, entries: Iterable[Entry]) -> Free:
    """Return what is free once these runs have left."""
    for each in entries:
        free = changed(free, each.demand.bundle, each.held, 1)
    return free


def why_it_waits(entry: Entry, placed: Sequence[Entry], free: Free, nodes: Sequence[Node]) -> str:
    """Return which resources the first run in line waits for, and which runs hold them."""
    seen = [replace(node, free=free[node.id]) for node in nodes]
    lacking = describe_shortage(entry.demand.as_request(), seen)
    able = {node.id for node in nodes if matches(node.labels, entry.demand.selector)}
    holders = [each for each in placed if able & each.held.keys()]
    named = [f"{each.name} of {each.owner}" for each in holders[:3]]
    named += [f"{counted(len(holders) - 3, 'more run')}"] if len(holders) > 3 else []
    return f"{lacking}; held by {', '.join(named)}" if named else lacking


def behind(line: Sequence[Entry], place: int) -> Iterator[tuple[Entry, str]]:
    """Yield each run behind this position in line, with the reason why it waits."""
    first = line[place]
    for number, entry in enumerate(line[place + 1 :], 1):
        others = f" and {counted(number - 1, 'other run')}" if number > 1 else ""
        yield entry, f"waiting behind {first.name} of {first.owner}{others}"
