"""Writes the weights of a model, also of one that is divided, to safetensors files. (rank side)"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydist.shared.errors import ConfigError, RaydistError
from raydist.state.object_store import reason
from raydist.state.write import flush_to_disk
from raydist.training.sources import gather_states
from raydist.training.weights import INDEX, saved_names
from raydist.worker import context

NUMBERED = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
FILE_BYTES = 5 * 10**9
"""Limit on the bytes of a file, unless one tensor has more."""


def save_weights(model: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Save the weights of a model as safetensors files, also of a model that is divided.

    All ranks must call it, with the same model: after `raydist.fit`, or in a loop of one's own. The
    files have the names that other readers expect: `model.safetensors`, or several files of at most
    5 GB and `model.safetensors.index.json`. A model of transformers gets its `config.json` too, so
    that `from_pretrained(folder)` takes it, in the `dtype` in which it was saved.

    - `model`: also in torch's DistributedDataParallel, or compiled.
    - `folder`: rank 0 writes it, in a pipeline also the first rank of each stage, which must see
      it. Earlier weights in it are replaced: what is there can be loaded only while it is whole,
      also if the ranks are killed meanwhile.
    - `dtype`: of all tensors with floating point, such as torch.bfloat16. None: as they are.

    Returns the folder. A tensor with several names is saved under the first. The tensors are
    gathered one by one; a rank that writes needs memory for one file.

    ConfigError: safetensors is not installed. RaydistError: a rank could not write. In a program
    (`script=`) rank 0 alone learns that, and the others do not wait for it.
    """
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "save_weights needs the package safetensors: pip install 'raydist[safetensors]'"
        ) from error
    model = _unwrapped(model)
    writer = WeightWriter(Path(folder), context.rank().rank)
    writes = context.rank().rank % _ranks_of_a_stage() == 0
    for name, value in _whole_tensors(model):
        if writes:
            writer.add(name, value, dtype)
    writer.flush()
    everyone = _gather(writer)
    if writer.rank == 0:
        writer.withdraw(everyone)
    _gather(writer)
    if writes:
        writer.rename(everyone)
    _gather(writer)
    if writer.rank == 0:
        writer.finish(model, everyone)
    _gather(writer)
    return Path(folder)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model itself: a wrapper adds to the names, as `module.` or `_orig_mod.`."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _ranks_of_a_stage() -> int:
    """Return how many consecutive ranks have all parameters of a stage, or of the whole model."""
    comm, ranks = context.current().comm, context.rank().world_size
    return ranks // comm.shape.pp if comm is not None and comm.sharded else ranks


def _whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a model saves, by their first name; those of this stage only.

    The ranks of a stage must do so together.
    """
    for names, value in saved_names(model):
        if not value.is_meta:
            gather = getattr(value, "full_tensor", None)  # of a DTensor
            yield names[0], value if gather is None else gather()


def _gather(writer: WeightWriter) -> Sequence[Mapping[str, Any]]:
    """Return what each rank has written; in a program, this one. RaydistError: one could not."""
    comm = context.current().comm
    own: dict[str, Any] = {"files": writer.files, "bytes": writer.bytes, "why": writer.why}
    everyone = [own] if comm is None else gather_states(own, comm)
    if why := "; ".join(each["why"] for each in everyone if each["why"]):
        writer.discard()
        raise RaydistError(f"the weights could not be saved in {writer.folder}: {why}")
    return everyone


class WeightWriter:
    """The files that a rank writes. An error is noted, so that no rank waits for this one."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.files: list[list[str]] = []
        """The names of the tensors in each file."""
        self.bytes = 0
        """Of all tensors."""
        self.dtype: torch.dtype | None = None
        """Of the first tensor with floating point."""
        self.why = ""
        """Why it could not write."""
        self._waiting: dict[str, torch.Tensor] = {}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.why = self.why or f"rank {self.rank}: {reason(error)}"

    def add(self, name: str, value: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Take a tensor; write those before it if they fill a file."""
        dtype = dtype if value.is_floating_point() else None
        # A copy: tensors that share memory are refused.
        own = value.detach().to("cpu", dtype or value.dtype, copy=True).contiguous()
        if sum(each.nbytes for each in self._waiting.values()) + own.nbytes > FILE_BYTES:
            self.flush()
        if own.is_floating_point():
            self.dtype = self.dtype or own.dtype
        self._waiting[name] = own
        self.bytes += own.nbytes

    def flush(self) -> None:
        """Write the tensors that wait."""
        from safetensors.torch import save_file

        if not self._waiting:
            return
        if not self.files:
            self.discard()
        with self._noting():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._temporary(len(self.files))
            save_file(self._waiting, path, metadata={"format": "pt"})
            flush_to_disk(path)  # before the earlier weights are replaced: the power may fail
        self.files.append([*self._waiting])
        self._waiting = {}

    def discard(self) -> None:
        """Remove the unfinished files of this rank, also those of a save that was killed."""
        with suppress(OSError):
            for each in self.folder.glob(f".writing-{self.rank}-*"):
                each.unlink()

    def _temporary(self, number: int) -> Path:
        return self.folder / f".writing-{self.rank}-{number}.safetensors"

    def withdraw(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Remove the index of earlier weights if one of their files is about to be replaced.

        If the ranks were killed before all of them are, it would make one model of two.
        """
        names = final_names([len(each["files"]) for each in everyone])
        with self._noting():
            if any((self.folder / name).exists() for own in names for name in own):
                (self.folder / INDEX).unlink(missing_ok=True)

    def rename(self, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Give the files their names. `everyone`: what each rank has written."""
        names = final_names([len(each["files"]) for each in everyone])[self.rank]
        with self._noting():
            for number, name in enumerate(names):
                self._temporary(number).replace(self.folder / name)
            if names:
                flush_to_disk(self.folder)

    def finish(self, model: nn.Module, everyone: Sequence[Mapping[str, Any]]) -> None:
        """Write what names the files, and the configuration of a model of transformers.

        What earlier weights in the folder have left is removed, at the end: up to then readers find
        the earlier weights, these, or several files without an index, which they refuse. Some
        prefer one file to an index, others take all files.
        """
        names = final_names([len(each["files"]) for each in everyone])
        index = self.folder / INDEX
        with self._noting():
            if sum(map(len, names)) > 1:
                files = {
                    tensor: name
                    for each, own in zip(everyone, names, strict=True)
                    for tensors, name in zip(each["files"], own, strict=True)
                    for tensor in tensors
                }
                total = {"total_size": sum(each["bytes"] for each in everyone)}
                written = self.folder / f".writing-{INDEX}"
                written.write_text(json.dumps({"metadata": total, "weight_map": files}, indent=2))
                flush_to_disk(written)
                written.replace(index)
                (self.folder / "model.safetensors").unlink(missing_ok=True)
            else:
                index.unlink(missing_ok=True)
            used = {name for own in names for name in own}
            for each in [*self.folder.iterdir()]:
                if NUMBERED.fullmatch(each.name) and each.name not in used:
                    each.unlink()
            known: Any = getattr(model, "config", None)
            if hasattr(known, "save_pretrained"):
                config = copy(known)
                config.architectures = [_kind(model).__name__]
                # Otherwise that of the weights with which the training began, and a reader would
                # round these to it.
                config.dtype = self.dtype
                config.save_pretrained(self.folder)


def _kind(model: nn.Module) -> type:
    """Return the class of a model; fully_shard has made a class of its own from it."""
    kinds = type(model).__mro__
    shards = [at for at, each in enumerate(kinds) if each.__name__ == "FSDPModule"]
    return kinds[shards[0] + 1] if shards else kinds[0]


def final_names(counts: Sequence[int]) -> list[list[str]]:
    """Return the names of each rank's files, from their numbers."""
    total, number = sum(counts), 0
    found = []
    for count in counts:
        numbers = range(number + 1, number + count + 1)
        found.append(
            ["model.safetensors"] * count
            if total == 1
            else [f"model-{each:05}-of-{total:05}.safetensors" for each in numbers]
        )
        number += count
    return found
