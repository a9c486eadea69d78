"""A checkpoint written: whole or not at all, of what can be loaded without running code. (either side)"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from raydist.direct import DirectFile
from raydist.storage import Hashing, Place, Remote

STATE, META = "state.pt", "meta.json"
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def part_name(rank: int) -> str:
    """The file with a rank's part of a sharded state."""
    return f"part-{rank:05d}.pt"


def write(folder: Place, step: int, state: Mapping[str, Any], facts: dict[str, Any]) -> Place:
    """Write a checkpoint: at every moment a reader sees a whole one or none.

    `facts`: what meta.json says beside the step: world_size, metrics.
    """
    if why := next(unloadable(state, "state"), None):
        raise TypeError(why)
    path, facts = folder / f"step-{step:08d}", described(step, facts)
    if isinstance(path, Remote):
        _upload(path, state, facts)
    else:
        _write(path, state, facts)
    return path


def _write(path: Path, state: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """Write beside, sync, rename."""
    folder = path.parent
    beside = folder / f".{path.name}-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        complete(beside, path, {**facts, "files": {STATE: write_file(beside / STATE, dict(state))}})
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the room
        raise


def _upload(path: Remote, state: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """meta.json goes first, and comes last."""
    (path / META).drop()
    complete(path, path, {**facts, "files": {STATE: write_file(path / STATE, dict(state))}})


def described(step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What meta.json says, but for the files."""
    import torch

    return {"step": step, **facts, "time": time.time(), "torch": torch.__version__}


def write_file(path: Place, content: Any) -> dict[str, Any]:
    """Write one file of a checkpoint, to a URL with no copy of it on this machine's disk; what meta.json says of it."""
    import torch

    if isinstance(path, Remote):
        with path.writing() as file:
            through = Hashing(file)
            torch.save(content, cast("Any", through))
        return _told(through)
    with closing(DirectFile(path)) as direct:
        torch.save(content, cast("Any", direct))
        direct.end()
    return _told(direct)


def _told(file: DirectFile | Hashing) -> dict[str, Any]:
    return {"bytes": file.bytes, "xxh3_128": file.checksum}


def sizes(folder: Place) -> dict[str, int]:
    """The files in it, each with its bytes."""
    if isinstance(folder, Remote):
        return folder.sizes()
    return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}


def complete(beside: Place, path: Place, facts: Mapping[str, Any]) -> Place:
    """Make a checkpoint of the files that lie `beside` it (at a URL: in it), now that they are all there."""
    (beside / META).write_text(json.dumps(facts, indent=1))
    if isinstance(beside, Path) and isinstance(path, Path):
        for synced in (beside / META, beside):
            _sync(synced)
        if path.exists():
            path.rename(path.parent / f".replaced-{path.name}-{os.getpid()}")
        beside.rename(path)
        _sync(path.parent)
    return path


def unloadable(value: Any, where: str) -> Iterator[str]:
    """What torch.load(weights_only=True) would refuse: found when it is saved, not when it is needed."""
    import torch

    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, inner in value.items():
            yield from unloadable(inner, f"{where}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, inner in enumerate(value):
            yield from unloadable(inner, f"{where}[{index}]")
    # By exact type: numpy's float64 is a float too, and is refused when it is loaded.
    elif kind not in PLAIN and not isinstance(value, torch.Tensor | torch.dtype | torch.device):
        yield (
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which can't be loaded without running code: save "
            "tensors, numbers, text, and lists and dicts of them (torch.as_tensor(…), float(…), .state_dict())"
        )


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
