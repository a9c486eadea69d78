"""A sweep in one file: settings -> space -> folder -> cluster -> trials -> SweepResult. (driver)"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raydist.cluster import connect
from raydist.launch.payload import RemoteCall
from raydist.reporting.result import Result
from raydist.settings.compose import CONFIG, SweepConfig
from raydist.settings.config import Job, Sweep
from raydist.settings.overrides import Override
from raydist.settings.references import REFERENCE
from raydist.shared import kinds, signals
from raydist.shared.errors import ConfigError, Stopped
from raydist.shared.events import Events
from raydist.shared.home import expand_home
from raydist.sweeps import optuna_study, room, rules, samplers, table
from raydist.sweeps.conduct import Conductor, Setup
from raydist.sweeps.folder import Folder, read_summary, read_trials, wall_before
from raydist.sweeps.importance import RunningImportance
from raydist.sweeps.space import Space
from raydist.sweeps.table import SweepCommands, SweepScreen
from raydist.sweeps.trial import (
    OPEN,
    Objective,
    State,
    Trial,
    best_trials,
    parse_objectives,
    values_of,
)
from raydist.sweeps.upload import SweepUpload, reserve_stored_sweep
from raydist.watch.web.live_page import LivePage

MAY_CHANGE = ("sweep.", "watch.", "env.", "env=", "env_file=")
"""The overrides that may be typed together with sweep.resume=."""


@dataclass(frozen=True)
class SweepResult:
    """What `raydist.sweep` returns. `sweep.json` in its folder has all of it but `results`."""

    dir: Path
    """The folder of the sweep."""
    trials: tuple[Trial, ...]
    """Each with its number, settings, state, step, values of the objectives, metrics and folder."""
    best: tuple[Trial, ...] = ()
    """The best finished trial; with several objectives, the trials that no other trial beats in all
    of them."""
    results: dict[int, Result[Any]] = field(default_factory=dict)
    """By number, of each trial that finished in this call; it has the values that the job's
    function returned."""
    importance: dict[str, float] = field(default_factory=dict)
    """By setting, its share of the variance of the first objective; empty without Optuna, with
    few trials, or if only one setting varies."""

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ran the sweep: 1 if no trial has finished."""
        return int(not any(trial.state == "finished" for trial in self.trials))


def sweep(
    job: str | Callable[..., Any], *space: str, args: Sequence[Any] = (), **kwargs: Any
) -> SweepResult:
    """Run a job many times with different settings; return the trials.

    As many run at a time as the cluster has room for.

    - `job`: as for `raydist.run`.
    - `space`: settings as for `raydist.run`. Those with several values make the space, in Hydra's
      grammar: "model=mlp,small_cnn", "train.epochs=range(1,4)",
      "optim.lr=tag(log,interval(1e-4,1e-1))". A function gets its own by job.args:
      "job.args.hidden=16,32". "sweep.…" say who proposes, who ends early, how many.
    - `args`, `kwargs`: for a function, the same for all trials.

    ConfigError: a wrong setting, nothing was started; or no trial reports the objective. RunFailed,
    LaunchError: a trial failed, with sweep.on_failure=end. Stopped: SIGINT, SIGTERM or SIGHUP;
    all trials have saved their last state.

        raydist.sweep("digits", "optim.lr=0.1,0.01", "sweep.objective=min:test_loss").best
    """
    call = None if isinstance(job, str) else RemoteCall.of(job, args, kwargs)
    if isinstance(job, str):
        return run_sweep([f"job={job}", *space])
    return run_sweep(space, function=job, call=call)


def run_sweep(
    overrides: Sequence[str],
    name: str = CONFIG,
    config_dir: str | None = None,
    function: Callable[..., Any] | None = None,
    call: RemoteCall | None = None,
) -> SweepResult:
    """Check everything, create or reopen the folder, and run the trials.

    The arguments are those of SweepConfig.
    """
    began = time.monotonic()
    resumed, overrides, name = gone_on_with(overrides, name, function)
    config = SweepConfig(overrides, name, config_dir, function)
    space = Space(config)
    jobs = [checked(job) for job in space.jobs()]
    settings, objectives = jobs[0].sweep, parse_objectives(jobs[0].sweep.objective)
    earlier = read_summary(str(resumed)) if resumed else {}
    if resumed:
        settings = samplers.go_on_with(settings, earlier["sampler"])
    sampler_name, most = samplers.choose_sampler(settings, space)
    if sampler_name in samplers.OPTUNA:
        optuna_study.check_optuna(sampler_name)
    path = resumed or Path(config.make_folder())
    screen = SweepScreen(jobs[0].watch, objectives)
    folder = Folder(path, lambda text: screen.event(kinds.Warning(text=text)))
    # Without a rule the values so far stay those of the milestones of then.
    compared = earlier.get("milestones") if settings.prune == "none" else None
    facts = SweepRecord(
        config.override_texts,
        name,
        space,
        objectives,
        sampler_name,
        settings,
        config,
        compared or milestones(settings),
    )
    try:
        trials = {
            number: reopened(trial, settings, objectives)
            for number, trial in read_trials(path).items()
        }
        before_s = wall_before(path)
        rules.check_below_limits([*trials.values()], settings, before_s)
        if resumed:
            refuse_other_objectives(earlier, objectives, settings, sampler_name, [*trials.values()])
            refuse_other_milestones(earlier, settings, [*trials.values()])
        until = began + settings.hours * rules.HOUR_S - before_s if settings.hours else math.inf
        if not resumed:
            # A sweep may have been refused here that had other objectives.
            (path / samplers.JOURNAL).unlink(missing_ok=True)
        sampler = samplers.sampler(sampler_name, settings, space, folder)
        if not resumed:
            reserve_stored_sweep(jobs[0], path, {**facts.to_json("running", [], {}), "wall_s": 0.0})
    except BaseException:
        folder.close()  # a notebook goes on, and so may the sweep, with other settings
        raise

    def wall_s() -> float:
        return round(before_s + time.monotonic() - began, 3)

    def summarize(states: Sequence[Trial], how: str = "running") -> None:
        if how == "running":
            weights.update(states)
        record = {**facts.to_json(how, states, weights.shares), "wall_s": wall_s()}
        folder.summarize(record, states, list(space.parts))

    weights = RunningImportance(space.parts, objectives, lambda: conductor.refresh())

    most = max(most, sum(not trial.added for trial in trials.values()))
    setup = Setup(
        space, sampler, settings, most, objectives, folder, screen, summarize, call, until
    )
    conductor = Conductor(setup, trials)
    how = "failed"
    with LivePage(path, jobs[0].watch.page) as page, SweepUpload(path, jobs[0], folder.warn):
        screen.link(page.link)
        try:
            with signals.stoppable(), Events(path / "sweep.jsonl", (screen.event,)) as events:
                summarize(conductor.states)
                with connect.connect(room.job_of_all(jobs, settings.parallel or 1), events):
                    for job in jobs:
                        room.check_can_ever_fit(job)
                    screen.say(f"sweep {most} trials, sampler {sampler_name}, in {path}", "bold")
                    how = "finished" if conductor.run() else "stopped"
            weights.finish(conductor.states)
        except Stopped:
            how = "stopped"
            raise
        finally:
            states = conductor.states
            weights.close()
            summarize(states, how)
            folder.close()
            if states:
                limits = (
                    rules.raised_limits(states, settings, wall_s()) if how != "finished" else []
                )
                resume = facts.resumption(path, limits)
                commands = SweepCommands(facts.command, resume, bool(limits))
                lines = table.summary_facts(states, objectives, weights.shares, str(path), commands)
                screen.summary(
                    lines,
                    table.sweep_headline(states, time.monotonic() - began, how),
                    how == "finished",
                )
    return SweepResult(
        path,
        tuple(states),
        tuple(best_trials(states, objectives)),
        conductor.results,
        weights.shares,
    )


def gone_on_with(
    overrides: Sequence[str], name: str, function: Callable[..., Any] | None = None
) -> tuple[Path | None, list[str], str]:
    """Return (folder, overrides, config's name) of the sweep that `sweep.resume=` names.

    Without that setting the folder is None, and the others are unchanged. `function`: the job, if
    the caller passed one.
    """
    parsed = [Override.parse(text) for text in overrides]
    folder = next((each.value for each in reversed(parsed) if each.key == "sweep.resume"), None)
    if not folder:
        return None, [*overrides], name
    summary = read_summary(folder)
    if (job := summary.get("function")) and function is None:
        resumed = f"sweep.resume={folder}"
        call = in_python("sweep", job, [resumed])
        text = f"{resumed}: its job is the function {job}, which only Python can pass; type {call}"
        raise ConfigError(text, "sweep.resume", folder, call)
    unsaved = [Override.parse(text).key for text in summary["overrides"] if REFERENCE in text]
    for each in parsed:
        may_change = each.text.lstrip("+").startswith(MAY_CHANGE) or each.key in unsaved
        if not may_change and each.text not in summary["overrides"]:
            cause = "the sweep has its settings already; leave this one out"
            raise each.wrong(cause)
    every = [
        *summary["overrides"],
        *(text for text in overrides if Override.parse(text).key != "sweep.resume"),
    ]
    new_keys = {each.key for each in parsed}
    for key in unsaved:
        if key not in new_keys:
            raise ConfigError.of(
                key, None, "it has a secret, which is not saved; type it again", f"{key}=VALUE"
            )
    last = {Override.parse(text).key: text for text in every}  # in the order of the first
    return expand_home("sweep.resume", folder).absolute(), [*last.values()], summary["config_name"]


def checked(job: Job) -> Job:
    """Return the job of a trial; ConfigError for what a trial can't have."""
    if job.group == "inline":
        raise ConfigError.of("group", "inline", "a sweep runs on Ray", "group=ray")
    if job.resume == "auto":
        cause = "each trial is a new run; sweep.resume=FOLDER continues a sweep"
        raise ConfigError.of("resume", "auto", cause, "resume=none")
    return job


def refuse_other_objectives(
    summary: Mapping[str, Any],
    objectives: Sequence[Objective],
    settings: Sweep,
    sampler: str,
    trials: Sequence[Trial],
) -> None:
    """Raise ConfigError if a sweep continues with other objectives than it has used so far.

    Optuna's journal has the earlier ones, and so have the curves by which a rule compares trials.
    """
    signs = {"minimize": 1, "maximize": -1}
    used = [Objective(each["name"], signs[each["direction"]]) for each in summary["objectives"]]
    before, now = (",".join(each.text for each in some) for some in (used, objectives))
    compared = settings.prune != "none" and any(trial.curve for trial in trials)
    if before != now and (compared or sampler in samplers.OPTUNA):
        user = f"sweep.prune={settings.prune}" if compared else f"sweep.sampler={sampler}"
        cause = f"{user} has used {before}; leave this out, or begin a new sweep"
        raise ConfigError.of("sweep.objective", now, cause, f"sweep.objective={before}")


def refuse_other_milestones(
    summary: Mapping[str, Any], settings: Sweep, trials: Sequence[Trial]
) -> None:
    """Raise ConfigError if trials would be compared by values of other steps than so far.

    Each curve has one value for each milestone.
    """
    used, now = summary.get("milestones"), milestones(settings)
    if not used or "none" in (used["prune"], now["prune"]):
        return
    if not any(trial.curve for trial in trials):
        return
    for key, value in now.items():
        if used.get(key) != value:
            cause = f"the trials so far have the milestones of sweep.{key}={used.get(key)}"
            cause = f"{cause}; leave this out, or begin a new sweep"
            raise ConfigError.of(f"sweep.{key}", value, cause, f"sweep.{key}={used.get(key)}")


def milestones(settings: Sweep) -> dict[str, Any]:
    """Return the settings that say at which steps trials are compared."""
    found = {"prune": settings.prune, "min_steps": settings.min_steps}
    return found | ({"reduction": settings.reduction} if settings.prune == "asha" else {})


def reopened(trial: Trial, settings: Sweep, objectives: Sequence[Objective]) -> Trial:
    """Return a trial of an earlier part of the sweep, in its state at the start of this one.

    A trial that was under way waits, and so does a failed one that may be retried.
    """
    again = (
        trial.state == "failed"
        and settings.on_failure == "retry"
        and trial.failures <= settings.retries
    )
    state: State = "waiting" if again or trial.state in OPEN else trial.state
    return replace(trial, state=state, values=values_of(objectives, trial.metrics))


@dataclass(frozen=True)
class SweepRecord:
    """The content of sweep.json apart from the trials."""

    overrides: list[str]
    config_name: str
    space: Space
    objectives: tuple[Objective, ...]
    sampler: str
    settings: Sweep
    config: SweepConfig
    milestones: Mapping[str, Any] = field(default_factory=dict)
    """The settings that say at which steps trials were compared."""

    def to_json(
        self, state: str, trials: Sequence[Trial], importance: Mapping[str, float]
    ) -> Mapping[str, Any]:
        """Return the record as plain JSON."""
        return {
            "state": state,
            "overrides": self.overrides,
            "config_name": self.config_name,
            "function": self.config.function,
            "space": {
                key: self.config.overrides[key].get_value_string() for key in self.space.parts
            },
            "objectives": [
                {"name": each.name, "direction": each.direction} for each in self.objectives
            ],
            "sampler": self.sampler,
            "prune": self.settings.prune,
            "milestones": self.milestones,
            "best": [trial.number for trial in best_trials(trials, self.objectives)],
            "importance": importance,
        }

    def command(self, trial: Trial) -> str:
        """Return what a person types to run a trial alone."""
        fixed = [
            text
            for text in self.overrides
            if (key := Override.parse(text).key) not in trial.settings
            and not key.startswith(("sweep.", "hydra."))
        ]
        own = [f"{key}={value}" for key, value in trial.settings.items()]
        if self.config.function:
            return in_python("run", self.config.function, [*fixed, *own])
        named = ["--config-name", self.config_name] if self.config_name != CONFIG else []
        return shlex.join(["python", "-m", "raydist.train", *named, *self._searched, *fixed, *own])

    def resumption(self, folder: Path, limits: Sequence[str]) -> str:
        """Return what a person types to continue the sweep. `limits`: those to be raised."""
        settings = [f"sweep.resume={folder}", *limits]
        if self.config.function:
            return in_python("sweep", self.config.function, settings)
        return shlex.join(["raydist", "sweep", *self._searched, *settings])

    @property
    def _searched(self) -> list[str]:
        """The flag for the folder of settings, which sweep.json does not have."""
        return ["--config-dir", self.config.config_dir] if self.config.config_dir else []


def in_python(call: str, function: str, settings: Sequence[str]) -> str:
    """Return a call of raydist.run or raydist.sweep with a function (MODULE:NAME) and settings."""
    words = [function.rpartition(":")[2], *map(repr, settings)]
    return f"raydist.{call}({', '.join(words)})"
