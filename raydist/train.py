"""The command `raydist train`: command line -> Job -> run -> exit code. (driver)

`python -m raydist.train` is the same.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raydist.shared.ending import discard, run_to_the_end
from raydist.shared.errors import ConfigError, RaydistError, RunFailed, Stopped, nearest
from raydist.shared.imports import uncollected
from raydist.shared.version import __version__

if TYPE_CHECKING:
    from raydist.settings.compose import Loader
    from raydist.settings.config import Job

FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--help", "-h"), {"action": "store_true", "help": "show this text"}),
    (
        ("--multirun", "-m"),
        {"action": "store_true", "help": "run every combination of the values: optim.lr=0.1,0.01"},
    ),
    (
        ("--cfg", "-c"),
        {"metavar": "PART", "help": "show the settings (job, hydra or all) and start nothing"},
    ),
    (("--resolve",), {"action": "store_true", "help": "with --cfg: fill in the interpolations"}),
    (
        ("--package", "-p"),
        {"metavar": "PART", "help": "with --cfg: only this part, as in --package optim"},
    ),
    (
        ("--info", "-i"),
        {"nargs": "?", "const": "all", "help": "show which files the settings come from"},
    ),
    (
        ("--config-dir", "-cd"),
        {"metavar": "DIR", "help": "a folder like conf/ that is searched first"},
    ),
    (
        ("--config-name", "-cn"),
        {"metavar": "NAME", "default": "config", "help": "instead of conf/config.yaml"},
    ),
    (
        ("--shell-completion", "-sc"),
        {"action": "store_true", "help": 'eval "$(raydist -sc install=bash)"; zsh, fish'},
    ),
    (
        ("--time",),
        {"action": "store_true", "help": "show at the end where the time of the command went"},
    ),
    (("--run", "-r"), {"action": "store_true", "help": "run the job (the default)"}),
    (
        ("--version",),
        {"action": "version", "version": f"raydist {__version__}", "help": "show the version"},
    ),
)


CHOICES = {
    "cfg": ("job", "hydra", "all"),
    "info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""The values of --cfg and --info."""
_run_dir = ""
"""The folder of the last run, for --time."""


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def train_parser() -> Parser:
    """Return the parser of the flags; all other arguments are overrides."""
    # Hydra's parser cannot be used: Python 3.14 rejects one of its help texts, and it stops at
    # flags between overrides.
    parser = Parser(prog="raydist train", add_help=False, allow_abbrev=False)
    for names, options in FLAGS:
        parser.add_argument(*names, **options)
    parser.add_argument("overrides", nargs="*")
    return parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the flags and the overrides; ConfigError for an unknown flag."""
    arguments, unknown = train_parser().parse_known_intermixed_args(list(argv))
    if wrong := [text for text in unknown if text.startswith("-")]:
        flags = [name for names, _ in FLAGS for name in names if name.startswith("--")]
        raise ConfigError.of(
            wrong[0], None, "there is no such flag", guess=nearest(wrong[0], flags), known=flags
        )
    chosen = [
        flag
        for flag in ("run", "multirun", "cfg", "info", "shell_completion")
        if getattr(arguments, flag)
    ]
    if len(chosen) > 1:
        flags = [f"--{flag.replace('_', '-')}" for flag in chosen]
        raise ConfigError.of(
            flags[1], None, "only one of these flags at a time", flags[0], text=" ".join(flags)
        )
    for flag, known in CHOICES.items():
        if (value := getattr(arguments, flag)) not in (None, *known):
            raise ConfigError.unknown(f"--{flag}", value, known)
    if arguments.time and arguments.multirun:
        raise ConfigError.of("--time", None, "it measures one run", text="--multirun --time")
    if arguments.resolve and not arguments.cfg:
        raise ConfigError.of("--resolve", None, "it needs --cfg", "--cfg job --resolve")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    The exit code: 0, 1 if the run failed, 2 for a wrong setting, 128+n after signal n.
    """
    entered = time.time()
    if argv is None and os.getcwd() not in sys.path:
        # The command `raydist` must find the modules that `python -m raydist.train` finds.
        sys.path.insert(0, os.getcwd())
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.time:  # before all others: exit handlers run in reverse order
            atexit.register(show_time, entered)
        run_command(arguments)
    except RaydistError as error:
        return print_error(error)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return discard_output()
    return 0


def discard_output() -> int:
    """Discard what is still to be printed, after `raydist … | head`. Return the exit code.

    Python would flush it at exit, and fail once more.
    """
    discard(1)
    return 0


def print_error(error: RaydistError) -> int:
    """Print an error, unless the run's summary has shown it. Return the exit code."""
    if error.facts.get("unexpected") and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    elif not isinstance(error, RunFailed | Stopped):
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def warn_of_secrets(overrides: Sequence[str]) -> None:
    """Print a warning if secrets were typed.

    A run's files don't contain them, but this process's command line does.
    """
    from raydist.settings.references import names_of_secrets

    if names := names_of_secrets(overrides):
        print(
            f"warning: {', '.join(names)}: every user of this machine can read a command line; "
            "write NAME=value into "
            "a file, and set env_file=FILE",
            file=sys.stderr,
            flush=True,
        )


def show_time(entered: float) -> None:
    """Print where the time of this process went, just before it ends.

    `entered`: when main() was called.
    """
    from raydist.reporting.command_time import time_line

    print(time_line(Path(_run_dir), entered), flush=True)


def run_command(arguments: argparse.Namespace) -> None:
    """Run one of: help, show, completion in the shell, one run, a sweep."""
    if not (arguments.help or arguments.cfg or arguments.info or arguments.shell_completion):
        from raydist.settings.mesh import check_words

        check_words(arguments.overrides)
        from raydist.launch import warm_server

        warm_server.begin(arguments.overrides)
    with uncollected():
        from raydist.settings import compose

    warn_of_secrets(arguments.overrides)
    with compose.hydra_set_up():
        loader = compose.Loader(config_dir=arguments.config_dir)
        if arguments.help:
            from raydist.settings.help import manual

            print(
                manual(loader, [(", ".join(names), options["help"]) for names, options in FLAGS]),
                flush=True,
            )
        elif arguments.shell_completion:
            sys.argv[0] = "raydist"  # Hydra would complete `python FILE`
            compose.hydra_app(loader, lenient=True).shell_completion(
                arguments.config_name, arguments.overrides
            )
        elif arguments.cfg or arguments.info:
            show_settings(loader, arguments)
        elif arguments.multirun:
            run_every_combination(arguments)
        else:
            compose.run_once(loader, arguments.config_name, arguments.overrides, run_composed)


def show_settings(loader: Loader, arguments: argparse.Namespace) -> None:
    """Run --cfg and --info, which Hydra prints."""
    from raydist.settings import compose, references

    # This raises ConfigError for wrong settings.
    compose.to_job(loader.load(arguments.overrides, arguments.config_name))
    hydra, overrides = compose.hydra_app(loader), loader.translate(arguments.overrides)
    if arguments.cfg:
        with references.values_masked():
            hydra.show_cfg(
                arguments.config_name,
                overrides,
                arguments.cfg,
                arguments.package,
                arguments.resolve,
            )
    else:
        hydra.show_info(arguments.info, arguments.config_name, overrides)


def run_every_combination(arguments: argparse.Namespace) -> None:
    """Run a sweep over a grid, which ends with the first run that fails."""
    from raydist.sweeps.flow import run_sweep

    try:
        done = run_sweep(
            ["sweep.on_failure=end", *arguments.overrides],
            arguments.config_name,
            arguments.config_dir,
        )
    except RaydistError:
        raise
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    if done.exit_code:
        raise SystemExit(done.exit_code)


def run_composed(job: Job) -> None:
    """Run a job in the folder that Hydra has created for it."""
    with uncollected():
        from raydist.flow import run_job

    global _run_dir
    _run_dir = job.dir
    try:
        run_job(job)
    except RaydistError as error:
        # Not an Exception: Hydra would print this error in its own way.
        raise SystemExit(print_error(error)) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def entry_point() -> NoReturn:
    """Run the command `raydist`."""
    run_to_the_end(main)


if __name__ == "__main__":
    entry_point()
