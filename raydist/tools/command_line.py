"""Command lines of the tools: flags between overrides, exit codes, raydist's errors. (driver)"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

from raydist.shared.errors import (
    NO_MORE_PROCESSES,
    ConfigError,
    LaunchError,
    RaydistError,
    is_refusal,
    nearest,
)
from raydist.train import Parser, discard_output, print_error, warn_of_secrets


class ToolParser(Parser):
    """The parser of `raydist NAME [flags] [overrides]`; errors are ConfigErrors.

    `remainder`: all arguments after the first override are for another program, including those
    that look like flags.
    """

    def __init__(self, name: str, description: str, remainder: bool = False) -> None:
        super().__init__(
            prog=f"raydist {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._remainder = remainder
        self.add_argument(
            "overrides",
            nargs=argparse.REMAINDER if remainder else "*",
            metavar="OVERRIDE",
            help="settings as for raydist train: backend=nccl scale=2x8 job=resnet ...",
        )

    def positional(self, metavar: str, help: str) -> None:
        """Replace the overrides by this argument."""
        (action,) = (action for action in self._actions if action.dest == "overrides")
        action.metavar = metavar
        action.help = help

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the flags and `overrides`.

        ConfigError: an unknown flag. SystemExit: after --help.
        """
        parse = self.parse_known_args if self._remainder else self.parse_known_intermixed_args
        arguments, unknown = parse(list(argv))
        if wrong := [text for text in unknown if text.startswith("-")]:
            flags = [
                flag
                for action in self._actions
                for flag in action.option_strings
                if flag.startswith("--")
            ]
            after = " (flags of raydist.train come after a --)" if self._remainder else ""
            cause = f"there is no such flag{after}"
            raise ConfigError.of(wrong[0], None, cause, guess=nearest(wrong[0], flags), known=flags)
        if arguments.overrides[:1] == ["--"]:
            arguments.overrides = arguments.overrides[1:]
        if any("=" in text for text in arguments.overrides):  # other commands need no Hydra
            warn_of_secrets(arguments.overrides)
        return arguments


def run_tool(command: Callable[[], int]) -> int:
    """Run a command; return its exit code, or that of the error that it raised."""
    try:
        code = command()
        sys.stdout.flush()
        return code
    except RaydistError as error:
        return print_error(error)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        return print_error(LaunchError(NO_MORE_PROCESSES))
    except PermissionError as error:  # of another user's folder
        if error.filename is None:
            raise
        return print_error(ConfigError(f"{error.filename}: {error.strerror}"))
    except BrokenPipeError:
        return discard_output()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:  # --help
        return int(ended.code or 0)


def number(flag: str, text: str, low: float, high: float = 1e9, whole: bool = False) -> float:
    """Return the value of a flag; ConfigError unless it is a number from `low` to `high`."""
    try:
        value = float(int(text) if whole else float(text))
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        limits = f"from {low:g}" + (f" to {high:g}" if high < 1e9 else "")
        example = max(2, round(low)) if low else 0
        raise ConfigError.of(flag, text, f"must be {kind} {limits}", f"{flag} {example}")
    return value
