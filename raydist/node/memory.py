"""The snapshot memories of a node: made and held by its fork server, written to the disk by a child of it. (actor)"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from raydist import checkpoint
from raydist.config import Checkpoint
from raydist.node import parts
from raydist.node.wire import ABOUT, ASKED, BESIDE, GUESTS, LOCK, PAGE, blank_page, complete_slots, whole_slots
from raydist.storage import Place, place

BESIDE_THEM = 5
"""By so much less important is the process that writes a checkpoint than the ranks that train meanwhile: with as many
ranks as cores it takes a quarter of a core from one of them, not half of it. Where Linux weighs sessions against each
other (sched_autogroup_enabled, and no cgroup of CPUs) it changes nothing: the writer is a session of its own."""


@dataclass(eq=False)
class Memories:
    """Those of one run on this node, by local rank. They outlive the ranks, and end with the last seat of the run."""

    run: Path
    """The run's folder on this node."""
    checkpoints: Place
    descriptors: dict[int, int] = field(default_factory=dict)
    seats: set[socket.socket] = field(default_factory=set)
    first: bool = False
    """Rank 0 is here: unasked, only its node writes to the disk."""

    @classmethod
    def of_run(cls, spec: Mapping[str, Any], known: Iterable[Memories]) -> Memories:
        """The memories of the run that a rank belongs to."""
        run = Path(spec["value"]).parent
        there = next((each for each in known if each.run == run), None)
        if there is not None:
            return there
        named = spec["env"].get("RAYDIST_CHECKPOINTS")
        return cls(run, place(named) if named else Path(spec["env"].get("RAYDIST_RUN_DIR", run)) / "checkpoints")

    def of_rank(self, seat: socket.socket, env: Mapping[str, str]) -> tuple[int, int]:
        """Descriptors of the memories of a rank and of the first rank here; -1 where the kernel has no such thing."""
        self.seats.add(seat)
        local = int(env.get("LOCAL_RANK", "0"))
        self.first |= env.get("RANK") == "0"
        for each in sorted({0, local} - self.descriptors.keys()) if hasattr(os, "memfd_create") else ():
            self.descriptors[each] = os.memfd_create(f"raydist-snapshot-{each}")
            os.pwrite(self.descriptors[each], blank_page(), 0)
        if local == 0:
            self.unlock()  # the rank before may have died between its lock and its word
        return self.descriptors.get(local, -1), self.descriptors.get(0, -1)

    def unlock(self) -> None:
        """No slot is on its way to the disk any more."""
        if 0 in self.descriptors:
            os.pwrite(self.descriptors[0], LOCK.pack(-1), 0)

    def owed(self) -> bool:
        """Whether the last seat is about to leave, and the newest state is not on the disk. Says so once."""
        if not self.first or len(self.seats) > 1:
            return False
        self.first = False
        return self.newer()

    def newer(self) -> bool:
        """Whether the newest state of the first rank here is newer than all on the disk.

        Of a URL only the writer, in a process of its own, may know: a connection would be a thread in this one.
        """
        if 0 not in self.descriptors:
            return False
        newest = max(whole_slots(os.pread(self.descriptors[0], PAGE, 0)), default=-1)
        return newest > (checkpoint.newest_step(self.checkpoints) if isinstance(self.checkpoints, Path) else -1)

    def wants_writer(self, slot: int | None, ask: Mapping[str, Any] | None) -> bool:
        """Whether there is something for a process to do, that would `write_checkpoint`."""
        if slot is None and ask is None:
            return self.newer()
        return ask is None or ask["do"] != "look" or self.in_parts()

    def in_parts(self) -> bool:
        """Whether what is kept here are not whole states."""
        pages = {local: os.pread(descriptor, PAGE, 0) for local, descriptor in self.descriptors.items()}
        kept = any(complete_slots(page) or complete_slots(page, GUESTS) for page in pages.values())
        return kept and not whole_slots(pages[0])

    def release(self, seat: socket.socket) -> None:
        """A seat has gone; with the last one go the memories."""
        self.seats.discard(seat)
        if not self.seats:
            for descriptor in self.descriptors.values():
                os.close(descriptor)
            self.descriptors.clear()


def write_checkpoint(memories: Memories, slot: int | None, ask: Mapping[str, Any] | None, word: int) -> NoReturn:
    """In a child of the fork server: make a checkpoint of a slot of the first rank's memory (None: of the newest).

    `ask`: what to do with the parts of a sharded state instead (node/parts.py). The event that tells of it goes to the
    socket `word`, unless that is -1.
    """
    descriptors = memories.descriptors
    told = socket.socket(fileno=word) if word >= 0 else None
    if slot is not None:
        os.nice(BESIDE_THEM)
    try:
        told_of = [parts.act(descriptors, memories.checkpoints, ask)] if ask else to_disk(descriptors, slot)
    except Exception as error:
        told_of = [{"kind": "warning", "text": f"a checkpoint could not be written: {type(error).__name__}: {error}"}]
    text = b"".join(json.dumps({"t": time.time(), **each}).encode() + b"\n" for each in told_of)
    if told is not None:
        with contextlib.suppress(OSError):
            told.sendall(text)
    os._exit(0)


def to_disk(descriptors: Mapping[int, int], slot: int | None) -> list[dict[str, Any]]:
    """Make the checkpoint; the events that tell of it, none if it is there already."""
    from raydist.snapshot import Memory

    began, memory = time.perf_counter(), Memory(descriptors[0])
    if slot == ASKED:
        return asked(memory, began)
    about = memory.read(ABOUT)
    folder = place(about["checkpoints"])
    step = max(memory.steps) if slot is None else next(step for step, at in memory.steps.items() if at == slot)
    if slot is None and step <= checkpoint.newest_step(folder):
        return []
    state = memory.read(memory.steps[step], clone=False)
    own = state.pop("own")
    if slot is None:
        random = drawn(descriptors, step, about["world_size"])
        beside = {"state": {"random": random}, "metrics": {"loss": float(own["loss"])}}
    else:
        beside = memory.read(BESIDE)
    facts = {"world_size": about["world_size"], "metrics": beside["metrics"]}
    return kept(about, step, {**state, **beside["state"], "config": about["config"]}, facts, began)


def asked(memory: Any, began: float) -> list[dict[str, Any]]:
    """A checkpoint that a job asked for itself."""
    (step,), about = memory.asked, memory.read(ASKED, clone=False)
    return kept(about, step, about["state"], about["facts"], began)


def kept(
    about: Mapping[str, Any], step: int, state: Mapping[str, Any], facts: dict[str, Any], began: float
) -> list[dict[str, Any]]:
    """Write a state where the run's checkpoints are; the events that tell of it."""
    folder, aside = place(about["checkpoints"]), Path(about["run_dir"]) / "checkpoints"
    settings = Checkpoint(keep=about["keep"], best=about["best"])
    path, trouble = checkpoint.keep(folder, aside, step, state, facts, settings)
    saved = {"kind": "saved", "rank": 0, "step": step, "path": str(path), "s": time.perf_counter() - began}
    return [*([{"kind": "warning", "text": trouble}] if trouble else []), saved]


def drawn(descriptors: Mapping[int, int], step: int, world_size: int) -> Any:
    """The generators of all ranks at this step, or of none if some are on other nodes or were not kept: a run that goes
    on from the checkpoint then seeds them anew."""
    import torch

    from raydist.snapshot import Memory

    found = []
    for _, descriptor in sorted(descriptors.items()):
        memory = Memory(descriptor)
        if step in memory.steps:
            found.append(memory.read(memory.steps[step])["own"]["random"])
    return torch.stack(found) if len(found) == world_size else torch.empty(0, dtype=torch.uint8)
