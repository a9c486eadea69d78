"""The functions of a job that raydist.fit calls by name, and the check that it can. (rank side)"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raydist.shared.errors import ConfigError

Hook = Callable[[int, Mapping[str, Any]], object]
"""(step, values) -> what is not used."""


class Hooks(NamedTuple):
    """What a job wants to be called with, on every rank."""

    on_step: Hook | None = None
    on_evaluate: Hook | None = None

    def check(self) -> None:
        """Raise ConfigError if one of them cannot be called as `fit` does."""
        check_call("on_step", self.on_step, "step", "values")
        check_call("on_evaluate", self.on_evaluate, "step", "values")


def check_call(name: str, function: Any, *arguments: str) -> None:
    """Raise ConfigError if a function of the job does not take these arguments.

    `name`: the argument of `fit`. None is no function, and is fine.
    """
    if function is None:
        return
    call = f"raydist.fit calls {name}({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{name}={function!r} cannot be called: {call}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions in C it is not known
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        given = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(f"{name}={given}{signature}: {error}; {call}") from None
