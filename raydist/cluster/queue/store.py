"""The entries in the key-value store of Ray's GCS. (driver)"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass

from raydist.cluster import ray_private
from raydist.cluster.queue.entry import (
    Entry,
    Instruction,
    WayRequest,
    maker_of,
    read_entry,
    read_request,
)

RUNS = "raydist/queue/run/"
"""Before an entry's id: the key of the entry."""
ASKED = "raydist/queue/asked/"
"""Before an entry's id: the key of the request that it makes way."""
INSTRUCTIONS = "raydist/queue/instruction/"
"""Before an entry's id: the key of what a person wants of the run."""
PREFIXES = (RUNS, ASKED, INSTRUCTIONS)


@dataclass(frozen=True)
class Everything:
    """What the store has of the queue."""

    entries: list[Entry]
    requests: dict[str, WayRequest]
    """Entry id -> for whom it was asked to make way, and with which nodes."""


def put_entry(entry: Entry) -> None:
    """Write an entry over its former version."""
    ray_private.kv_put(RUNS + entry.id, entry.to_json())


def remove_entry(id: str) -> None:
    """Remove an entry, and the request and the instruction for it."""
    for prefix in PREFIXES:
        ray_private.kv_delete(prefix + id)


def request_way(id: str, request: WayRequest) -> None:
    """Ask the run with this entry to make way; an earlier request stays as it is."""
    ray_private.kv_put(ASKED + id, request.to_json(), overwrite=False)


def forget_request(id: str) -> None:
    """Remove the request for an entry, which was met."""
    ray_private.kv_delete(ASKED + id)


def instruct(id: str, instruction: Instruction) -> None:
    """Write what a person wants of the run with this entry, over an earlier instruction."""
    ray_private.kv_put(INSTRUCTIONS + id, instruction.to_json())


def instruction_for(id: str) -> Instruction | None:
    """Return what a person wants of the run with this entry."""
    value = ray_private.kv_get(INSTRUCTIONS + id)
    return Instruction(**json.loads(value)) if value else None


def forget_instruction(id: str) -> None:
    """Remove the instruction for an entry, which has been read."""
    ray_private.kv_delete(INSTRUCTIONS + id)


def request_for(id: str) -> WayRequest | None:
    """Return for whom this run must make way; None for nobody."""
    value = ray_private.kv_get(ASKED + id)
    return read_request(value) if value else None


def read_all() -> Everything:
    """Return all entries of drivers that are alive; remove what others have left."""
    found = ray_private.kv_values("raydist/queue/")
    dead = ray_private.dead_jobs()

    @functools.cache
    def has_ended(job: str, actor: str) -> bool:
        return job in dead or bool(actor and ray_private.is_dead(actor))

    entries: list[Entry] = []
    requests: dict[str, WayRequest] = {}
    for key, value in found.items():
        prefix = next((each for each in PREFIXES if key.startswith(each)), "")
        id = key.removeprefix(prefix)
        if has_ended(*maker_of(id)):
            ray_private.kv_delete(key)
        elif prefix == ASKED:
            requests[id] = read_request(value)
        elif prefix == RUNS and (entry := read_entry(value)) is not None:
            entries.append(entry)
    return Everything(entries, requests)


def as_listed(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as a person reads them: those with room first, then the line."""
    return sorted(entries, key=lambda each: (not each.has_room, not each.in_line, each.order))
