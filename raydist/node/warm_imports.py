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
from pathlib import Path

from raydist.shared.imports import uncollected
from raydist.worker.protocol import Warm

GPU_DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd")
"""A process has one of these open once it has used CUDA or ROCm, even if only to ask whether there is a GPU. NVML, by
which torch asks instead where PYTORCH_NVML_BASED_CUDA_CHECK is set, opens others."""


def import_modules(modules: Sequence[str]) -> Warm:
    """Import modules. One that fails here fails in the rank again, with its own traceback."""
    failed, missing = {}, [name for name in modules if sys.modules.get(name) is None]
    # ranks share these pages, which the garbage collector would otherwise write to and copy
    with uncollected() if missing else contextlib.nullcontext():
        for name in missing:
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed[name] = f"{type(error).__name__}: {error}"
        if "torch" in sys.modules:
            importlib.import_module("raydist.worker.step_timer")  # or each rank would
            keep_operators()
    return Warm(failed, uses_gpu(), os.getpid())


def keep_operators() -> None:
    """Have the operators that torch has registered not be deregistered when a rank exits.

    That takes 0.1 s of CPU in each, and is of use only to a process that goes on.
    """
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        alive = each.peek()
        if alive and alive[1].__module__ == "torch.library":
            each.atexit = False


def uses_gpu(descriptors: Path = Path("/proc/self/fd")) -> bool:
    """Whether this process has used a GPU. Its forks could not: they would train on the CPU, or fail oddly."""
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        return True
    with contextlib.suppress(OSError):
        for descriptor in descriptors.iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(descriptor) in GPU_DRIVERS:
                    return True
    return False


def changed_since(moment: float) -> bool:
    """Whether a file that this process has imported was changed or removed after `moment`, seconds since the epoch."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or not os.path.isabs(file):
            continue
        try:
            found = os.stat(file)
        except OSError:
            return True
        if max(found.st_mtime, found.st_ctime) > moment:
            return True
    return False


@contextlib.contextmanager
def ends_with(lifeline: int, folders: Sequence[str]) -> Iterator[None]:
    """End this process and remove `folders` if the lifeline closes while it imports modules, when nothing reads it."""

    def end(*_: object) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the signal was set up
        end()
    yield
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
