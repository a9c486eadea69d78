"""States in memory that outlive the rank that wrote them, and are read by whoever comes after it. (rank side)

The memory of a rank is a file without a name that the node's fork server made and holds open: a dead rank does not take
it away, and with the server the last of it is gone. Its first page says where each slot lies (node/wire.py); a slot is

    tensors, one behind the other | what they belong to, as torch.save writes it, read with weights_only

A slot's step is taken off the page before its first byte changes, and written there after the last: what the page names
is complete. Two slots take turns; the third is used only while one of them is on its way to the disk.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raydist import context
from raydist.node.wire import ASKED, GUESTS, LOCK, PAGE, SLOT, SLOTS, STEP, at_slot, complete_slots

TENSOR = "\0tensor"
"""The key that stands for a tensor in the description of a slot."""
ALIGN = 64
SLACK = 1 << 16
"""Bytes by which what is not a tensor may grow before a slot has to move."""
MOST = 0.4
"""The share of the free memory that one slot may take: there are two, and the job needs some too."""

CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
"""A container's limit and what it uses: cgroup v2, v1."""


class NoRoom(Exception):
    """Why a state can't be kept."""


@dataclass(frozen=True)
class Spot:
    """Where a tensor lies in a slot, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int

    def view(self, memory: Any) -> torch.Tensor:
        """The tensor in this memory (anything with Python's buffer protocol), as the only one of its storage.

        torch.save writes whole storages: a view of all the memory would be written with all the memory.
        """
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.begin)
        return flat.as_strided(self.shape, self.stride)

    @property
    def plain(self) -> tuple[Any, ...]:
        """As torch.load(weights_only=True) takes it."""
        return self.dtype, self.shape, self.stride, self.begin


def unpack(memory: Any, size: int, length: int, clone: bool = True) -> dict[str, Any]:
    """The state in the memory of a slot: `size` bytes of tensors, `length` of their description.

    Without `clone` its tensors are that memory.
    """
    described = torch.load(io.BytesIO(bytes(memoryview(memory)[size : size + length])), weights_only=True)
    found = [Spot(*plain).view(memory) for plain in described["spots"]]
    state: dict[str, Any] = put_together(described["tree"], [each.clone() for each in found] if clone else found)
    return state


class Memory:
    """The slots of one rank."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._page = mmap.mmap(descriptor, PAGE)
        self._maps: dict[int, tuple[tuple[int, int], mmap.mmap]] = {}
        self._views: dict[int, tuple[list[Spot], list[torch.Tensor]]] = {}
        self._coming: tuple[int, int, torch.cuda.Event] | None = None

    @property
    def steps(self) -> dict[int, int]:
        """The slot of each step that is complete."""
        return complete_slots(self._page)

    @property
    def locked(self) -> int:
        """The slot that is on its way to the disk, -1 for none."""
        return int(LOCK.unpack_from(self._page)[0])

    def lock(self, slot: int) -> None:
        """Leave this slot alone until the fork server says that it is on the disk."""
        LOCK.pack_into(self._page, 0, slot)

    @property
    def guests(self) -> dict[int, int]:
        """The slot of each step of another rank, of which this memory has a copy."""
        return complete_slots(self._page, GUESTS)

    @property
    def asked(self) -> dict[int, int]:
        """The slot of the step of which the job asked for a checkpoint."""
        return complete_slots(self._page, (ASKED,))

    def open_guest(self, size: int, length: int) -> int:
        """A slot for such a copy, of so many bytes as `size` tells; NoRoom as in `write`."""
        slot = GUESTS[max(self.guests.items(), default=(-1, GUESTS[-1]))[1] == GUESTS[0]]
        self._open(slot, size, length, False)
        return slot

    def open_own(self, size: int, length: int) -> int:
        """A slot for a state of this rank's own, of which another has the copy."""
        slot = next(free for free in range(SLOTS) if free not in self.steps.values())
        self._open(slot, size, length, False)
        return slot

    def complete(self, slot: int, step: int) -> None:
        """What was opened is there."""
        STEP.pack_into(self._page, at_slot(slot), step)

    def size(self, slot: int) -> tuple[int, int]:
        """Bytes of a slot's tensors, and of their description."""
        _, _, _, size, length, _ = SLOT.unpack_from(self._page, at_slot(slot))
        return size, length

    def raw(self, slot: int) -> torch.Tensor:
        """The used bytes of a slot, where they lie."""
        return torch.frombuffer(self.bytes_of(slot), dtype=torch.uint8, count=sum(self.size(slot)))

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps: another attempt made them, and this one makes its own."""
        for later, slot in [*self.steps.items(), *self.guests.items()]:
            if later > step:
                STEP.pack_into(self._page, at_slot(slot), -1)

    def write(self, step: int, state: Mapping[str, Any]) -> int:
        """Keep the state of a step; the slot that it went to. NoRoom if the machine has too little memory for it.

        From a GPU it is copied while the rank goes on, and is there once it has been waited for (`settle`).
        """
        self.settle()
        newest = max(self.steps.items(), default=(-1, -1))[1]
        slot = next(free for free in range(SLOTS) if free not in (newest, self.locked))
        self.fill(slot, step, state)
        return slot

    def fill(self, slot: int, step: int, state: Mapping[str, Any]) -> None:
        """Put a state into this slot."""
        tensors: list[torch.Tensor] = []
        tree = take_apart(state, tensors)
        spots, size = lay_out(tensors)
        described = io.BytesIO()
        torch.save({"tree": tree, "spots": [spot.plain for spot in spots]}, described)
        text = described.getvalue()
        memory = self._open(slot, size, len(text), set(state) != {"own"})
        memory[size : size + len(text)] = text
        for view, tensor in zip(self._places(slot, memory, spots), tensors, strict=True):
            view.copy_(tensor.detach(), non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._coming = slot, step, copied
        else:
            STEP.pack_into(self._page, at_slot(slot), step)

    def rest(self) -> None:
        """Wait until what is on its way to the disk is there: there is one at a time."""
        while self.locked >= 0:
            time.sleep(0.001)

    def drop(self) -> None:
        """Give the memory back, with all that is in it; nothing may be on its way to the disk."""
        for slot in range(ASKED + 1):
            SLOT.pack_into(self._page, at_slot(slot), -1, 0, 0, 0, 0, 0)
        os.ftruncate(self._descriptor, PAGE)

    def settle(self) -> None:
        """Wait for what is still on its way from the GPU, and name it on the page."""
        if self._coming is not None:
            slot, step, copied = self._coming
            copied.synchronize()
            self._coming = None
            STEP.pack_into(self._page, at_slot(slot), step)

    def told(self) -> list[tuple[int, int, int, int]]:
        """The newest states first: step, whether it is a whole one, bytes of its description, of its tensors."""
        found = sorted(self.steps.items(), reverse=True)
        return [(step, *reversed(SLOT.unpack_from(self._page, at_slot(slot))[3:])) for step, slot in found]

    def read(self, slot: int, clone: bool = True) -> dict[str, Any]:
        """The state of a slot; without `clone` its tensors are the slot's own bytes."""
        _, _, _, size, length, _ = SLOT.unpack_from(self._page, at_slot(slot))
        return unpack(self.bytes_of(slot), size, length, clone)

    def bytes_of(self, slot: int) -> mmap.mmap:
        """The bytes of a slot, where they lie."""
        _, begin, room, *_ = SLOT.unpack_from(self._page, at_slot(slot))
        return self._map(slot, begin, room)

    def _open(self, slot: int, size: int, length: int, whole: bool) -> mmap.mmap:
        """Take a slot's step off the page, and give it bytes enough; those bytes."""
        _, begin, room, *_ = SLOT.unpack_from(self._page, at_slot(slot))
        STEP.pack_into(self._page, at_slot(slot), -1)
        if (need := size + length) > room:
            if need > MOST * (left := memory_left()):
                raise NoRoom(f"a state takes {need / 2**20:.0f} MiB, and {left / 2**20:.0f} MiB of memory are free")
            begin, room = os.fstat(self._descriptor).st_size, -(-(need + SLACK) // PAGE) * PAGE
            os.ftruncate(self._descriptor, begin + room)
        SLOT.pack_into(self._page, at_slot(slot), -1, begin, room, size, length, whole)
        return self._map(slot, begin, room)

    def _map(self, slot: int, begin: int, room: int) -> mmap.mmap:
        """The bytes of a slot."""
        known = self._maps.get(slot)
        if known is None or known[0] != (begin, room):
            known = self._maps[slot] = (begin, room), mmap.mmap(self._descriptor, room, offset=begin)
            self._views.pop(slot, None)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # page-locked: else a copy from the GPU would hold the rank up until it is done
                address = torch.frombuffer(known[1], dtype=torch.uint8).data_ptr()
                torch.cuda.cudart().cudaHostRegister(address, room, 0)  # type: ignore[no-untyped-call]
        return known[1]

    def _places(self, slot: int, memory: mmap.mmap, spots: list[Spot]) -> list[torch.Tensor]:
        known = self._views.get(slot)
        if known is None or known[0] != spots:
            known = self._views[slot] = spots, [spot.view(memory) for spot in spots]
        return known[1]


def hand_over(step: int, state: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Have this rank's state written as a checkpoint while the training goes on; False if that can't be.

    `facts`: what node.memory.asked reads beside it.
    """
    here = context.here()
    tensors: list[torch.Tensor] = []
    tree = take_apart({"state": state, **facts}, tensors)
    # what else there is (sparse, sharded, a Parameter) would not come back as what it was
    plain = all(type(each) is torch.Tensor and each.layout == torch.strided for each in tensors)
    if here.memory is None or here.memory[0] < 0 or here.comm is None or not plain:
        return False
    if here.saver is None:
        here.saver = Memory(here.memory[0])
        here.leaving.append(here.saver.rest)
    memory: Memory = here.saver
    memory.rest()
    try:
        memory.fill(ASKED, step, put_together(tree, tensors))
    except NoRoom:
        return False
    memory.settle()
    memory.lock(ASKED)
    context.tell("save", slot=ASKED)
    return True


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[Spot], int]:
    """A place for each tensor, in its own memory order where that has no gaps; and the bytes of all."""
    spots, end = [], 0
    for tensor in tensors:
        dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        spots.append(Spot(tensor.dtype, tuple(tensor.shape), tuple(stride), end))
        end += -(-tensor.numel() * tensor.dtype.itemsize // ALIGN) * ALIGN
    return spots, end


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """The value with a mark in the place of each tensor; the tensors go to the end of `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {TENSOR: len(tensors) - 1}
    return rebuilt(value, lambda inner: take_apart(inner, tensors))


def put_together(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `take_apart` took apart."""
    if type(tree) is dict and TENSOR in tree:
        return tensors[tree[TENSOR]]
    return rebuilt(tree, lambda inner: put_together(inner, tensors))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with all that it holds changed; what holds nothing, as it is."""
    if type(value) in (dict, OrderedDict):
        made = type(value)((key, change(inner)) for key, inner in value.items())
        if type(value) is OrderedDict:
            made.__dict__.update(value.__dict__)  # the versions of a state_dict's modules
        return made
    if type(value) in (list, tuple):
        return type(value)(change(inner) for inner in value)
    return value


def memory_left(root: Path = Path("/")) -> int:
    """Bytes that this machine, or the container that we are in, still has; more than any state where nobody says."""
    left = [1 << 62]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        left.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    for most, now in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit = int((root / "sys/fs/cgroup" / most).read_text())
            left.append(limit - int((root / "sys/fs/cgroup" / now).read_text()))
    return max(0, min(left))
