"""Checkpoints: written whole or not at all, checked before they are trusted, loaded without running code. (either side)

    RUN_DIR/checkpoints/step-00000120/state.pt     torch.save of the state
                                      meta.json    step, world size, metrics, size and checksum of each file
                                      part-00003.pt    of each rank, in the place of state.pt: node/parts.py

A checkpoint is complete when its meta.json can be read and all it names is there, in that size and with that checksum.
With `storage=` the same lies below a folder or a URL: there meta.json comes last and goes first, and the checksum is
looked at when a node fetches the state. Nothing here is a collective, and nothing but `save` and `load` needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from raydist import context, storage
from raydist.config import Checkpoint
from raydist.errors import ConfigError, RaydistError
from raydist.storage import Place, Remote, place
from raydist.writing import META, STATE, sizes, unloadable, write

PAUSES_S = (1.0,)
"""Seconds between tries to write to a store that can't be reached. Its own driver tries again within each."""
QUIET_S = 60.0
"""Seconds after a failure in which a store is not tried again: the next checkpoint would wait half a minute for it."""
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Place
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def parts(self) -> int:
        """How many there are of a sharded state; 0 for a whole one."""
        return int(self.meta.get("parts", 0))

    def unlike(self, ranks: int) -> str:
        """Why so many ranks can't go on from it; empty if they can."""
        odd = self.parts not in (0, ranks)
        return f"it holds the parts of a sharded state of {self.parts} ranks, and this run has {ranks}" if odd else ""

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.meta["metrics"])

    @cached_property
    def state(self) -> dict[str, Any]:
        """What was saved, on the CPU; read when it is first asked for."""
        if self.parts:
            raise RaydistError(
                f"{self.path} holds the parts of a sharded state: load it by raydist.sharded.load(state)"
            )
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
) -> Place | None:
    """Save a state (tensors, numbers, text, and lists and dicts of them) and drop what is not to be kept any more.

    Rank 0 gives the path; other ranks write nothing and give None. Over Ray a job's state is copied in memory, and gets
    to the disk while the training goes on: the next `save` and the end of the job wait for it. With `wait` it is on the
    disk when this returns. `settings`: keep and best; those of the run.
    """
    here = context.here()
    if here.rank.rank != 0:
        return None
    context.phase("save")
    began, aside = time.perf_counter(), here.rank.run_dir / "checkpoints"
    kept, facts = settings or here.checkpoint, {"world_size": here.rank.world_size, "metrics": dict(metrics or {})}
    settle()
    if not wait and handed_over(step, state, facts, kept):
        return home() / f"step-{step:08d}"
    path, trouble = keep(home(), aside, step, state, facts, kept)
    if trouble:
        context.tell("warning", text=trouble)
    context.tell("saved", step=step, path=str(path), s=time.perf_counter() - began)
    return path


def home() -> Place:
    """Where the checkpoints of this run are."""
    named = os.environ.get("RAYDIST_CHECKPOINTS")
    return place(named) if named else context.rank().run_dir / "checkpoints"


def handed_over(step: int, state: Mapping[str, Any], facts: Mapping[str, Any], kept: Checkpoint) -> bool:
    """Whether another process has taken it on to write this state."""
    here = context.here()
    if here.memory is None or here.comm is None:
        return False
    from raydist import snapshot

    if why := next(unloadable(state, "state"), None):
        raise TypeError(why)
    where = {"run_dir": str(here.rank.run_dir), "checkpoints": str(home().absolute())}
    return snapshot.hand_over(step, dict(state), {"facts": facts, **where, "keep": kept.keep, "best": kept.best})


def settle() -> None:
    """Wait until what this node's first rank saves is on the disk."""
    here = context.here()
    if here.memory is not None and here.memory[1] >= 0 and here.comm is not None:
        from raydist.snapshot import Memory

        Memory(here.memory[1]).rest()


def load(path: Place, name: str = STATE) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU. Tensors and plain data only: a pickle that would run code is refused."""
    import torch

    with _on_this_machine(path, name) as file:
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


@contextmanager
def _on_this_machine(path: Place, name: str) -> Iterator[Path]:
    """The file of the state; of a URL a copy, one for all ranks of a node where they have a folder in common."""
    if isinstance(path, Path):
        yield path / name
        return
    checksum = _meta(path)["files"][name]["xxh3_128"]
    if shared := os.environ.get("RAYDIST_SCRATCH"):
        yield (path / name).fetch(Path(shared) / f"{checksum}.pt", checksum)
        return
    with tempfile.TemporaryDirectory(prefix="raydist-") as own:
        yield (path / name).fetch(Path(own) / name, checksum)


def latest() -> Saved | None:
    """What to go on from, or None for a fresh start: what `resume` said (RAYDIST_RESUME), else this run's newest."""
    named = os.environ.get("RAYDIST_RESUME")
    if named is None:
        return newest(home(), lambda text: context.tell("warning", text=text))
    return saved_at(place(named)) if named else None


def saved_at(path: Place) -> Saved:
    """The checkpoint that is there, taken for complete."""
    return Saved(path, _meta(path))


def resumed_step() -> int:
    """The step of what `latest` would give, by its name alone; 0 for a fresh start."""
    name = Path(os.environ.get("RAYDIST_RESUME", "")).name
    return int(name[5:]) if name.startswith("step-") else 0


def newest_step(folder: Place) -> int:
    """The step of the newest checkpoint that can be seen, complete or not; -1 without one."""
    return max((int(path.name[5:]) for path in _paths(folder)), default=-1)


def newest(folder: Place, warn: Warn = lambda text: None, ranks: int = 0) -> Saved | None:
    """The newest complete checkpoint in a folder (that so many `ranks` can go on from); tells what it passed over."""
    for path in reversed(_paths(folder)):
        try:
            found = examine(path)
            if ranks and (why_not := found.unlike(ranks)):
                raise Flaw(why_not)
            return found
        except Flaw as why:
            warn(f"checkpoint {path} is passed over: {why}")
    return None


def find(resume: str, run_dir: Place, warn: Warn = lambda text: None) -> Place | None:
    """The checkpoint that `resume=` means for a run in `run_dir`; None: start afresh.

    auto: the newest complete one of this run folder, else of the newest run folder beside it that has one.
    A path or URL: a checkpoint, or a run folder; ConfigError if nothing complete is there.
    """
    if resume == "none":
        return None
    if resume != "auto":
        return _named(place(resume), warn)
    beside = sorted((run for run in run_dir.parent.glob("*") if run != run_dir), key=lambda run: run.name, reverse=True)
    for run in (run_dir, *beside):
        if found := newest(run / "checkpoints", warn):
            return found.path.absolute()
    return None


def _named(path: Place, warn: Warn) -> Place:
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


def examine(path: Place) -> Saved:
    """A checkpoint, after reading all of it (of a URL only what it has); Flaw if it is not complete."""
    try:
        meta = _meta(path)
        expected = [(name, int(facts["bytes"]), facts["xxh3_128"]) for name, facts in meta["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Flaw(f"{META} can't be read ({type(error).__name__}: {error})") from error
    there = sizes(path)
    for name, size, checksum in expected:
        if name not in there:
            raise Flaw(f"{name} is missing")
        if there[name] != size:
            raise Flaw(f"{name} has {there[name]} bytes instead of {size}")
        if isinstance(path, Path) and storage.hashed(path / name) != checksum:
            raise Flaw(f"{name} has another checksum than when it was written")
    return Saved(path, meta)


def keep(
    folder: Place, aside: Path, step: int, state: Mapping[str, Any], facts: dict[str, Any], settings: Checkpoint
) -> tuple[Place, str]:
    """Write a checkpoint and prune; its path, and what there is to warn of.

    A store that can't be reached is tried again; then the state goes to `aside`, on this machine, and is not lost.
    """
    if isinstance(folder, Path):
        path: Place = write(folder, step, state, facts)
        prune(folder, settings)
        return path, ""
    failed = aside.parent / ".storage-failed"
    if why := _try_store(folder, step, state, facts, failed):
        path, _ = keep(aside, aside, step, state, facts, settings)
        return path, (
            f"the checkpoint of step {step} could not be written to {folder} ({why}): it is in {path} on "
            f"{socket.gethostname()}, and what was saved there before is as it was"
        )
    path = folder / f"step-{step:08d}"
    try:
        prune(folder, settings)
    except Exception as error:
        return path, f"old checkpoints in {folder} could not be removed: {storage.reason(error)}"
    return path, ""


def _try_store(folder: Remote, step: int, state: Mapping[str, Any], facts: dict[str, Any], failed: Path) -> str:
    """Write to a store; empty, or why that could not be done. `failed`: a file that is there from then on."""
    if failed.exists() and 0 <= time.time() - failed.stat().st_mtime < QUIET_S:
        return failed.read_text()
    for pause in (*PAUSES_S, 0.0):
        try:
            write(folder, step, state, facts)
        except TypeError:
            raise  # no network would mend that
        except Exception as error:
            why = storage.reason(error)
            time.sleep(pause)
        else:
            failed.unlink(missing_ok=True)
            return ""
    failed.parent.mkdir(parents=True, exist_ok=True)
    failed.write_text(why)
    return why


def prune(folder: Place, settings: Checkpoint) -> None:
    """Drop all but the newest `keep` and the best one, and what killed writers left behind."""
    paths = _paths(folder)
    kept = {*paths[-settings.keep :], best(folder, settings.best)}
    if isinstance(folder, Remote):
        for old in set(folder.glob("step-*")) - kept:
            (old / META).drop()  # first: a reader must never meet half a checkpoint
            old.drop()
        return
    for path in paths:
        if path not in kept and isinstance(path, Path):
            # Out of sight first: a reader must never meet half a checkpoint.
            shutil.rmtree(path.rename(folder / f".dropped-{path.name}"), ignore_errors=True)
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def best(folder: Place, rule: str | None) -> Place | None:
    """The checkpoint with the best value by `max:METRIC` or `min:METRIC`; of equal ones the newest."""
    if rule is None:
        return None
    mode, _, metric = rule.partition(":")
    sign = 1 if mode == "max" else -1
    scored = [(sign * value, path.name) for path in _paths(folder) if (value := _metric(path, metric)) is not None]
    return folder / max(scored)[1] if scored else None


def _metric(path: Place, name: str) -> float | None:
    try:
        value = _meta(path)["metrics"].get(name)
    except (OSError, ValueError, KeyError):
        return None
    return value if isinstance(value, int | float) and value == value else None


def _paths(folder: Place) -> list[Place]:
    """All checkpoints that can be seen, oldest first; at a URL those with a meta.json: others are on their way."""
    if isinstance(folder, Remote):
        files = (file.split("/") for file in folder.sizes())
        found: list[Place] = [folder / parts[0] for parts in files if parts[1:] == [META]]
    else:
        found = list(folder.glob("step-*"))
    steps = (path for path in found if path.name.startswith("step-") and path.name[5:].isdigit())
    return sorted(steps, key=lambda path: int(path.name[5:]))


def _meta(path: Place) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
    return meta
