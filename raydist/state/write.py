"""Writes checkpoints: complete or not at all, and loadable without running code. (either side)"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from raydist.state.direct_io import DirectFile
from raydist.state.object_store import Hashing, Remote, StoragePath, parse_path

STATE, META = "state.pt", "meta.json"
TRAINING, CHECKPOINTS, FIT = "training-", "checkpoints", "fit-"
"""The folders between a run's folder and a checkpoint (run_checkpoints.py)."""
CHECKSUM = re.compile("[0-9a-f]{32}")
DROPPED, REPLACED = ".dropped-", ".replaced-"
"""The prefixes of a checkpoint's name while it is deleted, and while another one replaces it."""
WRITER_SILENT_S = 3600.0
"""Seconds without a change after which another machine's half-written checkpoint is considered that
of a killed writer."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""From linux/fcntl.h and linux/fs.h."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint to be written: state, description, folder, and how many others to keep.

    The rank creates it. The rank itself writes it, or the writer process of its node does.
    """

    step: int
    """Optimizer steps done."""
    state: Mapping[str, Any]
    metrics: Mapping[str, float]
    world_size: int
    checkpoints: str
    """The folder or URL of the run's checkpoints."""
    run_dir: str
    """The run folder on this machine: its `checkpoints/` takes what a store can't."""
    keep: int
    best: str | None
    """As in config.Checkpoint."""
    reported: Mapping[str, Any] = field(default_factory=dict)
    """As in Meta."""

    @property
    def folder(self) -> StoragePath:
        return parse_path(self.checkpoints)

    @property
    def path(self) -> StoragePath:
        """The checkpoint, once it is written."""
        return self.folder / f"step-{self.step:08d}"

    @property
    def local(self) -> SaveRequest:
        """The same request, for the run folder on this machine."""
        inside = place_in_run(self.folder) or (CHECKPOINTS,)
        return replace(self, checkpoints=str(Path(self.run_dir, *inside)))


@dataclass(frozen=True)
class FileFacts:
    """One file of a checkpoint, as meta.json lists it."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Meta:
    """What meta.json holds."""

    step: int
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileFacts]
    sharded: bool
    """Whether the state is in torch.distributed.checkpoint's format (distributed_checkpoint.py)."""
    time: float
    """Seconds since the epoch."""
    torch: str
    reported: Mapping[str, Any] = field(default_factory=dict)
    """The last value of each name that rank 0 had reported: a driver that was killed may not have
    received them."""

    @classmethod
    def of(
        cls,
        step: int,
        world_size: int,
        metrics: Mapping[str, float],
        files: Mapping[str, FileFacts],
        sharded: bool = False,
        reported: Mapping[str, Any] | None = None,
    ) -> Meta:
        """Return a Meta with the current time and the version of torch."""
        import torch

        return cls(
            step,
            world_size,
            dict(metrics),
            files,
            sharded,
            time.time(),
            torch.__version__,
            dict(reported or {}),
        )

    @classmethod
    def read(cls, path: StoragePath) -> Meta:
        """Read meta.json.

        OSError: there is no such file, or it can't be read; ValueError: it holds something else.
        """
        plain = json.loads((path / META).read_text(encoding="utf-8"))
        try:
            known = {"reported": {}} | plain  # older checkpoints have none
            known = {each.name: known[each.name] for each in fields(cls)}
            files = {name: FileFacts(**facts) for name, facts in known["files"].items()}
            odd = [
                name
                for name, facts in files.items()
                if "/" in name or not CHECKSUM.fullmatch(facts.xxh3_128)
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if odd:  # both become names of files on this machine
            raise ValueError(f"the entry of {odd[0]} was not written by raydist")
        return cls(**known | {"files": files})


def place_in_run(path: StoragePath) -> tuple[str, ...]:
    """Return the names from the run folder to this folder of checkpoints, or to one in it.

    Empty: the path is not in a folder of checkpoints.
    """
    parts = Path(str(path)).parts
    if CHECKPOINTS not in parts:
        return ()
    at = len(parts) - 1 - parts[::-1].index(CHECKPOINTS)
    return parts[at - parts[at - 1].startswith(TRAINING) :]


def write(request: SaveRequest) -> None:
    """Write a checkpoint: at any time a reader sees a complete one or none.

    TypeError: it could not be loaded.
    """
    if why := next(unloadable(request.state, "state"), None):
        raise TypeError(why)
    path = request.path
    if isinstance(path, Remote):
        (path / META).drop()  # deleted first and uploaded last: it marks a complete checkpoint
        _write_into(path, request)
        return
    temporary = path.parent / f".{path.name}{writers_here()}{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_into(temporary, request)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise


def _write_into(temporary: StoragePath, request: SaveRequest) -> None:
    import torch

    with hashed_file(temporary / STATE) as file:
        try:
            torch.save(dict(request.state), cast("Any", file))
        except RuntimeError as error:
            # torch still writes the end of the file, and the error of that hides the first one.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
    files, reported = {STATE: file_facts(file)}, request.reported
    meta = Meta.of(request.step, request.world_size, request.metrics, files, reported=reported)
    complete(temporary, request.path, meta)


@contextmanager
def hashed_file(path: StoragePath) -> Iterator[DirectFile | Hashing]:
    """Yield a file to write to, which is complete after the block.

    At a URL there is no copy of it on this machine's disk.
    """
    if isinstance(path, Remote):
        with path.writing() as file:
            yield Hashing(file)
        return
    with closing(DirectFile(path)) as direct:
        yield direct
        direct.end()


def file_facts(file: DirectFile | Hashing) -> FileFacts:
    """Return the size and the checksum of what was written to a file."""
    return FileFacts(file.bytes, file.checksum)


def file_sizes(folder: StoragePath) -> dict[str, int]:
    """Return the files of a folder, each with its size in bytes."""
    if isinstance(folder, Remote):
        return folder.sizes()
    found = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
        for file in files:
            # Another process may just have replaced or deleted the folder.
            with suppress(FileNotFoundError):
                found[file.name] = file.stat().st_size
    return found


def complete(temporary: StoragePath, path: StoragePath, meta: Meta) -> None:
    """Turn the files in the folder `temporary` into the checkpoint `path`.

    At a URL both are the same folder.
    """
    (temporary / META).write_text(json.dumps(asdict(meta), indent=1))
    if isinstance(temporary, Path) and isinstance(path, Path):
        for synced in (temporary / META, temporary):
            flush_to_disk(synced)
        put_in_place(temporary, path)
        flush_to_disk(path.parent)


def drop(path: StoragePath) -> None:
    """Remove a file, or a folder with all that is in it; a missing one is not an error."""
    if isinstance(path, Remote):
        path.drop()
    elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a folder to `path`, and delete a folder of that name.

    If the writer is killed meanwhile, `prune` deletes it. If the file system can't exchange two
    names (NFS), a writer that is killed in between leaves the former folder as `.replaced-…`; a
    reader puts it back (`put_back`). A reader may do so at this moment too, hence the loop.
    """
    aside = path.parent / f"{REPLACED}{path.name}-{os.getpid()}"
    while True:
        try:
            temporary.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if exchanged(temporary, path):
            shutil.rmtree(temporary, ignore_errors=True)
            return
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            path.rename(aside)


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step, as renameat2(2) does.

    False: the file system or the kernel can't.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    here = ctypes.c_int(AT_FDCWD)
    return bool(
        libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), RENAME_EXCHANGE) == 0
    )


def writers_here() -> str:
    """Return the part of a half-written folder's name before the pid.

    A pid is meaningful on this machine only.
    """
    return f"-{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def abandoned(left: Path) -> bool:
    """Report whether a half-written checkpoint is a leftover.

    Its writer on this machine has ended; a writer elsewhere was silent for an hour.
    """
    if not left.name.startswith(".step-"):
        return False
    _, here, pid = left.name.rpartition(writers_here())
    if here and pid.isdigit():
        return not Path("/proc", pid).exists()
    changes = [path.stat().st_mtime for path in (left, *left.iterdir())]
    return time.time() - max(changes) > WRITER_SILENT_S


def put_back(folder: Path) -> None:
    """Restore the names of checkpoints whose writer was killed during `put_in_place`."""
    for name, replaced in replaced_in(folder).items():
        with suppress(OSError):  # the new one exists, or the folder is read-only
            replaced.rename(folder / name)


def replaced_in(folder: Path) -> dict[str, Path]:
    """Return the checkpoints that are being replaced, or were, by their former names."""
    found = folder.glob(f"{REPLACED}step-*")
    return {path.name.removeprefix(REPLACED).rpartition("-")[0]: path for path in found}


def unloadable(value: Any, where: str) -> Iterator[str]:
    """Yield an error for each value that torch.load(weights_only=True) would refuse.

    They are found when they are saved, not when they are needed.
    """
    import torch

    kind = type(value)
    if kind in (dict, OrderedDict):
        for key, inner in value.items():
            yield from unloadable(key, f"{where}: key {key!r}")
            yield from unloadable(inner, f"{where}[{key!r}]")
    elif kind in (list, tuple, set, torch.Size):
        for index, inner in enumerate(value):
            yield from unloadable(inner, f"{where}[{index}]")
    # By exact type: numpy's float64 is a float too, and is refused when it is loaded.
    elif kind not in PLAIN and not isinstance(value, torch.Tensor | torch.dtype | torch.device):
        public = kind.__module__.partition("._")[0]  # pathlib._local.PosixPath in Python 3.13
        yield (
            f"{where} is a {public}.{kind.__qualname__}, which can't be loaded without running "
            "code: save "
            "tensors, numbers, text, and lists and dicts of them (torch.as_tensor(…), float(…), "
            ".state_dict())"
        )


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to the disk with fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
