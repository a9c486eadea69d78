"""What travels between driver and ranks: a function with its arguments there, values and exceptions back. (driver)

It is pickled, as all that Ray itself carries is, and goes only over Ray's own authenticated channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydist.errors import ConfigError


@dataclass(frozen=True)
class Call:
    """A function for every rank, and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    packed: bytes
    """The three as they travel."""

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The call, packed; a ConfigError if something in it can't travel."""
        import cloudpickle

        try:
            packed = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:
            name = getattr(function, "__qualname__", function)
            raise ConfigError(f"{name} or one of its arguments can't travel to the ranks: {error}") from error
        return cls(function, tuple(args), kwargs, packed)


def unpack_all(parcels: Sequence[Mapping[str, bytes]]) -> tuple[tuple[Any, ...], dict[int, BaseException]]:
    """What each rank returned (None for nothing), and what the failed ones raised."""
    import cloudpickle

    values: list[Any] = []
    exceptions: dict[int, BaseException] = {}
    for rank, parcel in enumerate(parcels):
        values.append(cloudpickle.loads(parcel["value"]) if "value" in parcel else None)
        if "error" in parcel:
            try:
                exceptions[rank] = cloudpickle.loads(parcel["error"])
            except Exception:  # a class that only the rank could import: its text is in the rank's End
                continue
    return tuple(values), exceptions
