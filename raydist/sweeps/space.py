"""Overrides -> the space of a sweep: what is fixed, what differs, all combinations. (driver)

The overrides are in Hydra's grammar.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hydra.core.override_parser.types import IntervalSweep, Override, Transformer

from raydist.settings.compose import SweepConfig
from raydist.settings.config import Job
from raydist.settings.hydra_errors import config_errors
from raydist.settings.overrides import dictionary_of
from raydist.shared.errors import ConfigError

CHECKED = 64
"""Maximum number of combinations of a grid that are all checked before anything starts.

In a larger grid each value is checked alone.
"""


@dataclass(frozen=True)
class Choice:
    """A setting with a list of values."""

    values: tuple[str, ...]
    """The values as in overrides."""

    def draw(self, numbers: random.Random) -> str:
        """Return one of the values at random."""
        return numbers.choice(self.values)

    def ends(self) -> tuple[str, ...]:
        """Return all values: each is checked before anything starts."""
        return self.values

    def number(self, text: str) -> str | None:
        """Return a value as Optuna has it: its text; None if it is not one of them."""
        return text if text in self.values else None


@dataclass(frozen=True)
class Interval:
    """A number between two others, both included."""

    low: float
    high: float
    log: bool
    """Whether it is drawn by its logarithm: tag(log, interval(1e-4, 1e-1))."""
    whole: bool
    """Whether it is a whole number: int(interval(8, 64))."""

    def text(self, value: float) -> str:
        """Return a value as in overrides."""
        return str(round(value)) if self.whole else repr(float(value))

    def draw(self, numbers: random.Random) -> str:
        """Return a number in the interval, uniform or log-uniform."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.log:
            value = math.exp(numbers.uniform(math.log(max(low, 1e-300)), math.log(high)))
        else:
            value = numbers.uniform(low, high)
        return self.text(min(max(value, self.low), self.high))

    def ends(self) -> tuple[str, ...]:
        """Return the ends of the interval: they are checked before anything starts."""
        return self.text(self.low), self.text(self.high)

    def number(self, text: str) -> float | None:
        """Return the number of a value; None if the interval does not have it."""
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            return None
        return value if self.low <= value <= self.high else None


class Space:
    """What differs among the trials, and what does not."""

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self.parts: dict[str, Choice | Interval] = {}
        """By setting, in the order in which they were typed."""
        self._fixed: dict[str, str] = {}
        for key, override in config.overrides.items():
            if not override.is_sweep_override():
                self._fixed[key] = override.input_line or ""
                continue
            if key.startswith("sweep."):
                raise ConfigError.of(
                    key, override.get_value_string(), "a setting of the sweep itself has one value"
                )
            self.parts[key] = part_of(key, override)

    @property
    def combinations(self) -> int | None:
        """The number of combinations; None with an interval."""
        sizes = [len(part.values) for part in self.parts.values() if isinstance(part, Choice)]
        return math.prod(sizes) if len(sizes) == len(self.parts) else None

    def grid(self) -> Iterator[dict[str, str]]:
        """Return every combination of the choices; the last setting varies fastest."""
        lists = [part.ends() for part in self.parts.values()]
        return (dict(zip(self.parts, values, strict=True)) for values in itertools.product(*lists))

    def draw(self, seed: int, number: int) -> dict[str, str]:
        """Return the random settings of a trial: always the same for this seed and number."""
        numbers = random.Random(f"{seed} {number}")
        return {key: part.draw(numbers) for key, part in self.parts.items()}

    def job(self, settings: Mapping[str, str]) -> Job:
        """Return the checked Job with these settings.

        A trial that a person added may have more of them, also in place of what the others share.
        """
        own = [f"{self._element(key)}={value}" for key, value in settings.items()]
        fixed = [text for key, text in self._fixed.items() if key not in settings]
        return self._config.job([*fixed, *own])

    def _element(self, key: str) -> str:
        """Return the key of an override with the sign that it needs in Hydra's grammar."""
        if key in self._config.overrides:
            return self._config.overrides[key].get_key_element()
        return f"++{key}" if dictionary_of(key) else key

    def jobs(self) -> Iterator[Job]:
        """Yield the Jobs to check before anything starts.

        They are all combinations, or each value and each end of an interval.
        """
        first = {key: part.ends()[0] for key, part in self.parts.items()}
        if (self.combinations or math.inf) <= CHECKED:
            yield from (self.job(settings) for settings in self.grid())
            return
        yield self.job(first)
        for key, part in self.parts.items():
            yield from (self.job({**first, key: value}) for value in part.ends()[1:])


def params(
    parts: Mapping[str, Choice | Interval], settings: Mapping[str, str]
) -> dict[str, str | float] | None:
    """Return the settings of a trial as Optuna has them; None if they are not of this space.

    A person may have added a trial with other values, or with more settings.
    """
    found = {
        key: value
        for key, part in parts.items()
        if (value := part.number(settings.get(key, ""))) is not None
    }
    return found if settings.keys() == parts.keys() == found.keys() else None


def part_of(key: str, override: Override) -> Choice | Interval:
    value, text = override.value(), override.get_value_string()
    if not isinstance(value, IntervalSweep):
        with config_errors([override.input_line or ""]):
            values = tuple(
                str(each) for each in override.sweep_iterator(transformer=Transformer.encode)
            )
        if not values:
            raise ConfigError.of(key, text, "it has no value", f"{key}=A,B,C")
        return Choice(values)
    low, high = value.start or 0, value.end or 0
    if not low < high:
        cause = "the interval is empty" if low > high else "the interval has one number"
        right = f"{key}=interval({high:g},{low:g})" if low > high else f"{key}={low:g}"
        raise ConfigError.of(key, text, cause, f"'{right}'")
    if "log" in value.tags and low <= 0:
        raise ConfigError.of(
            key,
            text,
            "there is no logarithm of 0 and below",
            f"'{key}=interval({low:g},{high:g})'",
        )
    return Interval(
        float(low), float(high), "log" in value.tags, isinstance(low, int) and isinstance(high, int)
    )
