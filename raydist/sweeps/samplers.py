"""Propose the settings of the next trial: by a grid, random numbers, or Optuna. (driver)"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Protocol

from raydist.settings.config import Sweep
from raydist.shared.errors import ConfigError
from raydist.sweeps.folder import Folder
from raydist.sweeps.space import Interval, Space
from raydist.sweeps.trial import Trial

OPTUNA = ("tpe", "gp", "cmaes", "nsga2", "qmc")
"""The samplers of Optuna, the extra `sweep`."""
JOURNAL = "optuna.journal"
"""The file of Optuna's study in the folder of a sweep."""


class Sampler(Protocol):
    """A source of settings for trials, in the order of their numbers."""

    def propose(self, number: int) -> dict[str, str]:
        """Return the settings of a trial; the same ones for a number that it had before."""

    def tell(self, trial: Trial) -> None:
        """Process that a trial is paused or over."""


class Grid:
    """Every combination of the choices."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def propose(self, number: int) -> dict[str, str]:
        return next(islice(self._space.grid(), number, None))

    def tell(self, trial: Trial) -> None: ...


class Random:
    """Random settings, which depend only on the seed and the trial's number."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._seed = seed

    def propose(self, number: int) -> dict[str, str]:
        return self._space.draw(self._seed, number)

    def tell(self, trial: Trial) -> None: ...


def go_on_with(sweep: Sweep, recorded: str) -> Sweep:
    """Return the settings of a resumed sweep: `auto` is the sampler with which it began.

    With more trials `auto` may now mean a grid, whose first combinations would never run: their
    numbers belong to random trials. ConfigError if somebody asks for that.
    """
    if sweep.sampler == "grid" and recorded != "grid":
        cause = f"the sweep began with {recorded}, and a grid would lack its first combinations"
        raise ConfigError.of("sweep.sampler", "grid", cause, f"sweep.sampler={recorded}")
    return replace(sweep, sampler=recorded) if sweep.sampler == "auto" else sweep


def choose_sampler(sweep: Sweep, space: Space) -> tuple[str, int]:
    """Return (sampler, number of trials); ConfigError if the sampler can't handle the space."""
    combinations, name = space.combinations, sweep.sampler
    if name == "auto":
        all_fit = combinations is not None and combinations <= (sweep.trials or combinations)
        name = "grid" if all_fit else "random"
    intervals = [key for key, part in space.parts.items() if isinstance(part, Interval)]
    if name == "grid" and intervals:
        cause = f"{intervals[0]} is an interval, which has no grid"
        raise ConfigError.of(
            "sweep.sampler", "grid", cause, "sweep.sampler=random", f"{intervals[0]}=A,B,C"
        )
    if name == "cmaes" and len(intervals) < max(2, len(space.parts)):
        cause = "CMA-ES needs two or more settings, all of them intervals"
        raise ConfigError.of("sweep.sampler", "cmaes", cause, "sweep.sampler=tpe")
    if name == "grid":
        assert combinations is not None
        if sweep.trials is not None and sweep.trials < combinations:
            cause = f"the grid has {combinations} combinations"
            raise ConfigError.of(
                "sweep.trials",
                sweep.trials,
                cause,
                "sweep.sampler=random",
                f"sweep.trials={combinations}",
            )
        return name, combinations
    if sweep.trials is None:
        raise ConfigError.of(
            "sweep.trials", None, f"sweep.sampler={name} needs a number", "sweep.trials=20"
        )
    return name, sweep.trials


def sampler(name: str, sweep: Sweep, space: Space, folder: Folder) -> Sampler:
    """Return the sampler of this name. `folder`: that of the sweep."""
    if name == "grid":
        return Grid(space)
    if name == "random":
        return Random(space, sweep.seed)
    from raydist.sweeps.optuna_study import OptunaSampler

    return OptunaSampler(name, sweep, space, folder.path / JOURNAL, folder.warn)
