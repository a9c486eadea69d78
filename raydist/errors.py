"""The error tree: what can end a run, the exit code of each, all safe to pickle. (either side)

RaydistError             1    something that raydist can name went wrong
├── ConfigError          2    a word was typed wrong, or asks for what is not there; nothing was started
├── LaunchError          1    the cluster, a node or a rank could not be brought up
├── RunFailed            1    a rank failed: carries the Result, with the first cause and each rank's exception
└── Stopped          128+n    ended by signal n
"""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable
from typing import Any


class RaydistError(Exception):
    """A failure with a message for a person, and its facts as attributes for a program."""

    exit_code = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception with keyword arguments dies when it is unpickled unless it says how to be rebuilt.
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[RaydistError], message: str, facts: dict[str, Any]) -> RaydistError:
    return kind(message, **facts)


class ConfigError(RaydistError):
    """A wrong word, value, file or size; raised before anything is started. Says which word to type instead."""

    exit_code = 2


class LaunchError(RaydistError):
    """Ray, a node, the fork server or the rendezvous could not be brought up."""


class RunFailed(RaydistError):
    """At least one rank failed. `result` is the whole Result; `exceptions` maps a rank to its exception."""

    result: Any
    exceptions: dict[int, BaseException]


class Stopped(RaydistError):
    """Ended by a signal, from a person (Ctrl-C) or from the cluster (SIGTERM)."""

    def __init__(self, signum: int, **facts: Any) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}", **facts)
        self.signum = signum
        self.exit_code = 128 + signum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signum,)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """`did you mean X? (known: …)`: the tail of every refusal of a word. `prefix` goes before X, as in `scale.`."""
    names = sorted(known)
    best = nearest(word, names)
    listed = ", ".join(names[:40]) + (f", … ({len(names)} in all)" if len(names) > 40 else "")
    return (f"did you mean {prefix}{best}? " if best else "") + f"(known: {listed})"


def why(error: BaseException) -> str:
    """Why Ray itself has ended an actor: its node was short of memory. Empty where it was not Ray."""
    if type(error).__name__ != "OutOfMemoryError":
        return ""
    used = re.search(r"was (\S+ used / \S+ limit)", str(error))
    figures = f" ({used[1]})" if used else ""
    return f"out of memory: Ray's memory monitor ended its actor, because the node had no more{figures}"


def cause(error: BaseException) -> str:
    """The last line of an error, without the traceback that Ray puts before it."""
    if by_ray := why(error):
        return by_ray
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    missing = "No module named 'raydist'" in last
    return last + (": install raydist on every node, for the Python that Ray runs with" if missing else "")
