"""Start, observe and end the trials of a sweep, from the first to the last. (driver)

A trial starts when there is room for it. Each is a run in its own thread, on its own part of the
cluster. The main thread decides, by rules.py.
"""

from __future__ import annotations

import itertools
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from raydist.flow import run_job
from raydist.launch import run_storage
from raydist.launch.gangs import Gangs, OneOfMany
from raydist.launch.payload import RemoteCall
from raydist.reporting.result import Result
from raydist.settings.compose import save_settings
from raydist.settings.config import Job, Sweep
from raydist.shared import kinds, signals
from raydist.shared.errors import ConfigError, RaydistError, Stopped
from raydist.shared.events import read_kind
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.shared.signals import Halt
from raydist.sweeps import room, rules
from raydist.sweeps.folder import Folder
from raydist.sweeps.rules import Prune
from raydist.sweeps.samplers import Sampler
from raydist.sweeps.space import Space
from raydist.sweeps.table import SweepScreen
from raydist.sweeps.trial import Objective, Trial, WatchedTrial, unreported_objective

END_S = 60.0
"""Longest wait for trials to end after an error of raydist itself."""
POLL_S = 0.2
"""Seconds between two drawings of the table."""
ROOM_S = 2.0
"""Maximum seconds between two checks for room, reached gradually while no trial ends.

Each look asks Ray for all nodes and placement groups.
"""


@dataclass(frozen=True)
class Reached:
    """Message: a trial has reported its objective at the next milestone."""

    number: int
    step: int
    value: float


@dataclass(frozen=True)
class Over:
    """Message: the run of a trial has ended."""

    number: int
    error: BaseException | None


class OutOfTime(Exception):
    """The hours of the sweep are over, and there is more to run."""


@dataclass(frozen=True)
class Refresh:
    """Message: the summary is to be written again."""


Message = Reached | Over | Refresh | Stopped | None
"""None: a trial was given slots, or lost them."""


@dataclass
class Live:
    """A trial under way."""

    watched_trial: WatchedTrial
    milestones: int
    """Number of milestones that the trial has reached; its own thread counts them."""
    thread: threading.Thread
    halt: Halt = field(default_factory=Halt)
    began: float = field(default_factory=time.monotonic)
    intent: Literal["", "paused", "ended", "stopped"] = ""
    """The trial's state once it has stopped."""


@dataclass(frozen=True)
class Setup:
    """What a Conductor works with."""

    space: Space
    sampler: Sampler
    sweep: Sweep
    most: int
    """Total number of trials that the sampler proposes."""
    objectives: tuple[Objective, ...]
    """The objectives."""
    folder: Folder
    screen: SweepScreen
    summarize: Callable[[Sequence[Trial]], None]
    """Writes the summary of the sweep."""
    call: RemoteCall | None = None
    until: float = math.inf
    """When `sweep.hours` are over, by time.monotonic()."""


class Conductor:
    """The loop that runs the trials.

    `trials` is their state at any time, `results` has those that ran to their end here.
    """

    def __init__(self, setup: Setup, trials: dict[int, Trial]) -> None:
        """Prepare the sweep. `trials`: those of an earlier part of it."""
        self.trials = trials
        self.results = dict[int, Result[Any]]()
        self._setup = setup
        sweep, objectives = setup.sweep, setup.objectives
        self._rule = Prune(
            sweep.prune,
            objectives[0] if objectives else Objective("", 1),
            sweep.min_steps,
            sweep.reduction,
        )
        self._live: dict[int, Live] = {}
        self._begun = set(trials)
        """Trials that may have a state to continue from; a new one has nothing of its own."""
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._gangs = Gangs()
        self._error: BaseException | None = None
        """Why no other trial is started."""
        self._first_failed = next((each for each in self.states if each.state == "failed"), None)
        self._look_at, self._look_s = 0.0, POLL_S
        """When to look for room again, by time.monotonic(), and how long to wait after that look.

        The second applies if the look finds no room.
        """

    @property
    def states(self) -> list[Trial]:
        """All trials, by number."""
        return [self.trials[number] for number in sorted(self.trials)]

    def refresh(self) -> None:
        """Have the summary written again; any thread may call it."""
        self._messages.put(Refresh())

    def run(self) -> bool:
        """Run all trials; return False if the hours of the sweep were over before.

        Raise what else ended the sweep early: Stopped, or the error of a trial.
        """
        try:
            with signals.passed_to(self._messages.put):
                while True:
                    self._look_at_time()
                    self._take_added()
                    while self._error is None and self._start_next():
                        pass
                    if not self._live and (self._error is not None or self._next() is None):
                        break
                    self._hear()
        finally:
            self._stop_all(Stopped(signal.SIGTERM))
            for live in self._live.values():
                live.thread.join(END_S)
            self._gangs.clear(close=True)
        if self._error is None or isinstance(self._error, OutOfTime):
            return self._error is None
        raise self._error

    def _look_at_time(self) -> None:
        """End the sweep if its hours are over and there is more to run."""
        if self._error is not None or time.monotonic() < self._setup.until:
            return
        if self._live or self._next() is not None:
            hours = f"sweep.hours={self._setup.sweep.hours:g}"
            self._setup.screen.say(
                f"stop  {hours} are over: the trials keep their last state", "yellow"
            )
            self._end(OutOfTime(hours))

    def _take_added(self) -> None:
        """Create the trials that a person has added.

        Their numbers follow those that the sampler proposes, whose settings depend on the number.
        """
        for request, settings in self._setup.folder.requests.new_trials(self.states):
            number = max(self._setup.most, max(self.trials, default=0) + 1)
            trial = Trial(number, {**settings}, dir=str(number), added=request)
            self._change(trial, show=True)

    @property
    def _more(self) -> bool:
        """Whether the sampler may propose another trial."""
        return sum(not trial.added for trial in self.trials.values()) < self._setup.most

    def _next(self) -> int | None:
        """Return the number of the next trial, which may be a new one."""
        number = rules.next_trial(self.states, self._rule, self._more)
        if number is not None or not self._more:
            return number
        number = next(number for number in itertools.count() if number not in self.trials)
        self._change(Trial(number, self._setup.sampler.propose(number), dir=str(number)))
        return number

    def _start_next(self) -> bool:
        """Start the next trial if there is room for it.

        Return whether it was started, or could never be.
        """
        if len(self._live) >= (self._setup.sweep.parallel or len(self.trials) + 1):
            return False
        if not all(live.watched_trial.settled for live in self._live.values()):
            if any(live.watched_trial.waiting for live in self._live.values()):
                self._gangs.clear()  # they may hold what that trial waits for
            return False
        if time.monotonic() < self._look_at or (number := self._next()) is None:
            return False
        try:
            wanted_job = self._setup.space.job(self.trials[number].settings)
            if self.trials[number].added:  # those of the sweep were checked before its start
                room.check_can_ever_fit(wanted_job)
            job = room.find_room(wanted_job, self._gangs, alone=not self._live)
        except ConfigError as error:
            self._fail(number, error)
            return True
        if job is None:
            self._look_at = time.monotonic() + self._look_s
            self._look_s = min(2 * self._look_s, ROOM_S)
            return False
        self._start(number, job)
        return True

    def _start(self, number: int, job: Job) -> None:
        before = self.trials[number]
        # asha promotes a trial from a milestone once: a trial that continues after a pause has
        # passed those that it has reached.
        passed = max(before.passed, len(before.curve))
        trial = self._change(replace(before, state="running", passed=passed, why=""), show=True)
        sweep = replace(job.sweep, dir=str(self._setup.folder.path))
        watch = replace(job.watch, page=False)  # the sweep has a page, with those of its trials
        job = replace(
            job, dir=str(self._setup.folder.path / trial.dir), group="ray", sweep=sweep, watch=watch
        )
        thread = threading.Thread(
            target=self._run,
            args=(trial, job, number in self._begun),
            name=f"raydist-trial-{number}",
            daemon=True,
        )
        self._begun.add(number)
        self._live[number] = Live(WatchedTrial(self._setup.objectives), len(trial.curve), thread)
        thread.start()

    def _run(self, trial: Trial, job: Job, again: bool) -> None:
        """Run a trial, in its own thread. `again`: it may have run before."""
        live = self._live[trial.number]

        def read(event: Event) -> None:
            self._read(trial.number, live, event)

        error: BaseException | None = None
        try:
            if again and (own := run_storage.own_newest(job)):
                job = replace(job, resume=own)
                self._recall(live, Path(job.dir) / EVENTS)
            write_settings(job, trial.settings)
            self.results[trial.number] = run_job(
                job, self._setup.call, OneOfMany(read, live.halt, self._gangs)
            )
        except BaseException as raised:
            error = raised
        self._messages.put(Over(trial.number, error))

    @staticmethod
    def _recall(live: Live, file: Path) -> None:
        """Read what a trial reported before.

        If it was killed after its last report, it reports nothing now.
        """
        with suppress(OSError):
            for event in read_kind(kinds.Report, file):
                live.watched_trial.add(event)

    def _read(self, number: int, live: Live, event: Event) -> None:
        """Process an event of a trial, in the trial's thread."""
        settled = live.watched_trial.settled
        reported = live.watched_trial.add(event)
        if isinstance(event, kinds.Warning):
            self._setup.screen.event(event, number)
        if reported and isinstance(event, kinds.Report) and self._rule.kind != "none":
            step, value = event.step or 0, event.values[self._setup.objectives[0].name]
            while step >= self._rule.milestone(live.milestones):
                live.milestones += 1
                self._messages.put(Reached(number, step, value))
        if settled != live.watched_trial.settled:
            self._messages.put(None)

    def _hear(self) -> None:
        """Process a message, if one arrives before it is time to look for room again."""
        try:
            message = self._messages.get(timeout=POLL_S)
        except queue.Empty:
            message = None
        match message:
            case Stopped():
                self._error = message
                self._setup.screen.say(
                    f"stop  {message}: the trials keep their last state", "yellow"
                )
                self._stop_all(message)
            case Reached():
                self._reached(message)
            case Over():
                self._over(message)
            case Refresh():
                self._setup.summarize(self.states)
        self._setup.screen.draw(
            self.states, {number: live.watched_trial for number, live in self._live.items()}
        )

    def _reached(self, message: Reached) -> None:
        live = self._live[message.number]
        trial = self._change(self.trials[message.number].at_milestone(message.step, message.value))
        if live.intent:
            return
        match rules.verdict(self.states, message.number, self._rule, self._more):
            case "continue":
                self._change(replace(trial, passed=len(trial.curve)))
            case what:
                live.intent = "paused" if what == "pause" else "ended"
                live.halt.stop(Stopped(signal.SIGTERM))

    def _over(self, message: Over) -> None:
        live, before = self._live.pop(message.number), self.trials[message.number]
        self._look_at = 0.0
        self._look_s = POLL_S
        trial = self.trials[message.number] = replace(
            before,
            step=max(live.watched_trial.step, before.step),
            values={**before.values, **live.watched_trial.values},
            metrics={**before.metrics, **live.watched_trial.metrics},
            wall_s=before.wall_s + time.monotonic() - live.began,
        )
        match message.error:
            case None:
                self._tell(replace(trial, state="finished", passed=len(trial.curve)))
                self._check_objectives(trial)
            case Stopped() as stopped:
                self._tell(replace(trial, state=live.intent or "stopped"))
                alone = not live.intent  # somebody has stopped this trial, not the sweep
                if alone and self._setup.sweep.on_failure == "end":
                    self._end(stopped)
            case RaydistError() as error:
                self._fail(trial.number, error)
            case error:
                self._change(
                    replace(trial, state="failed", why=f"{type(error).__name__}: {error}"),
                    show=True,
                )
                self._end(error)

    def _check_objectives(self, trial: Trial) -> None:
        """End the sweep if the job reports no such objective; warn if only this trial has not."""
        objectives = self._setup.objectives
        if (wrong := unreported_objective(trial, objectives, self.states)) is not None:
            self._end(wrong)
        elif lacks := [each.name for each in objectives if each.name not in trial.values]:
            self._setup.folder.warn(
                f"trial {trial.number} has finished, but has not reported {', '.join(lacks)}: it "
                "cannot be the best"
            )

    def _fail(self, number: int, error: RaydistError) -> None:
        """Handle the failure of a trial as `sweep.on_failure` specifies."""
        trial = self.trials[number]
        again = (
            self._setup.sweep.on_failure == "retry"
            and trial.failures < self._setup.sweep.retries
            and self._error is None
        )
        trial = replace(
            trial,
            state="waiting" if again else "failed",
            failures=trial.failures + 1,
            why=error.message,
        )
        self._tell(trial)
        if not again:
            self._first_failed = self._first_failed or trial
        if self._setup.sweep.on_failure == "end":
            self._end(error)
        most, first = self._setup.sweep.max_failures, self._first_failed
        if most is not None and first and rules.failed_count(self.states) >= most:
            cause = f"the first was trial {first.number}: {first.why}"
            self._end(RaydistError(f"sweep.max_failures={most} trials have failed; {cause}"))

    def _tell(self, trial: Trial) -> None:
        """Handle a change of a trial's state."""
        self._change(trial, show=True)
        if trial.state in ("finished", "failed", "paused", "ended"):
            self._setup.sampler.tell(trial)

    def _change(self, trial: Trial, show: bool = False) -> Trial:
        self.trials[trial.number] = trial
        self._setup.folder.note(trial)
        if show:
            self._setup.screen.changed(trial, self.states)
            self._setup.summarize(self.states)
        return trial

    def _end(self, error: BaseException) -> None:
        """Start no other trial, and stop those under way, which can be continued later."""
        if self._error is None:
            self._error = error
            self._stop_all(Stopped(signal.SIGTERM))

    def _stop_all(self, stopped: Stopped) -> None:
        for live in self._live.values():
            live.intent = live.intent or "stopped"
            live.halt.stop(stopped)


def write_settings(job: Job, settings: Mapping[str, str]) -> None:
    """Write the settings into a run folder."""
    folder = Path(job.dir, ".hydra")
    own = OmegaConf.create([f"{key}={value}" for key, value in settings.items()])
    with suppress(OSError):  # a full disk: the record of the trial warns
        folder.mkdir(parents=True, exist_ok=True)
        save_settings(job, folder / "config.yaml")
        OmegaConf.save(own, folder / "overrides.yaml")
