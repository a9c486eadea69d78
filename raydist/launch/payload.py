"""Pickled functions for the ranks, and the values and exceptions that they return. (driver)

Pickles travel only over Ray's authenticated channels, as Ray's own do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.messages.agent import RankValue
from raydist.shared.errors import ConfigError


@dataclass(frozen=True)
class RemoteCall:
    """A function that every rank calls, with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packed: bytes
    """Function, args and kwargs, pickled."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> RemoteCall:
        """Pickle a call. Raises ConfigError if the function or an argument can't be pickled."""
        import cloudpickle

        try:
            packed = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            name = getattr(function, "__qualname__", function)
            raise ConfigError(
                f"{name} or one of its arguments can't be pickled for the ranks: {error}"
            ) from error
        return cls(function, tuple(args), kwargs, packed)


def unpack_all(
    results: Sequence[RankValue], warn: Callable[[str], None]
) -> tuple[tuple[Any, ...], dict[int, BaseException]]:
    """Unpickle the values of the ranks and, by rank, the exceptions of those that failed.

    A rank that returned nothing has the value None; so has one whose value cannot be unpickled
    here, with a warning: its class may be in a file that only the ranks import, or its tensors on
    a GPU that this machine lacks.
    """
    import cloudpickle

    values: list[Any] = []
    exceptions: dict[int, BaseException] = {}
    for rank, result in enumerate(results):
        value = None
        if result.value is not None:
            try:
                value = cloudpickle.loads(result.value)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                warn(f"what rank {rank} returned can't be unpickled here ({why})")
        values.append(value)
        if result.error is not None:
            try:
                exceptions[rank] = cloudpickle.loads(result.error)
            except Exception:  # a class that only the rank can import: the rank's End has its text
                continue
    return tuple(values), exceptions
