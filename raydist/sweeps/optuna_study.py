"""Optuna's samplers by ask and tell, with a journal; the importance of settings. (driver)

The journal is in the folder of the sweep.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.settings.config import Sweep
from raydist.shared.errors import ConfigError
from raydist.sweeps.space import Choice, Interval, Space, params
from raydist.sweeps.trial import Objective, Trial, parse_objectives

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

NUMBER = "raydist_trial"
"""The attribute of Optuna's trials with raydist's trial number.

A trial that continues after a pause is reported twice.
"""
PACKAGES = {"cmaes": ("cmaes",), "gp": ("scipy", "torch"), "qmc": ("scipy",)}
"""What samplers need besides Optuna."""
LEAST = 4
"""Minimum number of finished trials from which the importance of settings is computed."""
POPULATION = 50
"""Trials of a generation of nsga2: Optuna's default.

With few trials it would make no second generation.
"""


def check_optuna(name: str) -> None:
    """Raise ConfigError if Optuna, or a package that this sampler needs, is not installed."""
    for package in ("optuna", *PACKAGES.get(name, ())):
        if find_spec(package) is None:
            cause = f"it needs {package}: pip install 'raydist[sweep]'"
            raise ConfigError.of("sweep.sampler", name, cause, "sweep.sampler=random")


class OptunaSampler:
    """A study of Optuna.

    Its proposals are in its journal, so a sweep that is continued gets the same ones.
    """

    def __init__(
        self,
        name: str,
        sweep: Sweep,
        space: Space,
        journal: Path,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open the study.

        `journal`: its file; no other process writes to it. `warn`: gets what a person should
        know.
        """
        self._name = name
        self._sweep = sweep
        self._space = space
        self._warn = warn
        self._objectives = parse_objectives(sweep.objective)
        self._distributions = {key: _distribution(part) for key, part in space.parts.items()}
        self._journal = journal
        mend(journal)
        with _quiet() as optuna:
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(journal))
            )
            self._study = optuna.create_study(
                storage=storage,
                study_name="sweep",
                load_if_exists=True,
                directions=[each.direction for each in self._objectives],
            )

    def propose(self, number: int) -> dict[str, str]:
        """Return Optuna's proposal; for a trial that it has proposed before, the same one.

        If the disk is full, the settings are random.
        """
        with _quiet():
            if (known := self._known(number)) is not None:
                return self._texts(known.params)
            # A new generator for each trial: its numbers do not depend on how often the sweep was
            # continued.
            self._study.sampler = _sampler(self._name, self._sweep, number)
            try:
                trial = self._study.ask(self._distributions)
                trial.set_user_attr(NUMBER, number)
            except OSError as error:
                self._not_written(error, f"the settings of trial {number} are random")
                return self._space.draw(self._sweep.seed, number)
            return self._texts(trial.params)

    def tell(self, trial: Trial) -> None:
        """Report to Optuna that a trial is paused or over.

        A paused trial counts as pruned; if it continues, its end is reported too. Of a trial that
        a person added, Optuna learns if its settings are of this space.
        """
        try:
            with _quiet() as optuna:
                self._tell(trial, optuna)
        except OSError as error:
            self._not_written(error, f"Optuna does not learn of trial {trial.number}")

    def _not_written(self, error: OSError, effect: str) -> None:
        mend(self._journal)
        self._warn(f"{self._journal} cannot be written ({error.strerror}): {effect}")

    def _tell(self, trial: Trial, optuna: Any) -> None:
        known, kinds = self._known(trial.number), optuna.trial.TrialState
        state = {"finished": kinds.COMPLETE, "failed": kinds.FAIL}.get(trial.state, kinds.PRUNED)
        values = [trial.values.get(each.name, float("nan")) for each in self._objectives]
        if any(value != value for value in values):
            state = kinds.FAIL if state == kinds.COMPLETE else state
        own = params(self._space.parts, trial.settings) if trial.added else None
        if (known.state == state) if known else own is None:
            return
        curve = dict(trial.curve) if len(self._objectives) == 1 else {}
        done = values if state == kinds.COMPLETE else None
        if known is not None and known.state == kinds.RUNNING:
            # Optuna has no public way to report values of a trial that another process began.
            # Without the id, samplers learn only how the trial ended.
            if (id := getattr(known, "_trial_id", None)) is not None:
                own_trial = optuna.trial.Trial(self._study, id)
                for step, value in curve.items():
                    own_trial.report(value, step)
            self._study.tell(known.number, done, state=state)
        elif done or known is None:  # it was paused, which is an end for Optuna; or added by hand
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    params=known.params if known else own,
                    distributions=self._distributions,
                    user_attrs={NUMBER: trial.number},
                    intermediate_values=curve,
                    values=done,
                )
            )

    def _known(self, number: int) -> FrozenTrial | None:
        """Return the newest of Optuna's trials that represents this trial of raydist."""
        found = [
            each
            for each in self._study.get_trials(deepcopy=False)
            if each.user_attrs.get(NUMBER) == number
        ]
        return found[-1] if found else None

    def _texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {
            key: part.text(params[key]) if isinstance(part, Interval) else params[key]
            for key, part in self._space.parts.items()
        }


def mend(journal: Path) -> None:
    """Remove an incomplete last line of the journal, and the lock.

    A driver leaves them if it was killed, or its disk was full, in the middle of a line: Optuna
    would read no further, and wait for the lock. Only this process writes to the journal: the
    folder of the sweep is locked.
    """
    Path(f"{journal}.lock").unlink(missing_ok=True)
    if journal.exists() and not (text := journal.read_bytes()).endswith(b"\n"):
        os.truncate(journal, text.rfind(b"\n") + 1)


def weighable(
    parts: Mapping[str, Choice | Interval], objectives: Sequence[Objective], trials: Sequence[Trial]
) -> list[Trial]:
    """Return the trials from which importance is computed; empty without Optuna or with few."""
    done = [
        trial
        for trial in trials
        if trial.state == "finished"
        and objectives
        and math.isfinite(trial.values.get(objectives[0].name, math.nan))  # Optuna takes no other
        and params(parts, trial.settings) is not None
    ]
    enough = len(done) >= LEAST and len(parts) >= 2 and find_spec("optuna") is not None
    return done if enough else []


def importance(
    parts: Mapping[str, Choice | Interval], objectives: Sequence[Objective], trials: Sequence[Trial]
) -> dict[str, float]:
    """Return the share of each setting in the variance of the first objective, as fractions of 1.

    Empty without Optuna, or with few trials.
    """
    if not (done := weighable(parts, objectives, trials)):
        return {}
    distributions = {key: _distribution(part) for key, part in parts.items()}
    # A side result must not fail a sweep that has ended well.
    with (
        _quiet() as optuna,
        contextlib.suppress(Exception),
    ):
        study = optuna.create_study(direction=objectives[0].direction)
        for trial in done:
            value, own = trial.values[objectives[0].name], params(parts, trial.settings)
            study.add_trial(
                optuna.trial.create_trial(params=own, distributions=distributions, value=value)
            )
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found: dict[str, float] = optuna.importance.get_param_importances(
            study, evaluator=evaluator
        )
        return {key: round(float(share), 4) for key, share in found.items()}
    return {}


def _distribution(part: Choice | Interval) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(part, Choice):
        return CategoricalDistribution(part.values)
    if part.whole:
        return IntDistribution(round(part.low), round(part.high), log=part.log)
    return FloatDistribution(part.low, part.high, log=part.log)


def _sampler(name: str, sweep: Sweep, number: int) -> BaseSampler:
    from optuna import samplers

    seed = (sweep.seed * 100_003 + number) % 2**32  # NumPy's seeds have 32 bits
    match name:
        case "gp":
            return samplers.GPSampler(seed=seed)
        case "cmaes":
            return samplers.CmaEsSampler(seed=seed)
        case "nsga2":
            population = min(POPULATION, max(4, (sweep.trials or 0) // 4))
            return samplers.NSGAIISampler(seed=seed, population_size=population)
        case "qmc":  # one sequence for all trials: the position in it is in the journal
            first = samplers.RandomSampler(seed=seed)
            return samplers.QMCSampler(
                scramble=True, seed=sweep.seed % 2**32, independent_sampler=first
            )
        case _:
            return samplers.TPESampler(seed=seed)


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Yield Optuna without its lines about each trial and about experimental features."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield optuna
