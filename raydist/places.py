"""The actors of a gang: one per rank, in its bundle of a placement group, and one per node in reserve. (driver)"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from raydist.errors import LaunchError
from raydist.events import Events
from raydist.node.place import Place
from raydist.placement import Plan

Key = tuple[int, int]
"""An actor's place: its bundle, and its rank among those of its node. It stays when ranks are counted anew."""
AGAIN_S = 0.1
"""Seconds between two looks at whether lost ranks have a place again."""


class Waiting:
    """A wait for places: says once what for, and gives up with a LaunchError after `patience` seconds."""

    def __init__(self, patience: float, events: Events) -> None:
        self._patience, self._events = patience, events
        self._began, self._told = time.monotonic(), ""

    def still(self, text: str) -> None:
        """It is not over. `text`: what is waited for, in words."""
        if time.monotonic() - self._began > self._patience:
            raise LaunchError(f"gave up after {self._patience:g} s (scale.wait_s): {text}")
        if text != self._told:
            self._events.say("wait", text=text)
        self._told = text


class Places:
    """The actors of a gang, one per rank. The first of each node is taken at once, the others when there is time."""

    def __init__(self, plan: Plan, held: Any, shipped: Mapping[str, Any]) -> None:
        import ray

        self.groups: dict[int, tuple[Any, int]] = {bundle: (held, bundle) for bundle in range(len(plan.ask.bundles))}
        """By bundle its placement group, and its number in that."""
        self._shipped = shipped
        self._kind = ray.remote(Place)  # once: Ray exports the class at each call
        self._actors: dict[Key, Any] = {}
        self.plan = plan
        self.settle(plan)
        self.take(seat.rank for seat in plan.seats if seat.local_rank == 0)

    def settle(self, plan: Plan) -> None:
        """From here on the ranks are those of this plan."""
        self.plan = plan
        leads = {seat.node_rank: (seat.bundle, 0) for seat in plan.seats if seat.local_rank == 0}
        self._lead = [leads[seat.node_rank] for seat in plan.seats]

    def take(self, ranks: Iterable[int] | None = None) -> None:
        """Bring up the actors of these ranks; of all that have none yet. Waits for none of them."""
        for rank in range(self.plan.world_size) if ranks is None else ranks:
            self.bring(self._key(rank))

    def bring(self, key: Key) -> None:
        """Bring up the actor of this place, if there is none."""
        if key not in self._actors:
            self._actors[key] = self._kind.options(**self._options(key[0])).remote(self.plan.ask.backend)

    def drop(self, key: Key) -> None:
        """End the actor of this place, if there is one."""
        import ray

        if key in self._actors:
            ray.kill(self._actors.pop(key))

    def replace(self, lost: Sequence[int], plan: Plan) -> None:
        """Other actors for these ranks, at the places that they have in this plan."""
        for rank in lost:
            self.drop(self._key(rank))
        self.settle(plan)
        self.take(rank for rank in lost if plan.seats[rank].local_rank == 0)

    def call(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """A call to the seat of a rank, by the actor that hosts it."""
        return self.ask(self._lead[rank], self.plan.seats[rank].local_rank, method, *args)

    def ask(self, key: Key, local_rank: int, method: str, *args: Any) -> Future[Any]:
        """A call to a seat of the actor of this place; it fails if that is gone, and no other has come."""
        if key not in self._actors:
            lost: Future[Any] = Future()
            lost.set_exception(LaunchError("its node is gone"))
            return lost
        return self._actors[key].ask.remote(local_rank, method, *args).future()  # type: ignore[no-any-return]

    def gpus(self) -> list[tuple[str, ...]]:
        """The GPUs of each rank. Only its own actor knows them, so this brings up and waits for all."""
        import ray

        self.take()
        ranks = range(self.plan.world_size)
        found: list[tuple[str, ...]] = ray.get([self._actors[self._key(rank)].gpus.remote() for rank in ranks])
        return found

    def leave(self) -> None:
        """End all of them."""
        for key in list(self._actors):
            self.drop(key)

    def keys_of(self, bundle: int) -> list[Key]:
        """The places of a bundle that have an actor."""
        return [key for key in self._actors if key[0] == bundle]

    def _key(self, rank: int) -> Key:
        seat = self.plan.seats[rank]
        return seat.bundle, seat.local_rank

    def _options(self, bundle: int) -> dict[str, Any]:
        """What one actor holds. Without a runtime_env Ray takes a worker that is already running."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self.plan.ask.rank_resources)
        held, number = self.groups[bundle]
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            **self._shipped,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(held, placement_group_bundle_index=number),
        }
