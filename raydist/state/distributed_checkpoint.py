"""Sharded states on disk, in the format of torch.distributed.checkpoint (DCP). (rank side)

    step-00000120/__3_0.distcp    rank 3's shards; what all ranks share is in rank 0's file
                  .metadata       where each shard of each tensor is
                  meta.json       as in every checkpoint

A state that N ranks saved loads on any number of ranks, and with
`torch.distributed.checkpoint.load` in one process. The rank plans what it writes and keeps the plan
with its shards in memory, so that another process can write its file when the rank is dead. DCP's
own `.metadata` and values are pickles that may run code: here nothing is unpickled but what
ADMITTED names, and values only with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from raydist.shared.errors import RaydistError
from raydist.state.checkpoint_files import Retention, local_copy, try_prune
from raydist.state.object_store import StoragePath
from raydist.state.snapshot import take_apart
from raydist.state.snapshot_layout import State
from raydist.state.write import (
    META,
    FileFacts,
    Meta,
    complete,
    drop,
    file_facts,
    file_sizes,
    hashed_file,
)

METADATA = ".metadata"
SAME = (
    "give both keep and load what "
    "torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns"
)
"""What to do if the keys of two states differ."""
DCP = "torch.distributed.checkpoint"
ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{DCP}.metadata", name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
    *(
        (f"{DCP}.planner", name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    (f"{DCP}.storage", "WriteResult"),
}
"""What may be unpickled in addition to torch's dtypes: data classes of DCP, in all versions from
torch 2.8 on."""


@dataclass(frozen=True)
class RankPart:
    """What a rank keeps of a sharded state: its own shards, and the plan for writing them."""

    rank: int
    world_size: int
    state: Any
    """The state with this rank's local tensor in place of each DTensor."""
    plan: bytes
    """A pickled SavePlan: the global shape and this rank's offsets of each tensor that the rank is
    to write."""


class RankPlanner:
    """Plans what a rank writes of its states.

    The plan stays the same until the keys, shapes or shards change.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._layout: Any = None
        self._plan = b""

    def plan(self, state: Mapping[str, Any]) -> bytes:
        """Return the pickled SavePlan of this rank."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=self._rank == 0)
        layout = (
            planner.mappings,
            {name: _layout_of(value) for name, value in planner.state_dict.items()},
        )
        if layout != self._layout:
            _refuse_hidden(planner.state_dict)
            plan = planner.create_local_plan()
            first = self._rank == 0 or any(
                _is_first(value) for value in planner.state_dict.values()
            )
            items = [
                item for item in plan.items if _writes(planner.state_dict[item.index.fqn], first)
            ]
            self._plan = pickle.dumps(replace(plan, items=items))
            self._layout = layout
        return self._plan


def _is_first(value: Any) -> bool:
    """Report whether this rank is the first of the mesh of a DTensor.

    In a stage of a pipeline that rank is not always rank 0.
    """
    return isinstance(value, DTensor) and not any(value.device_mesh.get_coordinate() or (1,))


def _writes(value: Any, first: bool) -> bool:
    """Report whether this rank writes a value: of equal copies, only the mesh's first rank does."""
    if not isinstance(value, DTensor):
        return first
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:  # this rank has no part of it
        return False
    return not any(
        at for at, placed in zip(coordinate, value.placements, strict=True) if placed.is_replicate()
    )


def _refuse_hidden(state: Mapping[str, Any]) -> None:
    """Raise RaydistError for DTensors inside of other values, which DCP does not see.

    It would save the local tensor of one rank for them.
    """
    for name, value in state.items():
        inside: list[torch.Tensor] = []
        take_apart(value, inside)
        if not isinstance(value, torch.Tensor) and any(
            isinstance(each, DTensor) for each in inside
        ):
            raise RaydistError(
                f"{name} is a {type(value).__name__} with DTensors in it, which "
                "torch.distributed.checkpoint does not "
                "shard: use a list or a dict"
            )


def _layout_of(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.shape, value.dtype, value.placements, value.device_mesh
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no sharded checkpoint holds"
            )
        return super().find_class(module, name)


class _Stream(io.RawIOBase):
    """A hashed file with what DCP needs of a file in addition to `write`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return int(self._file.write(data))

    def tell(self) -> int:
        return int(self._file.bytes)


class _Files(FileSystem):
    """The files of one checkpoint, as DCP opens them.

    They are hashed when written, and fetched from a store when read.
    """

    def __init__(self, folder: StoragePath) -> None:
        self._folder = folder
        self.facts_by_name: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = Path(path).name
        if mode == "rb":
            # A file of shards is read only by the ranks that need some of them.
            of_all = name == METADATA
            with local_copy(self._folder, name, of_all) as copy, copy.open("rb") as stream:
                yield stream
            return
        with hashed_file(self._folder / name) as file:
            yield _Stream(file)
        self.facts_by_name[name] = file_facts(file)


class PartPlanner(DefaultSavePlanner):
    """Finds the local tensors of a RankPart, which are no longer DTensors."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


def read_plan(plan: bytes) -> SavePlan:
    """Return the SavePlan of a RankPart. pickle.UnpicklingError: loading it would run code."""
    found: SavePlan = _Unpickler(io.BytesIO(plan)).load()
    return found


def write_part(folder: StoragePath, part: RankPart) -> dict[str, FileFacts]:
    """Write a rank's file, and next to it what `write_metadata` needs; return the file by name."""
    writer = FileSystemWriter("", sync_files=False, per_thread_copy_ahead=0)
    files = writer.fs = _Files(folder)
    plan, planner = read_plan(part.plan), PartPlanner()
    planner.set_up_planner(part.state)
    # Files are numbered by plan.
    named = writer.prepare_global_plan([SavePlan([])] * part.rank + [plan])[-1]
    results = writer.write_data(named, planner).value()
    with hashed_file(folder / _plan_name(part.rank)) as stream:
        stream.write(pickle.dumps((plan, results)))
    return files.facts_by_name


def write_metadata(folder: StoragePath, ranks: int) -> dict[str, FileFacts]:
    """Write `.metadata` for the files of `ranks` ranks, and drop their plans; return it by name.

    ValueError: the shards of a tensor leave a gap.
    """
    files = _Files(folder)
    plans = []
    results = []
    for name in map(_plan_name, range(ranks)):
        plan, written = _Unpickler(io.BytesIO((folder / name).read_bytes())).load()
        plans.append(plan)
        results += written
        drop(folder / name)
    metadata = joined_metadata(plans)
    # an item that several ranks have written is read from the lowest
    metadata.storage_data = {result.index: result.storage_data for result in reversed(results)}
    with files.create_stream(METADATA, "wb") as stream:
        pickle.dump(metadata, stream)
    return files.facts_by_name


def joined_metadata(plans: list[SavePlan]) -> Metadata:
    """Return the metadata of all ranks' plans. ValueError: the shards of a tensor leave a gap."""
    metadata: Metadata = DefaultSavePlanner().create_global_plan(plans)[1]
    return metadata


@dataclass(frozen=True)
class Contents:
    """What all ranks have written, and what else meta.json holds."""

    step: int
    ranks: int
    files: Mapping[str, FileFacts]
    metrics: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[str, Any] = field(default_factory=dict)


def commit(
    folder: StoragePath, temporary: StoragePath, contents: Contents, kept: Retention
) -> tuple[list[str], str]:
    """Make a checkpoint of what all ranks have written into `temporary`, and prune.

    Return [], and a warning or "". If some files are not visible here, return their names and make
    no checkpoint.
    """
    step, ranks, files = contents.step, contents.ranks, contents.files
    sizes = file_sizes(temporary)
    if missing := [name for name, facts in files.items() if sizes.get(name) != facts.bytes]:
        return missing, ""
    made = {**files, **write_metadata(temporary, ranks)}
    meta = Meta.of(step, ranks, contents.metrics, made, sharded=True, reported=contents.reported)
    complete(temporary, folder / f"step-{step:08d}", meta)
    return [], try_prune(folder, kept, step)


def temporary_name(folder: StoragePath, step: int, mark: str) -> StoragePath:
    """Return the folder for files that are not a checkpoint yet.

    At a URL it is the checkpoint's own, without its meta.json.
    """
    name = f"step-{step:08d}"
    return folder / (f".{name}-{mark}" if isinstance(folder, Path) else name)


def begin_writing(temporary: StoragePath) -> None:
    """Create the folder of `temporary_name`."""
    if isinstance(temporary, Path):
        temporary.mkdir(parents=True, exist_ok=True)
    else:
        drop(temporary / META)  # the checkpoint of this step is invalid from now on


def load_into(
    path: StoragePath,
    state: State,
    of_ranks: str = "",
    optional: Sequence[str] = (),
    part: bool = False,
) -> None:
    """Load a sharded checkpoint into a state, on any number of ranks.

    Not a collective: each rank reads what it needs. Tensors are filled in place (of a DTensor this
    rank's shards), all other values are replaced. `of_ranks`: a tensor with a row for each rank; it
    is left out of the state if another number of ranks has saved it. `optional`: the keys that lead
    to a dict of dicts; entries that the checkpoint lacks are left out of the state. `part`: the
    checkpoint may have keys that the state does not have.

    RaydistError: the checkpoint has other keys or other global shapes. pickle.UnpicklingError: it
    would run code.
    """
    load_by(_Reader(path), state, of_ranks, optional, str(path), part)


def load_by(
    reader: StorageReader,
    state: State,
    of_ranks: str,
    optional: Sequence[str],
    source: str,
    part: bool = False,
) -> None:
    """Load as `load_into` does, with this reader. `source`: what it reads, for errors."""
    planner = _LoadPlanner()
    metadata = reader.read_metadata()
    known = metadata.state_dict_metadata
    rows = known.get(of_ranks)
    if isinstance(rows, TensorStorageMetadata) and rows.size != state[of_ranks].shape:
        del state[of_ranks], known[of_ranks]
    leave_out(
        state,
        optional,
        lambda name, one: any(f"{'.'.join(optional)}.{name}.{key}" in known for key in one),
    )
    planner.set_up_planner(state, metadata, is_coordinator=True)
    saved = {name: facts for name, facts in known.items() if name in planner.state_dict or not part}
    if why := _misfit(planner.state_dict, saved):
        raise RaydistError(f"{source}: {why}")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


def leave_out(state: State, optional: Sequence[str], kept: Callable[[str, Any], bool]) -> None:
    """Remove entries for which `kept(name, entry)` is false.

    They are those of the dict to which the keys `optional` lead.
    """
    entries: Any = state
    for key in optional:
        entries = entries[key]
    for name in [name for name, entry in entries.items() if optional and not kept(name, entry)]:
        del entries[name]


def _misfit(state: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """Return why a state can't be loaded from what was saved; empty if it can.

    Both are given by flattened keys.
    """
    if odd := sorted(state.keys() ^ saved.keys()):
        return f"the state and the checkpoint differ in {', '.join(odd[:4])}: {SAME}"
    for name, value in state.items():
        here = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        there = tuple(saved[name].size) if isinstance(saved[name], TensorStorageMetadata) else None
        if there not in (here, None):
            return (
                f"{name} is {'no tensor' if here is None else here} in the state, and {there} "
                "in the checkpoint"
            )
    return ""


class _Reader(FileSystemReader):
    def __init__(self, folder: StoragePath) -> None:
        super().__init__("")
        self.fs = _Files(folder)

    def read_metadata(self) -> Metadata:
        with self.fs.create_stream(METADATA, "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(
                f"{METADATA} holds a {type(found).__name__}, not DCP's Metadata"
            )
        return found


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        *way, last = self.mappings[read_item.dest_index.fqn]
        into: Any = self.original_state_dict
        for step in way:
            into = into[_key(into, step)]
        into[_key(into, last)] = torch.load(value, map_location="cpu", weights_only=True)


def _key(container: Any, step: str | int) -> Any:
    """Return the key that DCP calls `step`: it converts all keys of a dict to text."""
    return (
        next(key for key in container if str(key) == step)
        if isinstance(container, Mapping)
        else step
    )


def _plan_name(rank: int) -> str:
    """Return the file that a rank's writer leaves for `write_metadata`.

    It holds the rank's plan, and where in the rank's file each item is.
    """
    return f"__{rank}.plan"
