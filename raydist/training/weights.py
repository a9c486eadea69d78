"""Weights from safetensors files into a model, a part of it at a time. (rank side)"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydist.settings.config import Job
from raydist.shared.errors import ConfigError
from raydist.shared.rank_names import counted
from raydist.worker import context

INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, if there are several files."""
PART = re.compile(r"-of-(?!0*1\.)\d+\.safetensors$")
"""The end of the name of one file of several, such as a killed save_weights has left."""
NAMED = 4
"""Limit on the names in a message."""


class WeightFiles:
    """The tensors of a safetensors file, or of those in a folder, by name.

    A folder has `model.safetensors.index.json`, or `model.safetensors`, or one file with that
    ending. Only what is asked for is read.
    """

    def __init__(self, path: str) -> None:
        """ConfigError: there are no such files, or safetensors is not installed."""
        self._path = path
        self._open: dict[Path, Any] = {}
        try:
            self._file_of = {
                name: file for file in self._files(Path(path)) for name in self._names_in(file)
            }
        except ImportError as error:
            cause = "the package safetensors is not installed: pip install 'raydist[safetensors]'"
            raise ConfigError.of("train.weights", path, cause) from error
        except Exception as error:  # SafetensorError of a damaged file, an error of the disk
            if isinstance(error, ConfigError):
                raise
            raise ConfigError.of("train.weights", path, f"it cannot be read: {error}") from error

    @classmethod
    def of(cls, job: Job) -> WeightFiles | None:
        """Return those of `train.weights`; None: it is not set."""
        return cls(job.train.weights) if job.train.weights else None

    def _files(self, path: Path) -> Sequence[Path]:
        if path.is_file():
            return [path]
        index = path / INDEX
        if index.is_file():
            return [
                path / name
                for name in sorted({*json.loads(index.read_text())["weight_map"].values()})
            ]
        found = [path / "model.safetensors"]
        if not found[0].is_file():
            # not `.writing-…`, which a killed save_weights has left
            found = [*path.glob("[!.]*.safetensors")]
        if len(found) == 1 and not PART.search(found[0].name):
            return found
        if path.is_dir():
            what = f"it has {counted(len(found), 'file')} *.safetensors, but no {INDEX}"
        else:
            what = f"there is no file or folder {path.absolute()} on this node"
        raise ConfigError.of("train.weights", self._path, what, "train.weights=FOLDER")

    def _opened(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")  # mapped: nothing is read yet
        return self._open[file]

    def _names_in(self, file: Path) -> list[str]:
        return list(self._opened(file).keys())

    def check(self, model: nn.Module) -> None:
        """Warn of tensors that only the model has, or only the files.

        ConfigError: they have no name in common, or a tensor has another shape.
        """
        names = saved_names(model)
        missing = [own[0] for own, _ in names if not self._file_of.keys() & {*own}]
        known = {name for own, _ in names for name in own}
        unused = [name for name in self._file_of if name not in known]
        if len(missing) == len(names):
            cause = (
                f"none of its names is one of {type(model).__name__}'s: it has {_some(unused)}, "
                f"the model has {_some(missing)}"
            )
            raise ConfigError.of("train.weights", self._path, cause)
        for own, value in names:
            for name in self._file_of.keys() & {*own}:
                shape = self._opened(self._file_of[name]).get_slice(name).get_shape()
                if [*value.shape] != [*shape]:
                    cause = f"{name} has the shape {[*shape]}, in the model it is {[*value.shape]}"
                    raise ConfigError.of("train.weights", self._path, cause)
        if context.rank().rank == 0:
            for found, what in (
                (missing, "does not have these, which begin as without it"),
                (unused, "has these, which the model does not have"),
            ):
                if found:
                    context.warn(f"train.weights={self._path} {what}: {_some(found)}")

    def fill(self, model: nn.Module, part: Iterable[nn.Module]) -> set[nn.Module]:
        """Copy the tensors of these modules from the files.

        Return the modules that have others, also such as the files cannot have.
        """
        names, left = {id(value): own for own, value in saved_names(model)}, set[nn.Module]()
        for module in part:
            for value in own_tensors(module):
                own = self._file_of.keys() & {*names.get(id(value), ())}
                if not own:
                    left.add(module)
                    continue
                name = min(own)
                with torch.no_grad():
                    value.copy_(self._opened(self._file_of[name]).get_tensor(name))
        return left


def own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def saved_names(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return the tensors that a model saves, each once with all its names, in order."""
    names: dict[int, list[str]] = defaultdict(list)
    values = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names[id(value)].append(name)
            values[id(value)] = value
    return [(names[key], value) for key, value in values.items()]


def _some(names: Sequence[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
