"""The settings of raydist.fit that may change while it runs (`raydist set`). (pure)"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from raydist.settings.config import Job
from raydist.settings.validate import check_fields, example_number
from raydist.shared.errors import ConfigError, nearest

CHANGEABLE = ("optim.lr", "train.clip", "train.evaluate_steps", "checkpoint.every")
"""The next step can follow another value of these, on every rank alike. A model, a data set or a
schedule is made from the others when the training begins."""
Number = float | int | None
Values = Mapping[str, Number]
"""By name: the value of a setting in CHANGEABLE."""


def read_changes(words: Sequence[str]) -> dict[str, Number]:
    """Return the settings of words such as `optim.lr=0.01`, by name.

    ConfigError: there are none, one may not change in a run, or it can't have this value.
    """
    if not words:
        raise ConfigError(
            f"raydist set: no setting; type optim.lr=0.01 (known: {', '.join(CHANGEABLE)})"
        )
    return dict(_read_change(*word.partition("=")[::2]) for word in words)


def _read_change(name: str, text: str) -> tuple[str, Number]:
    if name not in CHANGEABLE:
        guess = nearest(name, CHANGEABLE)
        cause = "raydist set can't change it in a run"
        raise ConfigError.of(name, text, cause, guess=guess and f"{guess}={text}", known=CHANGEABLE)
    field = _field(name)
    kinds = str(field.type).split(" | ")
    value: Number
    try:
        value = None if text == "null" and "None" in kinds else _number(kinds[0], text)
    except ValueError:
        what = "a whole number" if kinds[0] == "int" else "a number"
        what += ", or null" if "None" in kinds else ""
        example = f"{name}={example_number(field)}"
        raise ConfigError.of(name, text, f"must be {what}", example) from None
    check_fields(with_values(Job(), {name: value}), "")
    return name, value


def _number(kind: str, text: str) -> float | int:
    return int(text) if kind == "int" else float(text)


def _field(name: str) -> dataclasses.Field[Any]:
    part, _, own = name.partition(".")
    return next(field for field in dataclasses.fields(getattr(Job(), part)) if field.name == own)


def value_of(job: Job, name: str) -> Number:
    """Return the value of a setting in CHANGEABLE."""
    part, _, own = name.partition(".")
    value: Number = getattr(getattr(job, part), own)
    return value


def with_values(job: Job, values: Values) -> Job:
    """Return the job with other values of settings in CHANGEABLE."""
    for name, value in values.items():
        part, _, own = name.partition(".")
        job = dataclasses.replace(
            job, **{part: dataclasses.replace(getattr(job, part), **{own: value})}
        )
    return job


def described(before: Values, after: Values) -> str:
    """Return a change for a person: `optim.lr 0.05 -> 0.01`."""
    return ", ".join(f"{name} {_shown(before[name])} -> {_shown(after[name])}" for name in after)


def _shown(value: Number) -> str:
    return "null" if value is None else f"{value:g}"
