"""Checkpoints: written whole or not at all, checked before they are trusted, loaded without running code. (either side)

    RUN_DIR/checkpoints/step-00000120/state.pt     torch.save of the state
                                      meta.json    step, world size, metrics, size and checksum of each file

A checkpoint is complete when its meta.json can be read and all it names is there, in that size and with that checksum.
Only rank 0 writes; nothing here is a collective, and nothing here but `save` and `load` needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

from raydist import context
from raydist.config import Checkpoint
from raydist.direct import DirectFile
from raydist.errors import ConfigError

STATE, META = "state.pt", "meta.json"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
Warn = Callable[[str], None]


def _silent(text: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.meta["metrics"])

    @cached_property
    def state(self) -> dict[str, Any]:
        """What was saved, on the CPU; read when it is first asked for."""
        return load(self.path)

    def random(self, rank: int, world_size: int) -> Any:
        """The generators of a rank, a tensor; None if it was saved by another number of ranks."""
        drawn = self.state["random"]
        return drawn[rank] if len(drawn) == world_size else None


def save(
    step: int,
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
    settings: Checkpoint | None = None,
    *,
    wait: bool = False,
) -> Path | None:
    """Save a state (tensors, numbers, text, and lists and dicts of them) and drop what is not to be kept any more.

    Rank 0 gives the path; other ranks write nothing and give None. Over Ray a job's state is copied in memory, and gets
    to the disk while the training goes on: the next `save` and the end of the job wait for it. With `wait` it is on the
    disk when this returns. `settings`: keep and best; those of the run.
    """
    here = context.here()
    if here.rank.rank != 0:
        return None
    context.phase("save")
    began, folder = time.perf_counter(), here.rank.run_dir / "checkpoints"
    kept, facts = settings or here.checkpoint, {"world_size": here.rank.world_size, "metrics": dict(metrics or {})}
    settle()
    if not wait and handed_over(step, state, facts, kept):
        return folder / f"step-{step:08d}"
    path = write(folder, step, state, facts)
    prune(folder, kept)
    context.tell("saved", step=step, path=str(path), s=time.perf_counter() - began)
    return path


def handed_over(step: int, state: Mapping[str, Any], facts: Mapping[str, Any], kept: Checkpoint) -> bool:
    """Whether another process has taken it on to write this state."""
    here = context.here()
    if here.memory is None or here.comm is None:
        return False
    from raydist import snapshot

    if why := next(_unloadable(state, "state"), None):
        raise TypeError(why)
    run = {"run_dir": str(here.rank.run_dir), "keep": kept.keep, "best": kept.best}
    return snapshot.hand_over(step, dict(state), {"facts": facts, **run})


def settle() -> None:
    """Wait until what this node's first rank saves is on the disk."""
    here = context.here()
    if here.memory is not None and here.memory[1] >= 0 and here.comm is not None:
        from raydist.snapshot import Memory

        Memory(here.memory[1]).rest()


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Tensors and plain data only: a pickle that would run code is refused."""
    import torch

    state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=True)
    return state


def latest() -> Saved | None:
    """What to go on from, or None for a fresh start: what `resume` said (RAYDIST_RESUME), else this run's newest."""
    named = os.environ.get("RAYDIST_RESUME")
    if named is None:
        return newest(context.rank().run_dir / "checkpoints", lambda text: context.tell("warning", text=text))
    return Saved(Path(named), _meta(Path(named))) if named else None


def resumed_step() -> int:
    """The step of what `latest` would give, by its name alone; 0 for a fresh start."""
    name = Path(os.environ.get("RAYDIST_RESUME", "")).name
    return int(name[5:]) if name.startswith("step-") else 0


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that can be seen, complete or not; -1 without one."""
    return max((int(path.name[5:]) for path in _paths(folder)), default=-1)


def newest(folder: Path, warn: Warn = _silent) -> Saved | None:
    """The newest complete checkpoint in a folder; says which ones it had to pass over, and why."""
    for path in reversed(_paths(folder)):
        try:
            return examine(path)
        except Flaw as why:
            warn(f"checkpoint {path} is passed over: {why}")
    return None


def find(resume: str, run_dir: Path, warn: Warn = _silent) -> Path | None:
    """The checkpoint that `resume=` means for a run in `run_dir`; None: start afresh.

    auto: the newest complete one of this run folder, else of the newest run folder beside it that has one.
    A path: a checkpoint, or a run folder; ConfigError if nothing complete is there.
    """
    if resume == "none":
        return None
    if resume != "auto":
        return _named(Path(resume).expanduser().absolute(), warn)
    beside = sorted((run for run in run_dir.parent.glob("*") if run != run_dir), key=lambda run: run.name, reverse=True)
    for run in (run_dir, *beside):
        if found := newest(run / "checkpoints", warn):
            return found.path.absolute()
    return None


def _named(path: Path, warn: Warn) -> Path:
    if (path / META).exists() or (path / STATE).exists():
        try:
            return examine(path).path
        except Flaw as why:
            found = newest(path.parent, warn)
            say = f"; say resume={found.path}" if found else ""
            raise ConfigError(f"resume={path}: that checkpoint is not complete: {why}{say}") from why
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if found := newest(folder, warn):
        return found.path
    there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
    seen = f"it holds {', '.join(there[:8]) or 'nothing'}" if there is not None else "there is no such folder"
    raise ConfigError(
        f"resume={path}: no complete checkpoint there ({seen}); say resume=RUN_FOLDER (with checkpoints/ in it), "
        "resume=RUN_FOLDER/checkpoints/step-…, resume=auto or resume=none"
    )


class Flaw(Exception):
    """Why a checkpoint is not complete."""


def examine(path: Path) -> Saved:
    """A checkpoint, after reading all of it; Flaw if it is not complete."""
    try:
        meta = _meta(path)
        expected = [(path / name, int(facts["bytes"]), facts["sha256"]) for name, facts in meta["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Flaw(f"{META} can't be read ({type(error).__name__}: {error})") from error
    for file, size, checksum in expected:
        if not file.is_file():
            raise Flaw(f"{file.name} is missing")
        if file.stat().st_size != size:
            raise Flaw(f"{file.name} has {file.stat().st_size} bytes instead of {size}")
        if _checksum(file) != checksum:
            raise Flaw(f"{file.name} has another checksum than when it was written")
    return Saved(path, meta)


def prune(folder: Path, settings: Checkpoint) -> None:
    """Drop all but the newest `keep` and the best one, and what killed writers left behind."""
    paths = _paths(folder)
    kept = {*paths[-settings.keep :], best(folder, settings.best)}
    for path in paths:
        if path not in kept:
            # Out of sight first: a reader must never meet half a checkpoint.
            shutil.rmtree(path.rename(folder / f".dropped-{path.name}"), ignore_errors=True)
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def best(folder: Path, rule: str | None) -> Path | None:
    """The checkpoint with the best value by `max:METRIC` or `min:METRIC`; of equal ones the newest."""
    if rule is None:
        return None
    mode, _, metric = rule.partition(":")
    sign = 1 if mode == "max" else -1
    scored = [(sign * value, path.name) for path in _paths(folder) if (value := _metric(path, metric)) is not None]
    return folder / max(scored)[1] if scored else None


def _metric(path: Path, name: str) -> float | None:
    try:
        value = _meta(path)["metrics"].get(name)
    except (OSError, ValueError, KeyError):
        return None
    return value if isinstance(value, int | float) and value == value else None


def _paths(folder: Path) -> list[Path]:
    """All checkpoints that can be seen, oldest first."""
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdigit()), key=lambda p: int(p.name[5:]))


def _meta(path: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
    return meta


def write(folder: Path, step: int, state: Mapping[str, Any], facts: dict[str, Any]) -> Path:
    """Write beside, sync, rename: at every moment a reader sees a whole checkpoint or none.

    `facts`: what meta.json says beside the step: world_size, metrics.
    """
    import torch

    if why := next(_unloadable(state, "state"), None):
        raise TypeError(why)
    path = folder / f"step-{step:08d}"
    beside = folder / f".{path.name}-{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        file = _put(dict(state), beside / STATE)
        meta = {"step": step, **facts, "time": time.time(), "torch": torch.__version__, "files": {STATE: file}}
        (beside / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for synced in (beside / META, beside):
            _sync(synced)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)  # a full disk needs the room
        raise
    if path.exists():
        path.rename(folder / f".replaced-{path.name}-{os.getpid()}")
    beside.rename(path)
    _sync(folder)
    return path


def _put(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Bring a state to the disk; what meta.json says of its file."""
    import torch

    with closing(DirectFile(path)) as file:
        torch.save(state, cast("IO[bytes]", file))
        file.end()
    return {"bytes": file.bytes, "sha256": file.sha256}


def _unloadable(value: Any, where: str) -> Iterator[str]:
    """What torch.load(weights_only=True) would refuse: found when it is saved, not when it is needed."""
    import torch

    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, inner in value.items():
            yield from _unloadable(inner, f"{where}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, inner in enumerate(value):
            yield from _unloadable(inner, f"{where}[{index}]")
    # By exact type: numpy's float64 is a float too, and is refused when it is loaded.
    elif kind not in PLAIN and not isinstance(value, torch.Tensor | torch.dtype | torch.device):
        yield (
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which can't be loaded without running code: save "
            "tensors, numbers, text, and lists and dicts of them (torch.as_tensor(…), float(…), .state_dict())"
        )


def _checksum(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total.update(block)
    return total.hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
