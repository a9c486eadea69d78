"""The screen of a sweep: a live table in a terminal, else a line per change; a summary. (driver)"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TextIO

from raydist.reporting import wording
from raydist.reporting.console import screen
from raydist.reporting.progress import number_text
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.rank_names import counted
from raydist.sweeps.trial import Objective, Trial, WatchedTrial, all_settings, best_trials

STYLES = {"finished": "green", "failed": "red", "paused": "dim", "ended": "dim"}


class SweepScreen:
    """The screen of a sweep: a line for each change of a trial, and in a terminal the table."""

    def __init__(
        self, settings: Watch, objectives: Sequence[Objective], stream: TextIO | None = None
    ) -> None:
        self._quiet = settings.progress == "none"
        self._screen = screen(settings, sys.stdout if stream is None else stream)
        self._objectives = objectives
        self._warnings: set[str] = set()

    def say(self, text: str, style: str = "") -> None:
        """Write a line, unless the sweep is to be quiet."""
        if not self._quiet:
            self._screen.say(text, style)

    def link(self, page: str) -> None:
        """Show the address of the sweep's page, if it has one."""
        if page:
            self._screen.say(f"page  {page}")

    def event(self, event: Event, trial: int | None = None) -> None:
        """Show an event of the sweep or of a trial: where Ray is, and each warning once."""
        match event:
            case kinds.Cluster():
                self.say(wording.cluster_line(event))
            case kinds.Warning() if event.text not in self._warnings:
                self._warnings.add(event.text)
                of_trial = "" if trial is None else f" (trial {trial})"
                self._screen.say(f"warning: {event.text}{of_trial}", "yellow")

    def changed(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """Write that a trial has begun, is paused or is over."""
        mark = " (best)" if trial in best_trials(trials, self._objectives) else ""
        values = [f"{name} {number_text(value)}" for name, value in trial.values.items()]
        wall = [f"{trial.wall_s:.1f} s"] if trial.wall_s else []
        own = settings_text({key: brief(value) for key, value in trial.settings.items()})
        parts = [own, *([f"step {trial.step}"] if trial.step else []), *values, *wall]
        number = f"{trial.number} (added by hand)" if trial.added else f"{trial.number}"
        text = f"trial {number}: {trial.state}{mark}  {'  '.join(parts)}"
        self.say(text + (f"\n  {trial.why}" if trial.why else ""), STYLES.get(trial.state, ""))

    def draw(self, trials: Sequence[Trial], live: Mapping[int, WatchedTrial]) -> None:
        """Redraw the table."""
        if not self._quiet and trials:
            self._screen.show(list(table_rows(trials, live, self._objectives)), time.monotonic())

    def summary(self, facts: Sequence[tuple[str, str]], headline: str, good: bool) -> None:
        """Write how the sweep ended."""
        self._screen.close()
        self._screen.say(headline, "bold green" if good else "bold red")
        self._screen.facts(facts)


def table_rows(
    trials: Sequence[Trial], live: Mapping[int, WatchedTrial], objectives: Sequence[Objective]
) -> Iterator[list[str]]:
    """Yield the table: headings, the best trials, those under way, then the others, newest first.

    The settings come last: a terminal that is too narrow cuts them off, not the objectives.
    """
    keys = all_settings(trials)
    leaders = best_trials(trials, objectives)
    yield ["trial", "state", "step", *(each.name for each in objectives), *keys]
    under_way = [trial for trial in trials if trial.number in live]
    others = [
        trial for trial in reversed(trials) if trial not in leaders and trial not in under_way
    ]
    for trial in [*leaders, *under_way, *others]:
        now = live.get(trial.number)
        values = {**trial.values, **(now.values if now else {})}
        total = now.metrics.get("steps") if now else None
        mark = "*" if trial in leaders else ""
        yield [
            f"{trial.number}{mark}",
            trial.state + (", added" if trial.added else ""),
            f"{now.step if now else trial.step}" + (f"/{total}" if total else ""),
            *(number_text(values[each.name]) if each.name in values else "" for each in objectives),
            *(brief(trial.settings.get(key, "")) for key in keys),
        ]


def brief(value: str) -> str:
    """Format a value of a setting with few digits."""
    digits = value.lstrip("-").replace(".", "", 1).replace("e-", "", 1)
    return f"{float(value):.4g}" if digits.isdigit() and len(digits) > 6 else value


def settings_text(settings: Mapping[str, str]) -> str:
    """Format settings as `optim.lr=0.01 model=mlp`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def sweep_headline(trials: Sequence[Trial], wall_s: float, how: str) -> str:
    """Format the headline: `sweep finished in 35.2 s: 12 finished, 3 paused`."""
    states = dict.fromkeys(trial.state for trial in trials)
    parts = [f"{sum(trial.state == state for trial in trials)} {state}" for state in states]
    return f"sweep {how} in {wall_s:.1f} s: {counted(len(trials), 'trial')}, {', '.join(parts)}"


class SweepCommands(NamedTuple):
    """What a person may type after a sweep."""

    again: Callable[[Trial], str]
    """To run a trial alone."""
    resume: str
    """To continue the sweep."""
    limited: bool
    """Whether a limit has ended it, which `resume` raises."""


def summary_facts(
    trials: Sequence[Trial],
    objectives: Sequence[Objective],
    shares: Mapping[str, float],
    folder: str,
    commands: SweepCommands,
) -> list[tuple[str, str]]:
    """Return (name, value) lines. `shares`: the importance of settings."""
    facts = []
    for trial in best_trials(trials, objectives)[:5]:
        values = [f"{each.name} {number_text(trial.values[each.name])}" for each in objectives]
        facts.append(
            ("best", f"trial {trial.number}: {', '.join(values)}, {settings_text(trial.settings)}")
        )
    if facts:
        facts.append(("again", commands.again(best_trials(trials, objectives)[0])))
    if shares:
        facts.append(
            ("importance", ", ".join(f"{key} {share:.2f}" for key, share in shares.items()))
        )
    unfinished = [trial for trial in trials if trial.state in ("waiting", "running", "stopped")]
    if unfinished or commands.limited:
        facts.append(("continue", commands.resume))
    return [*facts, ("folder", folder), ("records", "sweep.json, sweep.csv")]
