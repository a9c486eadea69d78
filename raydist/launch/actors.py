"""The actors of a worker group: one per rank, in its bundle, and one per standby node. (driver)"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from raydist.cluster.placement import Plan
from raydist.cluster.shortage import gave_up
from raydist.launch.bundles import Groups
from raydist.launch.limits import OPEN_S, longest
from raydist.launch.mailbox import Mail, Mailbox
from raydist.messages.request import Answer, AnyReply, NodeRequest, Request
from raydist.node.actor import MpiNodeActor, NodeActor
from raydist.shared import kinds, signals
from raydist.shared.errors import CallLost, LaunchError
from raydist.shared.events import Events

T = TypeVar("T")
Key = tuple[int, int]
"""An actor's bundle, and its local rank there. It stays the same when ranks are renumbered."""
POLL_S = 0.1
"""Seconds between two checks for replacement nodes."""


class Waiting:
    """A wait for nodes that reports each reason once.

    It raises LaunchError after `patience` seconds.
    """

    def __init__(self, patience: float, events: Events) -> None:
        self._patience = patience
        self._events = events
        self._began = time.monotonic()
        self._last_report = ""

    def report(self, reason: str) -> None:
        """Report that the wait continues. `reason`: what is missing, for a person."""
        signals.raise_again()
        if time.monotonic() - self._began > self._patience:
            raise gave_up(self._patience, reason)
        if reason != self._last_report:
            self._events.add(kinds.Wait(text=reason))
        self._last_report = reason


class Actors:
    """The actors of a worker group, one per rank.

    The first of each node starts at once, the others later.
    """

    def __init__(self, plan: Plan, groups: Groups, options: Mapping[str, Any]) -> None:
        """`groups`: of the plan's bundles. `options`: of each actor, such as runtime_env."""
        import ray

        self.groups = dict(groups)
        """Changed as nodes are lost and requested."""
        self._options = options
        node_actor = MpiNodeActor if plan.request.backend == "mpi" else NodeActor
        self._class = ray.remote(node_actor)  # once: Ray exports the class at each call
        self._actors: dict[Key, Any] = {}
        self._mail = Mail()
        self._boxes: dict[Key, Mailbox] = {}
        """By actor: the mailbox of its requests."""
        self._gpus: dict[Key, tuple[str, ...]] = {}
        """By actor: the GPUs that it has reported, which stay the same as long as it lives."""
        self.plan = plan
        self.set_plan(plan)
        self.start(slot.rank for slot in plan.leads)

    def set_plan(self, plan: Plan) -> None:
        """Assign the ranks as this plan does."""
        self.plan = plan
        leads = {slot.node_rank: (slot.bundle, 0) for slot in plan.leads}
        self._host_actor = [leads[slot.node_rank] for slot in plan.slots]

    def start(self, ranks: Iterable[int] | None = None) -> None:
        """Start the missing actors of these ranks (None: all ranks), without waiting for them."""
        for rank in range(self.plan.world_size) if ranks is None else ranks:
            self.start_actor(self._key(rank))

    def start_actor(self, key: Key) -> None:
        """Start this actor if it is missing."""
        if key in self._actors:
            return
        actor = self._class.options(**self._actor_options(key[0])).remote()

        def exchange(requests: Sequence[NodeRequest]) -> Future[Sequence[Answer]]:
            return actor.exchange.remote(requests).future()  # type: ignore[no-any-return]

        self._actors[key], self._boxes[key] = actor, self._mail.box(exchange)

    def kill_bundle(self, bundle: int) -> None:
        """Kill the actors of a bundle."""
        for key in list(self._actors):  # a copy: another thread may start actors meanwhile
            if key[0] == bundle:
                self._kill(key)

    def replace(self, lost: Sequence[int], plan: Plan) -> None:
        """Kill the actors of these ranks, and start others in the slots of the plan."""
        for rank in lost:
            self._kill(self._key(rank))
        self.set_plan(plan)
        self.start(rank for rank in lost if plan.slots[rank].local_rank == 0)

    def call(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to the agent of a rank, through the actor that hosts it."""
        return self.send(self._host_actor[rank], self.plan.slots[rank].local_rank, request)

    def send(self, key: Key, local_rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to an agent of this actor.

        The future fails if the actor is gone and was not replaced.
        """
        if key not in self._boxes:
            failed: Future[AnyReply] = Future()
            failed.set_exception(CallLost(LaunchError("its node is gone")))
            return failed
        return self._boxes[key].send(local_rank, request)

    def on_node(self, rank: int, look: Callable[..., T], *args: Any) -> Future[T]:
        """Call a function in a task on the node of a rank whose actor does not answer."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.plan.slots[rank].node.id, soft=False)
        task = ray.remote(look).options(
            num_cpus=0, max_retries=0, scheduling_strategy=there, **self._options
        )
        return task.remote(*args).future()  # type: ignore[no-any-return]

    def gpus(self) -> list[tuple[str, ...]]:
        """Return the GPUs of each rank.

        Only the rank's own actor knows them, so this starts all actors and waits for them. One that
        has answered before is not asked again: Ray may have killed it since, for lack of memory,
        and those that host no agent are not missed. Raises LaunchError with the nodes of actors
        that did not start in time.
        """
        import ray

        self.start()
        hosts_by_key = {self._key(slot.rank): slot.node.host for slot in self.plan.slots}
        asked = [key for key in hosts_by_key if key not in self._gpus]
        opening = {self._actors[key].gpus.remote(): hosts_by_key[key] for key in asked}
        within = longest(OPEN_S, len(opening))
        late = ray.wait([*opening], num_returns=len(opening), timeout=within)[1] if opening else []
        if late:
            hosts = ", ".join(sorted({opening[each] for each in late}))
            raise LaunchError(
                f"{len(late)} of {len(opening)} actors did not start within {within:.3g} s, on "
                f"{hosts}"
            )
        self._gpus.update(zip(asked, ray.get([*opening]), strict=True))
        return [self._gpus[key] for key in hosts_by_key]

    def by_node(self) -> Counter[str]:
        """Return the number of actors on each node, by its id."""
        nodes = {slot.bundle: slot.node.id for slot in self.plan.slots}
        return Counter(nodes[bundle] for bundle, _ in self._actors if bundle in nodes)

    def kill_all(self) -> None:
        """Kill all actors."""
        for key in list(self._actors):
            self._kill(key)
        self._mail.__exit__()

    def _kill(self, key: Key) -> None:
        import ray

        if key in self._actors:
            del self._boxes[key]
            self._gpus.pop(key, None)
            ray.kill(self._actors.pop(key))

    def _key(self, rank: int) -> Key:
        slot = self.plan.slots[rank]
        return slot.bundle, slot.local_rank

    def _actor_options(self, bundle: int) -> dict[str, Any]:
        """Return the options of one actor, with its resources.

        Without a runtime_env, Ray takes a worker that already runs.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self.plan.request.rank_resources)
        group, index = self.groups[bundle]
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            **self._options,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        }
