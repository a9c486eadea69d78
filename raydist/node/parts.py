"""The parts of a sharded state on the disk, when their run can't go on: each node writes those that it has. (actor)

All of it happens in a child of the fork server, one question of the driver (rescue.py) at a time: `look`, `write`,
`commit` or `drop`. The answer is an event, which goes no further than the driver.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import checkpoint
from raydist.config import Checkpoint
from raydist.storage import Place
from raydist.writing import META, complete, described, part_name, sizes, write_file

if TYPE_CHECKING:
    from raydist.snapshot import Memory

Descriptors = Mapping[int, int]
"""The memories of a run on this node, by local rank."""
Answer = dict[str, Any]
AT_ONCE = 4
"""Files that a node writes at a time: one thread does not hash as fast as disks write."""


def act(descriptors: Descriptors, folder: Place, ask: Mapping[str, Any]) -> Answer:
    """Do what the driver asks for. `folder`: where the checkpoints of the run are, as this node sees it."""
    if ask["do"] == "look":
        return look(descriptors, folder)
    began, (step, mark) = time.perf_counter(), (ask["step"], ask["mark"])
    beside = folder / (f".step-{step:08d}-{mark}" if isinstance(folder, Path) else f"step-{step:08d}")
    if ask["do"] == "write":
        return {"kind": "written", "files": write(descriptors, beside, step, ask["ranks"])}
    if ask["do"] == "drop":
        drop(beside)
        return {"kind": "dropped"}
    files, there = ask["files"], sizes(beside)
    if missing := [name for name, facts in files.items() if there.get(name) != facts["bytes"]]:
        return {"kind": "unseen", "files": missing, "folder": str(folder)}
    facts = described(step, {"world_size": len(files), "parts": len(files), "metrics": {}})
    path = complete(beside, folder / f"step-{step:08d}", {**facts, "files": dict(files)})
    checkpoint.prune(folder, Checkpoint(keep=ask["keep"], best=ask["best"]))
    return {"kind": "saved", "rank": 0, "step": step, "path": str(path), "s": time.perf_counter() - began}


def look(descriptors: Descriptors, folder: Place) -> Answer:
    """Which parts are here, each as [rank, of so many, step], and the step of the newest checkpoint in the folder."""
    own, copies = list[list[int]](), list[list[int]]()
    for _, step, of, copied in parts(descriptors):
        (copies if copied else own).append([*of, step])
    return {"kind": "parts", "own": own, "copies": copies, "disk": checkpoint.newest_step(folder)}


def parts(descriptors: Descriptors) -> Iterator[tuple[Any, int, list[int], bool]]:
    """Each part that is here: what it holds, of which step, of whom ([rank, of so many]), and whether it is a copy.

    Its tensors are the memory itself.
    """
    from raydist.snapshot import Memory

    def of(memory: Memory, slots: Mapping[int, int], copied: bool) -> Iterator[tuple[Any, int, list[int], bool]]:
        for step, slot in slots.items():
            own = memory.read(slot, clone=False).get("own", {})
            if "of" in own:
                yield own["part"], step, own["of"], copied

    memories = [Memory(descriptor) for _, descriptor in sorted(descriptors.items())]
    for memory in memories:
        yield from of(memory, memory.steps, copied=False)
    for memory in memories:
        yield from of(memory, memory.guests, copied=True)


def write(descriptors: Descriptors, beside: Place, step: int, ranks: list[list[int]]) -> dict[str, Any]:
    """Write the parts of these ranks ([rank, of so many]); by file its bytes and its checksum."""
    here = {tuple(of): part for part, at, of, _ in reversed(list(parts(descriptors))) if at == step}
    wanted = {part_name(rank): here[rank, world] for rank, world in ranks}
    if not isinstance(beside, Path):
        (beside / META).drop()  # what was there of this step is none any more
    else:
        beside.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(lambda name: write_file(beside / name, wanted[name]), wanted), strict=True))


def drop(beside: Place) -> None:
    """Remove what was written: it has not become a checkpoint."""
    if isinstance(beside, Path):
        shutil.rmtree(beside, ignore_errors=True)
    else:
        beside.drop()
