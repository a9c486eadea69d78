"""`python -m raydist.train`, and the command `raydist`: words typed -> Job -> run -> exit code. (driver)"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raydist import __version__
from raydist.errors import ConfigError, RaydistError, RunFailed, Stopped, nearest, suggest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from raydist.words.compose import Loader

FLAGS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--help", "-h"), {"action": "store_true", "help": "this text"}),
    (("--multirun", "-m"), {"action": "store_true", "help": "run every combination of the values: optim.lr=0.1,0.01"}),
    (("--cfg", "-c"), {"metavar": "PART", "help": "show the settings (job, hydra or all), start nothing"}),
    (("--resolve",), {"action": "store_true", "help": "with --cfg: fill in the interpolations"}),
    (("--package", "-p"), {"metavar": "PART", "help": "with --cfg: only this part, as in --package optim"}),
    (("--info", "-i"), {"nargs": "?", "const": "all", "help": "show where the settings come from"}),
    (("--config-dir", "-cd"), {"metavar": "DIR", "help": "one more folder like conf/, searched first"}),
    (("--config-name", "-cn"), {"metavar": "NAME", "default": "config", "help": "begin with conf/NAME.yaml"}),
    (("--shell-completion", "-sc"), {"action": "store_true", "help": 'eval "$(raydist -sc install=bash)"; zsh, fish'}),
    (("--run", "-r"), {"action": "store_true", "help": "run, which is what happens anyway"}),
    (("--version",), {"action": "version", "version": f"raydist {__version__}", "help": "the version"}),
)  # fmt: skip


CHOICES = {
    "cfg": ("job", "hydra", "all"),
    "info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""What may follow --cfg and --info."""


class Parser(argparse.ArgumentParser):
    """Refuses as the rest of raydist does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> Parser:
    """The flags; all other words are settings."""
    # Hydra's own parser can't be used: Python 3.14 refuses one of its help texts, and flags between words end it.
    made = Parser(prog="raydist", add_help=False, allow_abbrev=False)
    for names, how in FLAGS:
        made.add_argument(*names, **how)
    made.add_argument("words", nargs="*")
    return made


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags and the words; ConfigError for a flag that there is not."""
    typed, unknown = parser().parse_known_intermixed_args(list(argv))
    if wrong := [word for word in unknown if word.startswith("-")]:
        flags = [name for names, _ in FLAGS for name in names if name.startswith("--")]
        close = nearest(wrong[0], flags)
        offer = f"did you mean {close}? " if close else ""
        raise ConfigError(f"{wrong[0]}: there is no such flag; {offer}(known: {', '.join(sorted(flags))})")
    chosen = [flag for flag in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(typed, flag)]
    if len(chosen) > 1:
        raise ConfigError(" ".join(f"--{flag.replace('_', '-')}" for flag in chosen) + ": say only one of them")
    for flag, known in CHOICES.items():
        if (word := getattr(typed, flag)) not in (None, *known):
            raise ConfigError(f"--{flag} {word}: {suggest(word, known, prefix=f'--{flag} ')}")
    if typed.resolve and not typed.cfg:
        raise ConfigError("--resolve goes with --cfg: say --cfg job --resolve")
    return typed


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the words say. The exit code: 0, 1 where the run failed, 2 for a wrong word, 128+n after signal n."""
    if argv is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the command `raydist` finds what `python -m raydist.train` finds
    try:
        act(parse(sys.argv[1:] if argv is None else argv))
    except RaydistError as error:
        return tell(error)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `raydist --help | head`; what is left must not be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def tell(error: RaydistError) -> int:
    """Show an error, unless the run's own summary has shown it. The exit code."""
    if not isinstance(error, RunFailed | Stopped):
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def act(typed: argparse.Namespace) -> None:
    """One of: help, show, complete, run, run many."""
    from raydist.words import compose

    with compose.hydra_set_up():
        loader = compose.Loader(config_dir=typed.config_dir)
        if typed.help:
            from raydist.words.manual import manual

            print(manual(loader, [(", ".join(names), how["help"]) for names, how in FLAGS]), flush=True)
        elif typed.cfg or typed.info or typed.shell_completion:
            show(loader, typed)
        elif typed.multirun:
            run_many(loader, typed)
        else:
            run_one(loader, typed)


def show(loader: Loader, typed: argparse.Namespace) -> None:
    """What Hydra has to say about the settings, or to the shell."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.hydra import Hydra

    if typed.shell_completion:
        sys.argv[0] = "raydist"  # completion is for the command; Hydra's takes `python` for `python FILE`
        # half a word is no error here
        Hydra("raydist", ConfigLoaderImpl(loader.get_search_path())).shell_completion(typed.config_name, typed.words)
        return
    hydra, words = Hydra("raydist", loader), loader.translate(typed.words)
    loader.load(typed.words, typed.config_name)  # refused here, in our words, or not at all
    if typed.cfg:
        hydra.show_cfg(typed.config_name, words, typed.cfg, typed.package, typed.resolve)
    else:
        hydra.show_info(typed.info, typed.config_name, words)


def run_one(loader: Loader, typed: argparse.Namespace) -> None:
    """Compose, make the run folder, run."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.utils import run_job
    from hydra.types import HydraContext

    from raydist.words import compose

    config = loader.load(typed.words, typed.config_name)
    compose.make_folder(config, "hydra.run.dir")
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=typed.config_name)
    done = run_job(run, config, "hydra.run.dir", None, HydraContext(loader, callbacks))
    callbacks.on_run_end(config=config, config_name=typed.config_name, job_return=done)


def run_many(loader: Loader, typed: argparse.Namespace) -> None:
    """Let Hydra's sweeper run every combination, each in a folder below that of the sweep."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    from raydist.words import compose

    words = loader.translate([*typed.words, "hydra.mode=MULTIRUN"], multirun=True)
    frame = loader.load_configuration(typed.config_name, words, RunMode.MULTIRUN)
    check_all(loader, frame)
    compose.make_folder(frame, "hydra.sweep.dir")
    callbacks = Callbacks(frame)
    callbacks.on_multirun_start(config=frame, config_name=typed.config_name)
    context = HydraContext(loader, callbacks)
    sweeper = Plugins.instance().instantiate_sweeper(config=frame, hydra_context=context, task_function=run)
    done = sweeper.sweep(arguments=compose.typed(frame))
    callbacks.on_multirun_end(config=frame, config_name=typed.config_name, multirun_return=done)


def check_all(loader: Loader, frame: DictConfig) -> None:
    """Refuse a sweep one of whose runs can't be right, before there is a folder; of another sweeper's nobody knows."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from raydist.words import compose

    if frame.hydra.sweeper._target_.endswith(".BasicSweeper"):
        words = [f"{key}={value}" for key, value in (frame.hydra.sweeper.params or {}).items()]
        parsed = OverridesParser.create(loader).parse_overrides([*words, *compose.typed(frame)])
        for combination in BasicSweeper.split_arguments(parsed, None)[0]:
            loader.load_sweep_config(frame, combination)


def run(config: DictConfig) -> None:
    """One run, in the folder that Hydra has made for it."""
    from hydra.core.hydra_config import HydraConfig

    from raydist.run import run_job
    from raydist.words import compose

    hydra = HydraConfig.get()
    job = replace(compose.to_job(config), dir=hydra.runtime.output_dir)
    if hydra.output_subdir is not None:
        compose.save(job, Path(job.dir, hydra.output_subdir, "config.yaml"))
    try:
        run_job(job)
    except RaydistError as error:
        # not an Exception: Hydra would go on with the rest of a sweep, and tell of this one in its own words
        raise SystemExit(tell(error)) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


if __name__ == "__main__":
    sys.exit(main())
