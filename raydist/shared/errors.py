"""The errors that end a run, and the exit code of each. All can be pickled. (either side)

RaydistError             1    something that raydist can name went wrong
├── ConfigError          2    a setting is wrong, or names what does not exist; nothing was started
├── NonFiniteError       1    the loss or the gradient is NaN or infinite (train.nan=end)
├── LaunchError          1    the cluster, a node or a rank could not be started
├── RunFailed            1    a rank failed; the Result has the cause and all exceptions
└── Stopped          128+n    stopped by signal n

CallLost ends no run: it says that an agent's answer will not come.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
import time
from collections.abc import Iterable
from typing import Any


class RaydistError(Exception):
    """Base class of the errors that raydist raises.

    `message` is its text; `exit_code` is that of the command. It can be pickled.
    """

    exit_code = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls an exception with its positional arguments only, which loses keyword
        # arguments.
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[RaydistError], message: str, facts: dict[str, Any]) -> RaydistError:
    return kind(message, **facts)


class ConfigError(RaydistError):
    """A setting, value, file or size is wrong. Exit code 2.

    The message has the value, the cause and what to type. It is raised before anything is started,
    unless only a node or a rank can know.

    - `key`: the setting, group or flag, as in `optim.lr`; empty if the error concerns none.
    - `value`: the wrong value, as typed or as read; None if there is none.
    - `suggestion`: what to type instead, as in `optim.lr=0.05`; empty if raydist has no suggestion.
    """

    exit_code = 2
    key: str
    value: Any
    suggestion: str

    def __init__(
        self, message: str, key: str = "", value: Any = None, suggestion: str = ""
    ) -> None:
        super().__init__(message, key=key, value=value, suggestion=suggestion)

    @classmethod
    def of(
        cls,
        key: str,
        value: Any,
        cause: str,
        *suggestions: str,
        guess: str | None = None,
        known: Iterable[str] | None = None,
        text: str = "",
    ) -> ConfigError:
        """`key=value: cause; set SUGGESTION or SUGGESTION`.

        `guess`: what was probably meant: "did you mean …?". `known`: names to list. `text`: what
        was typed, if not `key=value`.
        """
        suggestion = guess or next(iter(suggestions), "")
        message = (
            text or (key if value is None else f"{key}{' ' if key.startswith('-') else '='}{value}")
        ) + f": {cause}"
        if guess:
            message += f"; did you mean {guess}?"
        elif suggestions:
            message += (
                f"; {'use' if suggestion.startswith('-') else 'set'} {' or '.join(suggestions)}"
            )
        return cls(message + (f" ({known_names(known)})" if known else ""), key, value, suggestion)

    @classmethod
    def unknown(
        cls, key: str, value: object, known: Iterable[str], cause: str = "unknown value"
    ) -> ConfigError:
        """`key=value: cause; did you mean key=NEAREST? (known: …)`."""
        known = [*known]
        guess = nearest(str(value), known, f"{key} " if key.startswith("-") else f"{key}=")
        return cls.of(key, value, cause, guess=guess, known=known)


class NonFiniteError(RaydistError):
    """The loss or the gradient is NaN or infinite, with `train.nan=end`. Exit code 1.

    There is no restart: it would come to the same step.
    """


class LaunchError(RaydistError):
    """Ray, a node, the fork server or the rendezvous could not be started. Exit code 1."""


NO_MORE_PROCESSES = (
    "the kernel refuses another process or thread: a limit of the user (ulimit -u) or of the "
    "container (--pids-limit) is reached; raise it, or start fewer ranks"
)


def is_refusal(error: object) -> bool:
    """Report whether the kernel has refused a process or a thread (EAGAIN of clone).

    The text tells it: Python and C++ raise a plain RuntimeError for a thread.
    """
    text = str(error)
    return "can't start new thread" in text or os.strerror(errno.EAGAIN) in text


def as_raydist_error(error: Exception) -> RaydistError:
    """Return an error of Ray, or a fault of raydist itself, as a LaunchError.

    Each run thus has a result with its error. The LaunchError's `unexpected` is True, and the
    original error is its cause. A RaydistError is returned unchanged.
    """
    if isinstance(error, RaydistError):
        return error
    if is_refusal(error):
        return LaunchError(NO_MORE_PROCESSES)
    made = LaunchError(f"{type(error).__name__}: {last_line(error)}", unexpected=True)
    made.__cause__ = error
    return made


class RunFailed(RaydistError):
    """At least one rank failed, and the run was not restarted, or not again. Exit code 1.

    `result` is the whole Result. `exceptions` maps each failed rank to its exception: the object
    itself where it could be pickled, otherwise a RaydistError with its text.
    """

    result: Any
    exceptions: dict[int, BaseException]


class Stopped(RaydistError):
    """A signal stopped the run: SIGINT (Ctrl-C), SIGTERM or SIGHUP.

    `signum` is its number, the exit code 128 + `signum`; `at` is when it came, in seconds since
    the epoch.
    """

    def __init__(self, signum: int, **facts: Any) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}", **facts)
        self.signum = signum
        self.exit_code = 128 + signum
        self.at = time.time()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signum,)


class CallLost(Exception):
    """The call with a request to an agent failed: its node is gone, or a connection broke.

    Nobody knows whether the agent got the request. What an agent itself raises arrives as it is.
    `cause` is the error of the call.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


def cause_of(error: BaseException) -> BaseException:
    """Return the error of the call if a call was lost, any other error unchanged."""
    return error.cause if isinstance(error, CallLost) else error


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str | None:
    """Return the known name closest to `name`, with `prefix` before it; None if none is close."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return prefix + by_lower[close[0]] if close else None


def known_names(known: Iterable[str]) -> str:
    """Return `known: a, b, c`, with at most 40 names."""
    names = sorted(known)
    return f"known: {', '.join(names[:40])}" + (
        f", … ({len(names)} in all)" if len(names) > 40 else ""
    )


def out_of_memory(error: BaseException) -> str:
    """Return the text for an actor that Ray's memory monitor ended; empty for any other error."""
    error = cause_of(error)
    if type(error).__name__ != "OutOfMemoryError":
        return ""
    used = re.search(r"was (\S+ used / \S+ limit)", str(error))
    figures = f" ({used[1]})" if used else ""
    return (
        f"out of memory: Ray's memory monitor ended its actor, because the node had no "
        f"more{figures}"
    )


ADVICE = {
    "No module named 'raydist'": (
        "install raydist on every node, for the Python that Ray runs with"
    ),
    "all references to the actor were removed": (
        "the head node does not reach this driver, to ask whether the actor is still needed; a "
        "firewall may block its connections to this machine"
    ),
}
"""By a part of Ray's message: what to do. Ray's second message would need a driver that has ended;
ours holds its actors until the end of the run."""


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, without the traceback that Ray adds before it."""
    if by_ray := out_of_memory(error):
        return by_ray
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    for text, what_to_do in ADVICE.items():
        if text in str(error):
            return f"{last.rstrip('.')}: {what_to_do}"
    return last
