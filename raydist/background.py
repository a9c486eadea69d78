"""raydist.submit: a run in a thread of the program that starts it. (driver)"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar, overload

from raydist.flow import create_run, run_job
from raydist.launch.gangs import OneOfMany
from raydist.launch.payload import RemoteCall
from raydist.reporting.result import Result
from raydist.settings.config import Job
from raydist.shared.errors import Stopped
from raydist.shared.events import Reader, parse_event
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.shared.signals import Halt

T = TypeVar("T")


class Run(Generic[T]):
    """A run that `raydist.submit` has started.

    As a context manager it waits at the end of the block; if the block raises, it stops the run
    first. Ctrl-C during that wait stops the run, too, and is raised when it has ended.

    - `dir`: the run folder.
    - `done()`: whether the run is over.
    - `result(timeout=None)`: waits for the Result; TimeoutError after `timeout` seconds.
    - `stop()`: asks the run to stop with its last state on the disk.
    - `events()`: yields the events as they happen, from the first to the last one.
    """

    def __init__(self, job: Job, call: RemoteCall | None, on_event: Reader | None) -> None:
        self.dir = Path(job.dir)
        """The run folder."""
        self._halt = Halt()
        self._file = self.dir / EVENTS
        self._begin = self._file.stat().st_size if self._file.exists() else 0
        """Where this run begins in the file: it may continue the run that a folder has."""
        self._count = 0
        """Events so far."""
        self._changed = threading.Condition()
        self._over = False
        self._result: Result[T] | None = None
        self._error: BaseException | None = None
        # No daemon: a program that ends waits for its runs, or Python would end them half-way.
        self._thread = threading.Thread(
            target=self._work, args=(job, call, on_event), name=f"raydist-{job.name}"
        )
        self._thread.start()

    def _work(self, job: Job, call: RemoteCall | None, on_event: Reader | None) -> None:
        try:
            self._result = run_job(job, call, OneOfMany(self._note, self._halt), on_event)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _note(self, event: Event) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def done(self) -> bool:
        """Return whether the run is over."""
        return self._over

    def result(self, timeout: float | None = None) -> Result[T]:
        """Wait for the end of the run, and return its Result.

        - `timeout`: maximum wait in seconds; None: until the end.

        TimeoutError: the run is not over. LaunchError, RunFailed, Stopped: as `raydist.run`.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"the run in {self.dir} has not ended after {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is over; return whether it is.

        Not by Thread.join: after a KeyboardInterrupt in it, Python takes the thread to be over.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._over, timeout)

    def stop(self) -> None:
        """Ask the run to stop, as SIGTERM does: it saves its state, and `result` raises Stopped.

        Returns at once. Does nothing if the run is over.
        """
        self._halt.stop(Stopped(signal.SIGTERM))

    def events(self) -> Iterator[Event]:
        """Yield the events of the run from its first one on, each as it happens, to the last.

        They are read from events.jsonl in the run folder, which in a long run does not have every
        report; `on_event` gets all.
        """
        seen = 0
        position = self._begin
        rest = b""
        while True:
            seen, over = self._wait_for_more(seen)
            if self._file.exists():
                with self._file.open("rb") as file:
                    file.seek(position)
                    *lines, rest = (rest + file.read()).split(b"\n")
                    position = file.tell()
                yield from filter(None, map(parse_event, lines))
            if over:
                return

    def _wait_for_more(self, seen: int) -> tuple[int, bool]:
        """Wait until there have been more than `seen` events, or the run is over; return both."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._count > seen)
            return self._count, self._over

    def __enter__(self) -> Run[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if error is not None:
            self.stop()
        try:
            self._wait()
        except BaseException:  # Ctrl-C
            self.stop()
            self._wait()
            raise


@overload
def submit(
    job: Callable[..., T],
    *overrides: str,
    args: Sequence[Any] = (),
    on_event: Reader | None = None,
    **kwargs: Any,
) -> Run[T]: ...
@overload
def submit(job: str, *overrides: str, on_event: Reader | None = None) -> Run[Any]: ...
def submit(
    job: str | Callable[..., T],
    *overrides: str,
    args: Sequence[Any] = (),
    on_event: Reader | None = None,
    **kwargs: Any,
) -> Run[Any]:
    """Start a run in the background and return it at once. It prints nothing.

    The arguments are those of `raydist.run`; `on_event` is called in the thread of the run. Several
    runs at a time share the program's connection to Ray. A program that ends waits for its runs.

    ConfigError: as for `raydist.run`; nothing was started. All other errors are raised by
    `Run.result`.

        run = raydist.submit(train, "scale=2x8", "backend=nccl")
        losses = [e.values["loss"] for e in run.events() if isinstance(e, raydist.events.Report)]
        run.result().metrics
    """
    return Run(*create_run(job, overrides, args, kwargs), on_event)
