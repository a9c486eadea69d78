"""Optuna's samplers by ask and tell, its journal in the folder of the sweep; the importance of settings. (driver)"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.shared.errors import ConfigError
from raydist.sweeps.space import Choice, Interval, Space
from raydist.sweeps.trial import Objective, Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

NUMBER = "raydist_trial"
"""The attribute of Optuna's trials with our number: one that is taken up again after it was paused is told twice."""


def check_optuna(name: str) -> None:
    """Raise ConfigError if Optuna, or a package that this sampler needs, is not installed."""
    for package in ("optuna", *(["cmaes"] if name == "cmaes" else [])):
        if find_spec(package) is None:
            cause = f"it needs {package}: pip install 'raydist[sweep]'"
            raise ConfigError.of("sweep.sampler", name, cause, "sweep.sampler=random")


class OptunaSampler:
    """A study of Optuna. What it has proposed is in its journal, so a sweep that is gone on with gets the same."""

    def __init__(self, name: str, seed: int, space: Space, wanted: Sequence[Objective], journal: Path) -> None:
        self._seed, self._name, self._wanted = seed, name, wanted
        self._space = {key: _distribution(part) for key, part in space.parts.items()}
        self._parts = space.parts
        with _quiet() as optuna:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
            self._study = optuna.create_study(
                storage=storage, study_name="sweep", load_if_exists=True,
                directions=[each.direction for each in wanted],
            )  # fmt: skip

    def propose(self, number: int) -> dict[str, str]:
        """Optuna's proposal; for a trial that it has proposed before, the same."""
        with _quiet():
            if (known := self._known(number)) is not None:
                return self._texts(known.params)
            # a new generator for each trial: its numbers do not depend on how often the sweep was gone on with
            self._study.sampler = _sampler(self._name, self._seed * 100_003 + number)
            trial = self._study.ask(self._space)
            trial.set_user_attr(NUMBER, number)
            return self._texts(trial.params)

    def tell(self, trial: Trial) -> None:
        """A trial is paused or over. One that is paused counts as pruned; if it goes on, its end is told too."""
        from optuna.trial import TrialState

        with _quiet() as optuna:
            known = self._known(trial.number)
            state = {"finished": TrialState.COMPLETE, "failed": TrialState.FAIL}.get(trial.state, TrialState.PRUNED)
            values = [trial.values.get(each.name, float("nan")) for each in self._wanted]
            if any(value != value for value in values):
                state = TrialState.FAIL if state == TrialState.COMPLETE else state
            if known is None or known.state == state:
                return
            curve = dict(trial.curve) if len(self._wanted) == 1 else {}
            done = values if state == TrialState.COMPLETE else None
            if known.state == TrialState.RUNNING:
                asked = optuna.trial.Trial(self._study, known._trial_id)
                for step, value in curve.items():
                    asked.report(value, step)
                self._study.tell(known.number, done, state=state)
            elif done:  # it was paused, which is an end for Optuna
                self._study.add_trial(
                    optuna.trial.create_trial(
                        params=known.params, distributions=self._space, user_attrs={NUMBER: trial.number},
                        intermediate_values=curve, values=done,
                    )
                )  # fmt: skip

    def _known(self, number: int) -> FrozenTrial | None:
        """The newest of Optuna's trials that stands for ours."""
        found = [each for each in self._study.get_trials(deepcopy=False) if each.user_attrs.get(NUMBER) == number]
        return found[-1] if found else None

    def _texts(self, params: Mapping[str, Any]) -> dict[str, str]:
        return {key: part.text(params[key]) if isinstance(part, Interval) else params[key]
                for key, part in self._parts.items()}  # fmt: skip


def importance(space: Space, wanted: Sequence[Objective], trials: Sequence[Trial]) -> dict[str, float]:
    """How much each setting matters to the first objective, in fractions of 1; empty without Optuna or few trials."""
    done = [trial for trial in trials if trial.state == "finished" and wanted and wanted[0].name in trial.values]
    if find_spec("optuna") is None or len(done) < 4 or len(space.parts) < 2:
        return {}
    distributions = {key: _distribution(part) for key, part in space.parts.items()}
    with _quiet() as optuna, contextlib.suppress(Exception):  # an aside must not fail a sweep that has ended well
        study = optuna.create_study(direction=wanted[0].direction)
        for trial in done:
            params = {key: _number(space.parts[key], text) for key, text in trial.settings.items()}
            value = trial.values[wanted[0].name]
            study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
        found: dict[str, float] = optuna.importance.get_param_importances(study)
        return {key: round(float(share), 4) for key, share in found.items()}
    return {}


def _number(part: Choice | Interval, text: str) -> Any:
    return text if isinstance(part, Choice) else int(text) if part.whole else float(text)


def _distribution(part: Choice | Interval) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(part, Choice):
        return CategoricalDistribution(part.values)
    if part.whole:
        return IntDistribution(round(part.low), round(part.high), log=part.log)
    return FloatDistribution(part.low, part.high, log=part.log)


def _sampler(name: str, seed: int) -> BaseSampler:
    from optuna import samplers

    kinds: dict[str, type[BaseSampler]] = {
        "tpe": samplers.TPESampler, "gp": samplers.GPSampler, "cmaes": samplers.CmaEsSampler,
        "nsga2": samplers.NSGAIISampler,
    }  # fmt: skip
    return kinds[name](seed=seed)


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Optuna without its lines about each trial and about what is experimental."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield optuna
