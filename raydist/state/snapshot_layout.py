"""The first page of a snapshot memory: its slots, and what each of them holds. (either side)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Sequence

State = dict[str, Any]
"""A state dict: tensors, numbers and text, in dicts and lists."""

PAGE = 4096
"""Bytes of the first page of a rank's snapshot memory; slots begin at multiples of it."""

SLOTS = 4
"""Two slots for states that take turns, a third where a GPU is still copying one, and a fourth
while one of them is being written to the disk."""

LAST_SLOT = SLOTS
"""A SaveRequest for the last state of an attempt: everything but what the newest snapshot holds."""

SAVE_SLOT = LAST_SLOT + 1
"""The SaveRequest that is being written now, with all of its state, or with what a snapshot lacks.
For a sharded state, the part of this rank."""

REPLICA_SLOTS = (SAVE_SLOT + 1, SAVE_SLOT + 2)
"""The slots for copies of the states of a rank on another node; they take turns too."""

ALL_SLOTS = range(REPLICA_SLOTS[-1] + 1)

WORD = 8
"""Bytes of each number on the page. The first is the slot that is being written to the disk, or
-1."""
LOCK = 0
"""The offset of that number."""
SLOT_WORDS = 6
"""Numbers per slot, which follow: step (-1: not complete), offset in the file, size in bytes, bytes
used by tensors, bytes used by their description, and whether it holds a whole state (1) or only
a rank's own part (0)."""


FIT = WORD * (1 + SLOT_WORDS * len(ALL_SLOTS))
"""The offset of the number of the raydist.fit whose states these are; 0: none."""


def at_slot(slot: int) -> int:
    """Return the offset on the page of the description of a slot."""
    return WORD * (1 + slot * SLOT_WORDS)


def write_words(page: bytearray | mmap.mmap, offset: int, *words: int) -> None:
    """Write numbers to the page, each by one store of the processor.

    struct.pack_into sets all bytes to 0 first: a process that is killed meanwhile would leave a
    step 0 that does not exist.
    """
    view = memoryview(page).cast("q")
    for place, word in enumerate(words, offset // WORD):
        view[place] = word


def read_words(page: bytes | mmap.mmap, offset: int, count: int) -> list[int]:
    """Read numbers of the page, each by one load."""
    return memoryview(page)[offset : offset + WORD * count].cast("q").tolist()


def blank_page() -> bytes:
    """Return the first page of an empty memory."""
    page = bytearray(PAGE)
    write_words(page, LOCK, -1)
    for slot in ALL_SLOTS:
        write_words(page, at_slot(slot), -1)
    return bytes(page)


def complete_slots(page: bytes | mmap.mmap, slots: Iterable[int] = range(SLOTS)) -> dict[int, int]:
    """Return the slot of each complete step."""
    steps = {read_words(page, at_slot(slot), 1)[0]: slot for slot in slots}
    return {step: slot for step, slot in steps.items() if step >= 0}


def whole_slots(page: bytes | mmap.mmap) -> dict[int, int]:
    """Return the slots that hold a whole state, not only a rank's own part."""
    complete = complete_slots(page).items()
    return {
        step: slot for step, slot in complete if read_words(page, at_slot(slot), SLOT_WORDS)[-1]
    }


def common_steps(pages: Sequence[bytes | mmap.mmap]) -> set[int]:
    """Return the steps of whole states of which all of these memories have a part.

    `pages`: as in `last_whole_step`.
    """
    steps = set(whole_slots(pages[0])) if pages else set()
    return steps.intersection(*map(complete_slots, pages))


def last_whole_step(pages: Sequence[bytes | mmap.mmap]) -> int:
    """Return the step of the whole state to save last; -1: there is none.

    `pages`: the first pages of the memories of a node's ranks; the first one has the whole states.
    Ranks that are stopped at the same moment may be one kept step apart. The state of a step that
    some ranks lack has no random generators of theirs, so it would not resume exactly: of the kept
    steps it is the one that most ranks have, and the newest of these.
    """
    of_ranks = [complete_slots(page) for page in pages]
    whole = whole_slots(pages[0]) if pages else {}
    return max(whole, key=lambda step: (sum(step in each for each in of_ranks), step), default=-1)
