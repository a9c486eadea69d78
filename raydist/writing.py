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


def write(folder: Place, step: int, state: Mapping[str, Any], facts: dict[str, Any]) -> Place:
    """Write a checkpoint: at every moment a reader sees a whole one or none.

    `facts`: what meta.json says beside the step: world_size, metrics.
    """
    import torch

    if why := next(unloadable(state, "state"), None):
        raise TypeError(why)
    path = folder / f"step-{step:08d}"
    facts = {"step": step, **facts, "time": time.time(), "torch": torch.__version__}
    if isinstance(path, Remote):
        _upload(path, state, facts)
    else:
        _write(path, state, facts)
    return path


def _write(path: Path, state: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """Write beside, sync, rename."""
    import torch

    folder = path.parent
    beside = folder / f".{path.name}-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with closing(DirectFile(beside / STATE)) as file:
            torch.save(dict(state), cast("Any", file))
            file.end()
        told = {"bytes": file.bytes, "xxh3_128": file.checksum}
        (beside / META).write_text(json.dumps({**facts, "files": {STATE: told}}, indent=1), encoding="utf-8")
        for synced in (beside / META, beside):
            _sync(synced)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the room
        raise
    if path.exists():
        path.rename(folder / f".replaced-{path.name}-{os.getpid()}")
    beside.rename(path)
    _sync(folder)


def _upload(path: Remote, state: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """The state as it is saved, with no copy of it on this machine's disk; meta.json last."""
    import torch

    (path / META).drop()
    with (path / STATE).writing() as file:
        through = Hashing(file)
        torch.save(dict(state), cast("Any", through))
    told = {"bytes": through.bytes, "xxh3_128": through.checksum}
    (path / META).write_text(json.dumps({**facts, "files": {STATE: told}}, indent=1))


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
