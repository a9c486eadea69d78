"""States in memory that outlive the rank that wrote them, for the next attempt. (rank side)

The memory of a rank is an anonymous file (memfd) that the node's fork server creates and holds
open: it outlives the rank, and ends with the server. Its first page describes where each slot is
(snapshot_layout.py). A slot holds

    the bytes of all tensors | their description, as torch.save writes it, read with weights_only

A slot's step is removed from the page before its first byte changes, and written there after the
last: a slot whose step is on the page is complete. One more slot is used while one of them is being
written to the disk.

From a CPU two slots take turns. A GPU lags behind the host, so the GPU itself writes the step, in
its queue behind the copies, and three slots take turns: the two newest complete ones stay while the
third is copied. Ranks need that: when one rank overwrites its third newest state, its second newest
one is complete on every rank. For its newest one is complete, so all GPUs have begun to average the
gradients of that step, and a GPU does so only

- after it has copied the previous state, if its queue waits for the copy at once, or
- if copies run alongside the next step: after it has copied all states but that of the step right
  before, since its queue waits for a copy before it changes the parameters. Therefore such states
  are at least two steps apart (SnapshotInterval).
"""

from __future__ import annotations

import errno
import io
import math
import mmap
import os
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from raydist.shared import cgroup
from raydist.state.device import Device, HostDevice, Mark
from raydist.state.snapshot_layout import (
    ALL_SLOTS,
    FIT,
    LOCK,
    PAGE,
    REPLICA_SLOTS,
    SAVE_SLOT,
    SLOT_WORDS,
    SLOTS,
    State,
    at_slot,
    complete_slots,
    read_words,
    write_words,
)
from raydist.state.write import SaveRequest

TENSOR = "\0tensor"
"""The key of a dict that stands for a tensor in the description of a slot."""
ALIGN = 64
SLACK = 1 << 16
"""Bytes by which the description may grow before a slot has to move."""
MAX_SLOT = 0.4
"""Limit on the fraction of the free memory that one slot may take: there are two, and the job needs
memory too."""

PAGE_ITSELF = -1
"""The first page, among the slots whose memory is page-locked."""

GROWING = threading.Lock()
"""Held while a file grows: the loop and the thread of the sharded states may each have a buffer of
the same file."""


Cloned = Literal["all", "host", "none"]
"""Which tensors of a state that is read are copies; the others share the memory of the slot.

`host`: those that were on the host when they were kept. It is for a state that a GPU is about to
load: what comes from a GPU is copied to it, but the rest (Adam's `step`, random generators) stays
on the host, where all ranks of a node would change the same memory."""


class NoRoom(Exception):
    """A state does not fit into memory; the message states why."""


@dataclass(frozen=True)
class TensorSpec:
    """The position of a tensor in a slot, its shape and its type."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    on_host: bool = True
    """Whether it was on the host when it was kept, not on a device."""

    def view(self, memory: Any) -> torch.Tensor:
        """Return the tensor in this memory (a Python buffer), with a separate storage.

        torch.save writes whole storages: a view of the whole memory would be written with all of
        it.
        """
        count = torch.Size(self.shape).numel()
        if count == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.begin)
        return flat.as_strided(self.shape, self.stride)

    @property
    def plain(self) -> tuple[Any, ...]:
        """The fields, in a form that torch.load(weights_only=True) accepts."""
        return self.dtype, self.shape, self.stride, self.begin, self.on_host


def unpack(memory: Any, size: int, length: int, clone: Cloned = "all") -> State:
    """Return the state in the memory of a slot.

    It has `size` bytes of tensors, then `length` bytes of their description.
    """
    described = torch.load(
        io.BytesIO(bytes(memoryview(memory)[size : size + length])), weights_only=True
    )
    specs = [TensorSpec(*plain) for plain in described["spots"]]
    found = [
        spec.view(memory).clone()
        if clone == "all" or (clone == "host" and spec.on_host)
        else spec.view(memory)
        for spec in specs
    ]
    state: State = put_together(described["tree"], found)
    return state


def check_room(need: int, left: int) -> None:
    """Raise NoRoom if a slot of `need` bytes takes too much of `left` bytes of free memory."""
    if need > MAX_SLOT * left:
        raise NoRoom(
            f"a state takes {need / 2**20:.0f} MiB, and {left / 2**20:.0f} MiB of memory are free"
        )


class SnapshotBuffer:
    """The slots of one rank."""

    def __init__(self, descriptor: int, device: Device | None = None) -> None:
        """Open the memory of a rank. `device`: that of the states that are written.

        None: this process only reads, or writes from a CPU.
        """
        self._descriptor = descriptor
        self._device = device or HostDevice()
        self._page = mmap.mmap(descriptor, PAGE)
        self._maps: dict[int, tuple[tuple[int, int], mmap.mmap]] = {}
        self._views: dict[int, tuple[list[TensorSpec], list[torch.Tensor]]] = {}
        self._page_locked: dict[int, torch.Tensor | None] = {}
        """The memory of each slot (PAGE_ITSELF: the first page); None: page-locking it failed."""
        self._copies_end: Mark | None = None
        """The end of the copies that may not be done yet."""

    @property
    def steps(self) -> dict[int, int]:
        """The slot of each complete step."""
        return complete_slots(self._page)

    @property
    def locked_slot(self) -> int:
        """The slot that is being written to the disk, -1 for none."""
        return read_words(self._page, LOCK, 1)[0]

    def lock(self, slot: int) -> None:
        """Do not overwrite this slot until the fork server unlocks it, once it is on the disk."""
        write_words(self._page, LOCK, slot)

    def fill_request(self, slot: int, request: SaveRequest, snapshot: int = -1) -> None:
        """Put a request into its slot. NoRoom as in `write`.

        `snapshot`: the slot with the rest of its state.
        """
        self.fill(slot, request.step, {"request": vars(request), "snapshot": snapshot})

    def request_save(self, request: SaveRequest, snapshot: int = -1) -> None:
        """Request a checkpoint, and lock its state until it is on the disk.

        NoRoom as in `write`.
        """
        self.settle()
        self.fill_request(SAVE_SLOT, request, snapshot)
        self.settle()
        self.lock(SAVE_SLOT if snapshot < 0 else snapshot)

    def room_while_saving(self) -> bool:
        """Report whether the next states have memory, while one is being written to the disk.

        If so, they keep it.
        """
        locked = self.locked_slot
        if locked < 0:
            return True
        count = SLOTS - 1 if isinstance(self._device, HostDevice) else SLOTS
        slots, size = {*range(count)} - {*self.steps.values()}, self.size(locked)
        need, left = sum(size), cgroup.memory_left()
        try:
            for slot in slots:
                if need > self._room(slot):
                    check_room(need, left)
                    left -= need  # the memory is taken only when the slot is filled
            for slot in slots:
                self._open(slot, *size, False)
        except NoRoom:
            return False
        return True

    def keep_to_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Put a state where the writer of the node finds it. NoRoom as in `write`.

        The writer must not be writing the previous one.
        """
        self.settle()
        self.fill(SAVE_SLOT, step, state)
        self.settle()

    def read_request(self, slot: int, snapshot: int | None = None) -> SaveRequest:
        """Return the request of a slot, its state completed by that of a snapshot.

        `snapshot`: its slot; None: the one that the request names. The tensors of the state are the
        memory itself.
        """
        kept = self.read(slot, clone="none")
        request = SaveRequest(**kept["request"])
        snapshot = kept["snapshot"] if snapshot is None else snapshot
        whole = self.read(snapshot, clone="none") if snapshot >= 0 else {}
        whole.pop("own", None)
        return replace(request, state={**whole, **request.state})

    @property
    def fit(self) -> int:
        """The number of the raydist.fit in its job whose states these are; 0: none."""
        return read_words(self._page, FIT, 1)[0]

    def begin_fit(self, number: int) -> None:
        """Begin the states of this raydist.fit, and drop those of the previous one.

        The previous ones are already on the disk.
        """
        if self.fit != number:
            self.forget_after(-1)
            write_words(self._page, FIT, number)

    @property
    def replicas(self) -> dict[int, int]:
        """The slot of each step of another rank of which this memory has a copy."""
        return complete_slots(self._page, REPLICA_SLOTS)

    def open_replica(self, size: int, length: int) -> int:
        """Open a slot for such a copy; `size` and `length` as in `unpack`. NoRoom as in `write`."""
        slot = REPLICA_SLOTS[
            max(self.replicas.items(), default=(-1, REPLICA_SLOTS[-1]))[1] == REPLICA_SLOTS[0]
        ]
        self._open(slot, size, length, False)
        return slot

    def open_own(self, size: int, length: int) -> int:
        """Open a slot for a state of this rank that another rank sends back."""
        slot = next(free for free in range(SLOTS) if free not in self.steps.values())
        self._open(slot, size, length, False)
        return slot

    def complete(self, slot: int, step: int) -> None:
        """Mark an opened slot as complete."""
        write_words(self._page, at_slot(slot), step)

    def size(self, slot: int) -> tuple[int, int]:
        """Return the bytes of a slot's tensors, and of their description."""
        _, _, _, size, length, _ = read_words(self._page, at_slot(slot), SLOT_WORDS)
        return size, length

    def raw(self, slot: int) -> torch.Tensor:
        """Return the used bytes of a slot, without a copy."""
        return torch.frombuffer(self.bytes_of(slot), dtype=torch.uint8, count=sum(self.size(slot)))

    def forget_after(self, step: int) -> None:
        """Drop the states of later steps: an earlier attempt made them, this one makes new ones."""
        self.settle()
        for later, slot in [*self.steps.items(), *self.replicas.items()]:
            if later > step:
                write_words(self._page, at_slot(slot), -1)

    def write(
        self, step: int, state: Mapping[str, Any], agreed: bool = False, alongside: bool = False
    ) -> int:
        """Keep the state of a step; return its slot. NoRoom: the machine has too little memory.

        Copies from a GPU run while the rank continues; the slot is complete after `settle`.
        `agreed`: all ranks know that all of them have the newest state, so that one complete state
        is enough while the next is copied. `alongside`: copies from a GPU run while the GPU
        continues too; `catch_up` must come before anything that changes the state.
        """
        self.settle()
        tensors: list[torch.Tensor] = []
        take_apart(state, tensors)
        keep = 2 if not agreed and any(map(self._device.lags, tensors)) else 1
        taken = {slot for _, slot in sorted(self.steps.items())[-keep:]} | {self.locked_slot}
        slot = next(free for free in range(SLOTS) if free not in taken)
        self.fill(slot, step, state, alongside)
        return slot

    def fill(self, slot: int, step: int, state: Mapping[str, Any], alongside: bool = False) -> None:
        """Write a state to this slot; `alongside` as in `write`."""
        tensors: list[torch.Tensor] = []
        tree = take_apart(state, tensors)
        spots, size = layout_of(tensors, self._device.lags)
        described = io.BytesIO()
        torch.save({"tree": tree, "spots": [spot.plain for spot in spots]}, described)
        text = described.getvalue()
        memory = self._open(slot, size, len(text), set(state) != {"own"})
        lags = any(map(self._device.lags, tensors))
        if lags:
            self._page_lock(PAGE_ITSELF, self._page)
            self._page_lock(slot, memory)
        memory[size : size + len(text)] = text
        views = self._tensors_of(slot, memory, spots)
        pairs = [(view, each.detach()) for view, each in zip(views, tensors, strict=True)]
        if not lags:
            for view, tensor in pairs:
                view.copy_(tensor)
            write_words(self._page, at_slot(slot), step)
            return
        word = torch.frombuffer(self._page, dtype=torch.int64, count=1, offset=at_slot(slot))
        self._copies_end = self._device.copy_state(pairs, word, step)
        if not alongside:
            self.catch_up()

    def catch_up(self) -> None:
        """Have a GPU finish its copies before anything that is queued from now on."""
        self._device.catch_up()

    def rest(self, within_s: float = math.inf) -> bool:
        """Wait until the locked slot is on the disk; report whether it is."""
        until = time.monotonic() + within_s
        while self.locked_slot >= 0 and time.monotonic() < until:
            time.sleep(0.001)
        return self.locked_slot < 0

    def drop(self) -> None:
        """Free the memory with all its slots; none may be locked."""
        self.free(ALL_SLOTS)
        os.ftruncate(self._descriptor, PAGE)

    def free(self, slots: Iterable[int] = (*range(SLOTS), *REPLICA_SLOTS)) -> None:
        """Free the memory of these slots, by default of all states; none of them may be locked."""
        self.settle()
        for slot in slots:
            _, begin, room, *_ = read_words(self._page, at_slot(slot), SLOT_WORDS)
            write_words(self._page, at_slot(slot), -1, 0, 0, 0, 0, 0)
            self._give_back(slot, begin, room)

    def settle(self) -> None:
        """Wait until the GPU has made its copies, and has marked their slot as complete."""
        if self._copies_end is not None:
            self._copies_end.wait()
            self._copies_end = None

    def offers(self) -> list[tuple[int, int, int, int]]:
        """Return the states, newest first: step, whole or not, bytes of description, of tensors."""
        found = sorted(self.steps.items(), reverse=True)
        rows = [
            (step, *read_words(self._page, at_slot(slot), SLOT_WORDS)[3:]) for step, slot in found
        ]
        return [(step, whole, text, tensors) for step, tensors, text, whole in rows]

    def read(self, slot: int, clone: Cloned = "all") -> State:
        """Return the state of a slot."""
        _, _, _, size, length, _ = read_words(self._page, at_slot(slot), SLOT_WORDS)
        return unpack(self.bytes_of(slot), size, length, clone)

    def bytes_of(self, slot: int) -> mmap.mmap:
        """Return the bytes of a slot, without a copy."""
        _, begin, room, *_ = read_words(self._page, at_slot(slot), SLOT_WORDS)
        return self._map(slot, begin, room)

    def _open(self, slot: int, size: int, length: int, whole: bool) -> mmap.mmap:
        """Remove a slot's step from the page, and make it large enough; return its bytes."""
        _, begin, room, *_ = read_words(self._page, at_slot(slot), SLOT_WORDS)
        write_words(self._page, at_slot(slot), -1)
        if (need := size + length) > room:
            check_room(need, cgroup.memory_left())
            self._give_back(slot, begin, room)
            room = -(-(need + SLACK) // PAGE) * PAGE
            with GROWING:
                begin = os.fstat(self._descriptor).st_size
                self._grow(begin + room)
        write_words(self._page, at_slot(slot), -1, begin, room, size, length, whole)
        return self._map(slot, begin, room)

    def _room(self, slot: int) -> int:
        """Return the bytes that a slot may have where it is."""
        return read_words(self._page, at_slot(slot), SLOT_WORDS)[2]

    def _grow(self, size: int) -> None:
        """Make the file larger. NoRoom: this process may not have such a large file."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise NoRoom(
                f"the states take {size / 2**20:.1f} MiB, and a file may have "
                f"{limit / 2**20:.1f} MiB (ulimit -f)"
            ) from error

    def _map(self, slot: int, begin: int, room: int) -> mmap.mmap:
        """Return the bytes of a slot."""
        known = self._maps.get(slot)
        if known is None or known[0] != (begin, room):
            self._unmap(slot)
            known = self._maps[slot] = (
                (begin, room),
                mmap.mmap(self._descriptor, room, offset=begin),
            )
        return known[1]

    def _give_back(self, slot: int, begin: int, room: int) -> None:
        """Free the memory of a range of the file, which is never used again."""
        if room:
            self._map(slot, begin, room).madvise(mmap.MADV_REMOVE)
        self._unmap(slot)

    def _unmap(self, slot: int) -> None:
        if (memory := self._page_locked.pop(slot, None)) is not None:
            self._device.unregister(memory)
        self._views.pop(slot, None)
        self._maps.pop(slot, None)

    def _page_lock(self, slot: int, memory: mmap.mmap) -> None:
        """Page-lock the memory that a GPU copies to, so that a copy does not block the rank."""
        if slot not in self._page_locked:
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            self._page_locked[slot] = flat if self._device.register(flat) else None

    def _tensors_of(
        self, slot: int, memory: mmap.mmap, spots: list[TensorSpec]
    ) -> list[torch.Tensor]:
        known = self._views.get(slot)
        if known is None or known[0] != spots:
            known = self._views[slot] = spots, [spot.view(memory) for spot in spots]
        return known[1]


def cloned(value: Any) -> Any:
    """Return the value with copies of its tensors."""
    return value.clone() if isinstance(value, torch.Tensor) else rebuilt(value, cloned)


def layout_of(
    tensors: Sequence[torch.Tensor], lags: Callable[[torch.Tensor], bool] = lambda tensor: False
) -> tuple[list[TensorSpec], int]:
    """Return a spec for each tensor, and the bytes of all tensors.

    A tensor keeps its own strides if they leave no gaps. `lags`: whether a tensor is on a device.
    """
    spots, end = [], 0
    for tensor in tensors:
        dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        spots.append(
            TensorSpec(tensor.dtype, tuple(tensor.shape), tuple(stride), end, not lags(tensor))
        )
        end += -(-tensor.numel() * tensor.dtype.itemsize // ALIGN) * ALIGN
    return spots, end


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value with a marker in place of each tensor; append the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {TENSOR: len(tensors) - 1}
    return rebuilt(value, lambda inner: take_apart(inner, tensors))


def put_together(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Reverse `take_apart`."""
    if type(tree) is dict and TENSOR in tree:
        return tensors[tree[TENSOR]]
    return rebuilt(tree, lambda inner: put_together(inner, tensors))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with `change` applied to each item; other values unchanged."""
    if type(value) in (dict, OrderedDict):
        made = type(value)((key, change(inner)) for key, inner in value.items())
        if type(value) is OrderedDict:
            made.__dict__.update(value.__dict__)  # the versions of a state_dict's modules
        return made
    if type(value) in (list, tuple):
        return type(value)(change(inner) for inner in value)
    return value
