"""What a fork server imports before it forks, and whether its children can use that. (actor)"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import shutil
import signal
import sys
import weakref
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from raydist.messages.server import Warm
from raydist.node import rank_readers
from raydist.shared.imports import uncollected

GPU_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
"""A process has one of these open once it has used CUDA or ROCm, even if only to ask whether there
is a GPU. NVML, which torch asks instead if PYTORCH_NVML_BASED_CUDA_CHECK is set, opens others."""
FileState = tuple[int, int, int, int]
"""The mtime and ctime of a file in nanoseconds, its size in bytes, its inode."""


def import_modules(modules: Sequence[str]) -> Warm:
    """Import modules; of MODULE:NAME also what a package imports only when NAME is asked for.

    One that fails here fails again in the rank, with its own traceback.
    """
    failed: dict[str, str] = {}
    readers: list[str] = []
    missing = [name for name in modules if not is_imported(name)]
    # Ranks share these pages, which the garbage collector would otherwise write to and copy.
    with uncollected() if missing else contextlib.nullcontext():
        for name in missing:
            module, _, own = name.partition(":")
            if module in failed:
                continue
            with rank_readers.noted_reads() as read:
                try:
                    found = importlib.import_module(module)
                    # Not a submodule of that name, which ranks may import differently.
                    if own and imports_lazily(found):
                        getattr(found, own, None)
                except BaseException as error:
                    failed[name] = f"{type(error).__name__}: {error}"
            readers += [name] if read else []
        if "torch" in sys.modules:
            importlib.import_module("raydist.worker.step_timer")  # or each rank would import it
            keep_operators()
    return Warm(failed, uses_gpu(), os.getpid(), readers)


def is_imported(name: str) -> bool:
    """Return whether a module is there; of MODULE:NAME, whether asking for NAME imports nothing."""
    module, _, own = name.partition(":")
    found = sys.modules.get(module)
    return found is not None and (not own or own in vars(found) or not imports_lazily(found))


def imports_lazily(module: ModuleType) -> bool:
    """Return whether a module may import what has a name when it is asked for the name (PEP 562).

    As transformers does, whose module is of a class of its own.
    """
    return type(module) is not ModuleType or "__getattr__" in vars(module)


def keep_operators() -> None:
    """Stop torch from deregistering its operators when a rank exits.

    Deregistering them only helps a process that continues, and takes 0.05 to 0.1 s of CPU in each
    rank: with 16 ranks on 2 cores, a third of a further command (0.98 s). Nothing public lists the
    finalizers; in a Python without the private list, the operators are deregistered.
    """
    for each in list(getattr(weakref.finalize, "_registry", ())):
        alive = each.peek()
        if alive and alive[1].__module__ == "torch.library":
            each.atexit = False


def uses_gpu(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Return whether this process has used a GPU.

    Its forks could not use one: they would train on the CPU, or fail in odd ways.
    """
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return True
    with contextlib.suppress(OSError):
        for descriptor in descriptors.iterdir():
            with contextlib.suppress(OSError):  # closed since
                if os.readlink(descriptor) in GPU_DRIVERS:
                    return True
    return False


class ImportedFiles:
    """The files that this process has imported, each with its state at that time.

    States are compared for equality, because the clock of a file server may differ from this
    machine's.
    """

    def __init__(self) -> None:
        self._states: dict[str, FileState | None] = {}

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note, inside the block, the state of each file before it is imported.

        A file may change between the import and a later check of its state.
        """
        known = sys.meta_path
        known.insert(known.index(PathFinder) if PathFinder in known else len(known), self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            self.note_all()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as Python does, and note its file (a meta path finder)."""
        spec = (
            None if name in sys.builtin_module_names else PathFinder.find_spec(name, path, target)
        )
        if spec is not None and spec.has_location and spec.origin:
            self._states[spec.origin] = file_state(spec.origin)
        return spec

    def note_all(self) -> None:
        """Note the states of those files of imported modules that have not been noted yet."""
        for file in module_files() - self._states.keys():
            self._states[file] = file_state(file)

    def changed(self) -> bool:
        """Return whether a file is gone or differs from its state at import."""
        return any(
            (now := file_state(file)) is None or now != self._states.get(file)
            for file in module_files()
        )


def module_files() -> set[str]:
    """Return the paths of the files of all modules."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file for file in files if file and os.path.isabs(file)}


def file_state(path: str) -> FileState | None:
    """Return what changes when a file or the archive around it changes; None: it is gone."""
    try:
        found = os.stat(path)
    except NotADirectoryError:
        return file_state(os.path.dirname(path))
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def ends_with(lifeline: int, folders: Sequence[str]) -> Iterator[None]:
    """End this process and remove `folders` if the lifeline closes while it imports modules.

    Nothing reads the lifeline during the imports.
    """

    def end(*_: object) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    try:
        if select.select([lifeline], [], [], 0)[0]:  # it closed before the signal was set up
            end()
        yield
    finally:
        # Outside the block the server ends its ranks and writes the last state before it ends
        # itself.
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
