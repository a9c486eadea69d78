"""`raydist COMMAND`: training and every tool as one command. (driver)"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NamedTuple, NoReturn

from raydist.shared.ending import run_to_the_end
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.version import __version__


class Command(NamedTuple):
    """A subcommand: `main()` of `module` runs it."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("train", "train", "run a job, or your script, on every GPU"),
    Command("launch", "tools.launch", "the same with torchrun's command line"),
    Command("plan", "tools.plan", "show where each rank would run, without starting it"),
    Command("doctor", "tools.doctor", "check the nodes and the network between them"),
    Command(
        "bandwidth", "tools.bandwidth", "measure collectives on the ranks that a job would have"
    ),
    Command("watch", "tools.watch", "show a run or a sweep in the browser"),
    Command("note", "tools.note", "give a run a note and tags, for the list of runs"),
    Command("ranks", "tools.ranks", "show where each rank of a run is, and what it is doing"),
    Command("stacks", "tools.stacks", "show where in their programs the ranks of a run are"),
    Command("exec", "tools.exec", "run a command where a rank runs, as nvidia-smi"),
    Command("debug", "tools.debug", "enter pdb in a rank, or where breakpoint() waits"),
    Command("profile", "tools.profile", "profile the same steps of all ranks, in one file"),
    Command("save", "tools.save", "have a run save a checkpoint now, without stopping"),
    Command("set", "tools.set", "change the learning rate, … of a run that runs"),
    Command("stop", "tools.stop", "stop a run as Ctrl-C does, its state saved"),
    Command("queue", "tools.queue", "list the runs of a cluster that run, and those that wait"),
    Command("sweep", "tools.sweep", "run a job with many settings, side by side"),
    Command("submit", "tools.submit", "submit a command to a Ray cluster, and follow its log"),
    Command("warm", "tools.warm", "list the fork servers that wait for the next run"),
    Command("horovod", "tools.horovod", "build Horovod for the installed torch"),
)
"""The commands in the order in which a person meets them."""
OVERVIEW = f"""\
raydist {__version__} runs a training program on every GPU of a Ray cluster.

    raydist COMMAND [FLAG ...] [SETTING=VALUE ...]

{{commands}}

    raydist train                                 digits, on this machine's CPU
    raydist train job=mine.py scale=2x8           your job on 2 nodes of 8 GPUs

`raydist COMMAND --help` describes a command, and that of train each setting.
`python -m raydist.train` and `python -m raydist.tools.COMMAND` do the same.
"""


def overview() -> str:
    """Return the text of `raydist --help`."""
    rows = [f"    {command.name:<11}{command.help}" for command in COMMANDS]
    return OVERVIEW.format(commands="\n".join(rows))


def select(words: list[str]) -> tuple[Command, list[str]]:
    """Return the subcommand and its arguments.

    Settings or flags without a subcommand are for train.
    """
    commands = {command.name: command for command in COMMANDS}
    first = words[0]
    if first in commands:
        return commands[first], words[1:]
    if "=" in first or first.startswith("-"):
        return commands["train"], words
    guess = nearest(first, list(commands))
    raise ConfigError.of(first, None, "there is no such command", guess=guess, known=list(commands))


def main() -> int:
    """Run the command line of this process. The exit code is that of the subcommand."""
    words = sys.argv[1:]
    try:
        if words in ([], ["--help"], ["-h"], ["help"]):
            print(overview(), end="")
            return 0
        command, arguments = select(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if os.getcwd() not in sys.path:
        # `python -m` finds modules in the current folder; a console script does not.
        sys.path.insert(0, os.getcwd())
    sys.argv[1:] = arguments
    if "COMP_LINE" in os.environ:
        complete_command()
    code: int = import_module(f"raydist.{command.module}").main()
    return code


def complete_command() -> None:
    """Complete the command's name for the shell, and leave the rest of the line to Hydra.

    Hydra knows the settings.
    """
    program, _, rest = os.environ["COMP_LINE"].partition(" ")
    first, space, settings = rest.partition(" ")
    names = [command.name for command in COMMANDS]
    if space and first in names:
        os.environ["COMP_LINE"] = f"{program} {settings}"
    elif not space:
        print(*[name for name in names if name.startswith(first)], flush=True)


def entry_point() -> NoReturn:
    """Run the command `raydist`."""
    run_to_the_end(main)


if __name__ == "__main__":
    entry_point()
