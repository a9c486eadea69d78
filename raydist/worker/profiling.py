"""Profiles of this rank by torch's profiler, during training. (rank side)

A thread starts and stops the profiler, and writes the trace; the training waits only for the start,
some milliseconds at the first step of the profile.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from raydist.messages.profile import ARMED, MARKS, Marks
from raydist.shared import kinds
from raydist.shared.errors import last_line
from raydist.worker import context, torch_private
from raydist.worker.agreed import Action
from raydist.worker.torch_private import ProfilerTurn

NSIGHT = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
"""Variables of programs below Nsight Systems, or another tool that holds CUPTI."""
START_S = 60.0
"""Longest wait of the training for the profiler's start: its import and its first start, which
usually come before, take most of a minute on a busy machine."""
WRITE_S = 120.0
"""Longest wait, at the end of a program, for its trace to be written."""


class Recording:
    """One profile of this rank, made in a separate thread."""

    def __init__(
        self,
        path: Path,
        name: str,
        memory: bool,
        turn: ProfilerTurn,
        tell: Callable[[str], None],
    ) -> None:
        """Have the thread load what the profiler needs, then tell why it can't profile, or "".

        `path`: of the trace to write, without its ending. `name`: as in PrepareProfile.
        """
        self._path, self._name, self._memory, self._turn = path, name, memory, turn
        self._last = 0
        """The last step; 0: it ends by itself."""
        self._begin, self._began, self.end = threading.Event(), threading.Event(), threading.Event()
        self._seconds: float | None = None
        self._late = False
        self._marks = Marks(os.getpid(), 0, 0, [])
        self._thread = threading.Thread(
            target=self._run, args=(tell,), name="raydist-profile", daemon=True
        )
        self._thread.start()

    @property
    def active(self) -> bool:
        return self._begin.is_set() and self._thread.is_alive()

    def begin(self, step: int, steps: int) -> None:
        """Begin after this step, and end `steps` steps later."""
        self._last = step + steps
        self._marks = self._marks._replace(first=step + 1)
        self._start()

    def begin_now(self, seconds: float) -> None:
        """Begin at once, and end after this time in seconds."""
        self._seconds = seconds
        self._start()

    def _start(self) -> None:
        self._begin.set()
        if self._seconds is None:
            self._late = not self._began.wait(START_S)
            if self._late:  # a file without some of the steps would look like one that has them
                self.end.set()
            self._marks = self._marks._replace(began_ns=time.time_ns())

    def note_step(self, step: int) -> None:
        """Note that a step is done."""
        if self._last and not self.end.is_set():
            self._marks.ends_ns.append(time.time_ns())
            if step >= self._last:
                self.end.set()

    def drop(self) -> None:
        """End the thread: the profile will not begin."""
        self._begin.set()

    def finish(self) -> None:
        """End the profile, because the program ends, and wait until its trace is written."""
        self.end.set()
        self._thread.join(WRITE_S)

    def _run(self, tell: Callable[[str], None]) -> None:
        try:
            why_not = reason_against(self._turn, self._memory) or self._warm()
        except Exception as error:
            why_not = last_line(error)
        tell(why_not)
        if why_not:
            self._began.set()
            return
        self._begin.wait()
        if not self._last and self._seconds is None:
            return  # it was dropped
        path, memory, why_not = "", "", ""
        try:
            why_not = self._record()
            if not why_not:
                path, memory = f"{self._path}.json.gz", self._memory_file()
        except Exception as error:
            why_not = last_line(error)
        finally:
            self._began.set()
        context.emit_event(
            kinds.Profiled(
                rank=context.rank().rank, name=self._name, path=path, memory=memory, error=why_not
            )
        )

    def _warm(self) -> str:
        """Start and stop the profiler once, which takes seconds the first time."""
        with self._turn.own() as ours:
            if not ours:
                return "the program's own profiler is active"
            with profile_rank():
                pass
        return ""

    def _record(self) -> str:
        """Make the profile, and write it; return why there is none, or ""."""
        with self._turn.own(self.end) as ours:
            if not ours:
                return "the program's own profiler is active"
            history = self._memory and torch_private.begin_memory_history()
            with profile_rank() as profiler:
                if self._seconds is not None:
                    self._marks = self._marks._replace(began_ns=time.time_ns())
                self._began.set()
                self.end.wait(self._seconds)
                if self._seconds is not None:
                    self._marks.ends_ns.append(time.time_ns())
                profiler.add_metadata_json(MARKS, json.dumps(self._marks))
            if history:
                torch_private.end_memory_history(self._memory_path())
        if self._late:
            return f"the profiler was not ready within {START_S:g} s, so the steps are not profiled"
        if not self._marks.ends_ns:
            return "the program ended, or began its own profiler, before a step was done"
        plain = f"{self._path}.json"
        profiler.export_chrome_trace(plain)
        compress(plain)
        return ""

    def _memory_path(self) -> str:
        return f"{self._path}.memory.pickle"

    def _memory_file(self) -> str:
        return self._memory_path() if os.path.exists(self._memory_path()) else ""


class RankProfiler:
    """Makes profiles of this rank, one at a time."""

    def __init__(self, base: str) -> None:
        """`base`: the path of the rank's files on its node."""
        self._base = base
        self._turn = ProfilerTurn()
        self._turn.watch_program()
        self._current: Recording | None = None
        atexit.register(self.finish)

    def prepare(self, name: str, memory: bool, tell: Callable[[str], None]) -> None:
        """Prepare a profile in a thread, which tells why it can't be made, or ""."""
        if self._current is not None:
            if self._current.active:
                tell("another profile of it is being made")
                return
            self._current.drop()
        self._current = Recording(Path(f"{self._base}.{name}"), name, memory, self._turn, tell)

    def arm(self, first: int, last: int) -> None:
        """Profile these steps without a further request; an event reports if that is impossible."""
        prepare = Action(max(0, first - 2), "prepare", fit=None)
        begin = Action(first - 1, "profile", {"last": last}, fit=None)
        context.current().actions.arm([prepare, begin])

    def prepare_armed(self) -> None:
        """Prepare the profile that watch.profile requests."""
        rank = context.rank().rank

        def tell(why_not: str) -> None:
            if why_not:
                context.emit_event(kinds.Profiled(rank=rank, name=ARMED, error=why_not))

        self.prepare(ARMED, False, tell)

    def begin(self, step: int, steps: int) -> None:
        """Begin the prepared profile after this step."""
        if self._current is not None and steps > 0:
            self._current.begin(step, steps)

    def begin_now(self, seconds: float) -> None:
        """Begin the prepared profile."""
        if self._current is not None:
            self._current.begin_now(seconds)

    def note_step(self, step: int) -> None:
        """Note that a step is done."""
        if self._current is not None:
            self._current.note_step(step)

    def finish(self) -> None:
        """Write the steps profiled so far, because the program ends."""
        if self._current is not None and self._current.active:
            self._current.finish()


_profiler: RankProfiler | None = None


def install(base: str) -> RankProfiler:
    """Make profiles of this process possible, and count the steps of its optimizers."""
    global _profiler
    _profiler = RankProfiler(base)
    count_optimizer_steps()
    return _profiler


def do_after_step(step: int, actions: Sequence[Action]) -> bool:
    """Do what was agreed for after this step; return whether to save a checkpoint."""
    save = False
    profiler = _profiler
    if profiler is not None:
        profiler.note_step(step)
    for action in actions:
        if action.what == "save":
            save = True
        elif profiler is not None and action.what == "prepare":
            profiler.prepare_armed()
        elif profiler is not None and action.what == "profile":
            steps = action.values.get("steps") or action.values["last"] - step
            profiler.begin(step, steps)
    return save


def count_optimizer_steps() -> None:
    """Count the steps of torch's optimizers outside of raydist.fit.

    Horovod's optimizer calls the one that it wraps: that is one step. An optimizer inside
    torch.compile is not counted, since a hook would break its graph.
    """
    here = threading.local()

    def before(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            here.in_step = True

    def after(*_: Any) -> None:
        if torch.compiler.is_compiling() or not getattr(here, "in_step", False):
            return
        here.in_step = False
        actions = context.current().actions
        if step := actions.count():
            do_after_step(step, actions.due(step))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def reason_against(turn: ProfilerTurn, memory: bool) -> str:
    """Return why this process can't be profiled, or "". `memory`: with a snapshot of its GPU's."""
    if turn.lacks:
        return turn.lacks
    on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if memory and not on_gpu:
        return "memory=true is about GPUs, and it uses none"
    if on_gpu and (tool := next(filter(os.environ.get, NSIGHT), "")):
        return f"another tool profiles its GPU ({tool} is set)"
    return ""


def profile_rank() -> AbstractContextManager[torch.profiler.profile]:
    """Profile all threads of this process, and its GPU if it uses one, in this thread."""
    # In this order: without CUDA in its torch, a rank that has a GPU has no device.
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if used and (device := context.rank().device).type == "cuda":
        # A new thread starts on GPU 0. The end of a profile waits for the GPU of its thread, and
        # would create a context of 0.5 GB there.
        torch.cuda.set_device(device)
    return torch_private.profile_all_threads()


def compress(path: str) -> None:
    """Compress a file, with little CPU: the training needs it."""
    with open(path, "rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    with contextlib.suppress(OSError):
        os.unlink(path)
