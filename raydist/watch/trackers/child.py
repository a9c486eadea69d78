"""The main loop: follows events.jsonl, retries, and reports how the run ended. (driver)

    python -m raydist.watch.trackers.child    reads a Task as a line of JSON; ends with the run

It prints lines of JSON: `warning`, `track` (where a person finds the run), `variables`, `ready`,
`opening` (whether it tries for the first time to open the tracker's run).
The output of libraries goes to logs/track-NAME.log of the run folder.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from raydist.reporting.points import Point, Points, Position, node_numbers, series
from raydist.reporting.progress import Progress
from raydist.settings.secrets import masked
from raydist.shared import kinds
from raydist.shared.events import parse_event
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.watch.trackers import END_S, OPEN_S, Ending, Ledger, Measured, Task, Tracker

CLASSES = {
    "tensorboard": "TensorBoard",
    "mlflow": "Mlflow",
    "wandb": "Wandb",
    "trackio": "Trackio",
    "kubeflow": "Kubeflow",
}
LOOK_S = 0.5
"""Seconds between two reads of the events."""
AGAIN_S = 10.0
"""Seconds from a call that raised an exception to the next."""
HANG_S = 60.0
"""Seconds after which a call that does not return is a warning."""
ROWS = 200
"""Maximum number of rows in one call."""
KEPT_ROWS = 100_000
"""Maximum number of rows that wait for a tracker that does not answer; the oldest are dropped."""
PAGES = "blame-*.txt"
Say = Callable[..., None]


class Life(threading.Thread):
    """A thread that knows when the run is over: the driver closed our input, or is gone.

    After that everything here must end. A driver's forked processes may keep the other end of our
    input open, so the driver's process id counts too.
    """

    def __init__(self, name: str, say: Say, end_s: float) -> None:
        """Remember the driver.

        `end_s`: the longest time of this process after the run's end, once it is `opened`.
        """
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.opened = threading.Event()
        """Set once the receiver of the events was opened, or could not be."""
        self.called_at = 0.0
        """When the pending call began, on the monotonic clock; 0 if there is none."""
        self._name = name
        self._say = say
        self._end_s = end_s
        self._driver = os.getppid()

    def run(self) -> None:
        warned = False
        while os.getppid() == self._driver and not select.select([0], [], [], LOOK_S)[0]:
            if self.called_at and time.monotonic() - self.called_at > HANG_S and not warned:
                warned = True
                self._say(
                    warning=f"{self._name} has not answered for {HANG_S:g} s; the run continues "
                    "without it"
                )
        self.over.set()
        self.opened.wait(OPEN_S)
        time.sleep(self._end_s + LOOK_S)  # the driver, if it is alive, ends this process earlier
        os.killpg(0, signal.SIGKILL)

    def end_was_announced(self) -> bool:
        """Report, once the run is over, whether the driver announced it: a dead one did not.

        Its process id as our parent is no proof: it remains for a moment after the driver's death.
        """
        return bool(select.select([0], [], [], 0)[0]) and os.read(0, 1) != b""


class Rows:
    """The rows that wait to be written; the oldest are dropped above KEPT_ROWS."""

    def __init__(self, points: Points) -> None:
        self.queue: list[Measured] = []
        self._points = points

    def add(self, happened: Event) -> None:
        """Add the rows that follow from an event."""
        self._extend(self._points.add(happened))
        if isinstance(happened, kinds.Nodes):
            self.queue.append(Measured(happened.t, None, node_numbers(happened.nodes)))
        del self.queue[:-KEPT_ROWS]

    def finish(self) -> None:
        """Add the rows that were held back until the end."""
        self._extend(self._points.rest())

    def _extend(self, points: list[Point]) -> None:
        for point in points:
            fit, step = point.at
            values = {series(name, fit): value for name, value in point.values.items()}
            if values:
                self.queue.append(Measured(point.t, step, values, fit))


class FailurePages:
    """The pages of failures, each once it is complete: it says what came of the failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent = 0
        """The number of the last page that was sent, or that an earlier run left."""
        self._newest = 0
        """The number of the newest failure."""
        self._complete = self._completed = 0
        """The last complete page, and the last one that may be: it is written just after the event,
        so it counts one look later."""

    def skip(self, number: int) -> None:
        """Leave out this page and those before it, which an earlier run has left."""
        self._sent = self._newest = self._complete = self._completed = number

    def read(self, happened: Event) -> None:
        """Process one event."""
        match happened:
            case kinds.Failure():
                self._completed = self._newest
                self._newest += 1
            case kinds.Restarted():
                self._completed = self._newest

    def due(self, over: bool) -> Iterator[Path]:
        """Yield the pages to be sent; one counts as sent when the next is asked for.

        `over`: the run is over, so all pages are complete.
        """
        pages = {int(page.stem.partition("-")[2]): page for page in self._folder.glob(PAGES)}
        for number in sorted(pages):
            if self._sent < number and (over or number <= self._complete):
                yield pages[number]
                self._sent = number
        self._complete = self._completed


class Follower:
    """One tracker of one run."""

    def __init__(self, task: Task, say: Say, life: Life) -> None:
        self._task = task
        self._say = say
        self._life = life
        self._ledger = Ledger.read(self._folder, task.name)
        self._rows = Rows(Points(newest_released=self._ledger.newest, repeats=task.repeats))
        self._progress = Progress()
        self._tracker: Tracker | None = None
        self._pages = FailurePages(self._folder)
        self._ending: Ending | None = None
        self._placed = self._warned = False
        self._again = 0.0

    @property
    def _folder(self) -> Path:
        return Path(self._task.folder)

    def run(self) -> None:
        """Follow the events until the run is over, then close the tracker."""
        lines = read_on(self._folder / EVENTS, self._task.begin)
        over = False
        while not over and self._ending is None:
            over = self._life.over.is_set()
            for happened in next(lines):
                self._take_guarded(happened)
            if over or self._ending is not None or time.monotonic() >= self._again:
                self._try(self._bring_up_to_date)
            if not over and self._ending is None:
                self._life.over.wait(LOOK_S)
        self._rows.finish()
        self._try(self._finish)

    def _take_guarded(self, happened: Event) -> None:
        """Process one event; one that cannot be read is left out, with a warning."""
        try:
            self._take(happened)
        except Exception as error:
            traceback.print_exc()
            self._warn(error, f"an event `{happened.kind}` is left out")

    def _take(self, happened: Event) -> None:
        self._rows.add(happened)
        self._progress.read(happened)
        self._pages.read(happened)
        match happened:
            case kinds.Run():
                self._pages.skip(happened.pages)
            case kinds.Plan():
                self._placed = True
            case kinds.Result():
                status = "killed" if happened.status == "stopped" else happened.status
                text = happened.failure or happened.error
                self._ending = Ending(status, text.partition("\n")[0])

    def _try(self, act: Callable[[], None]) -> None:
        """Call this function; an exception becomes one warning, and the call is repeated later."""
        self._life.called_at = time.monotonic()
        try:
            act()
        except Exception as error:
            traceback.print_exc()
            self._again = time.monotonic() + AGAIN_S
            self._warn(error, "the run continues without it")
        finally:
            self._life.called_at = 0.0

    def _warn(self, error: Exception, what: str) -> None:
        """Report once which exception was raised, and its consequence."""
        if not self._warned:
            self._warned = True
            first = masked(f"{type(error).__name__}: {error}".splitlines()[0])
            log = self._folder / "logs" / f"track-{self._task.name}.log"
            self._say(warning=f"{self._task.name}: {first[:300]}; {what} ({log})")

    def _bring_up_to_date(self, over: bool = False) -> None:
        """Write the waiting rows and failure pages. `over`: the run is over."""
        if self._tracker is None and self._wanted():
            self._tracker = self._open_and_tell()
        if self._tracker is None:
            return
        if self._task.name == "kubeflow":  # it shows the newest state, final or not
            self._tracker.write(())
        while some := self._rows.queue[:ROWS]:
            # This is recorded first: if this process is killed in between, a step is missing
            # instead of existing twice.
            steps = [Position(row.fit, row.step) for row in some if row.step is not None]
            self._ledger.newest = max([self._ledger.newest, *steps])
            self._ledger.write(self._folder, self._task.name)
            self._life.called_at = time.monotonic()
            self._tracker.write(some)
            del self._rows.queue[: len(some)]
        for page in self._pages.due(over):
            self._tracker.page(page)

    def _wanted(self) -> bool:
        """Report whether it is time to open the tracker's run.

        That is not before the ranks have slots. If a program has its own tracker, it is only once
        the program reports; but MLflow's run creates the id that the program needs.
        """
        if self._task.program:
            return self._task.name == "mlflow" or any(
                row.step is not None for row in self._rows.queue
            )
        return self._placed

    def _open_and_tell(self) -> Tracker:
        """Open the tracker's run; tell the driver, which waits for it, of the first try."""
        if self._life.opened.is_set():
            return self._open()
        self._say(opening=True)
        try:
            return self._open()
        finally:
            self._life.opened.set()
            self._say(opening=False)

    def _open(self) -> Tracker:
        kind = import_module(f"raydist.watch.trackers.{self._task.name}")
        tracker = cast(
            "Tracker", getattr(kind, CLASSES[self._task.name])(self._task, self._ledger.id)
        )
        if self._task.name == "kubeflow":
            vars(tracker)["progress"] = self._progress
        self._ledger.id = tracker.id
        self._ledger.write(self._folder, self._task.name)
        self._say(
            variables=dict(tracker.variables),
            ready=True,
            track=masked(f"{self._task.name}  {tracker.link}"),
        )
        if why := getattr(tracker, "why_offline", ""):
            self._say(
                warning=f"{self._task.name} writes to the run folder ({why}); to upload it: "
                f"{tracker.link}"
            )
        return tracker

    def _finish(self) -> None:
        # The driver completes the last page just after the result, and closes our input then.
        self._life.over.wait(LOOK_S)
        try:
            self._bring_up_to_date(over=True)
        finally:  # the tracker may refuse a page, and must still learn how the run ended
            if self._tracker is not None:
                self._tracker.close(
                    self._ending or Ending("killed", "the driver ended without a result")
                )


def read_on(path: Path, begin: int) -> Iterator[list[Event]]:
    """Yield at each call the events that were added.

    A line that is still being written comes with the next ones.
    """
    cut = b""
    with path.open("rb") as file:
        file.seek(begin)
        while True:
            *whole, cut = (cut + file.read()).split(b"\n")
            parsed = [parse_event(line) for line in whole]
            yield [event for event in parsed if event is not None]


class Follows(Protocol):
    """What follows the events of one run."""

    def run(self) -> None:
        """Follow the events until the run is over."""


def follow_run(kind: Callable[[Task, Say, Life], Follows], end_s: float) -> None:
    """Follow one run in this process, which ends with it.

    `end_s`: the longest time after the run's end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM may be sent to a whole job: the run's own end comes first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(10)
    with open(0, "rb", buffering=0, closefd=False) as file:  # a buffer would take what follows
        task = Task(**json.loads(file.readline()))
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**facts: Any) -> None:
        with suppress(OSError):  # the driver is gone
            print(json.dumps(facts), file=pipe)

    life = Life(task.name, say, end_s)
    life.start()
    code = 1
    try:
        kind(task, say, life).run()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # threads of a library that failed would wait forever


if __name__ == "__main__":
    follow_run(Follower, END_S)
