"""The command `raydist exec`: run a command where a rank of a run runs. (driver)

`python -m raydist.tools.exec` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from raydist.messages.operate import (
    CommandEnded,
    Execute,
    InputTaken,
    Printed,
    SendSignal,
    TextReply,
)
from raydist.shared.errors import ConfigError
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.own_terminal import InputSender, raw_terminal, terminal_size
from raydist.tools.running import Link, connected_run, refused_by_driver, run_and_ranks, run_parser

DESCRIPTION = """\
Runs a command where a rank of a run runs: on its node, in its folder, with its variables, in its
cgroup. It shows what the command prints, and ends with its exit code.

    raydist exec rank=3 -- nvidia-smi
    raydist exec rank=3 -it                      a shell
    raydist exec --all -- sh -c 'echo $CUDA_VISIBLE_DEVICES'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code: that of the command (of the first rank that failed); 2 for a wrong word, or if no
    such run runs.
    """

    def execute() -> int:
        words = [*(sys.argv[1:] if argv is None else argv)]
        here = words.index("--") if "--" in words else len(words)
        arguments = command_parser().parse(words[:here])
        place, ranks = run_and_ranks("raydist exec", arguments.overrides)
        return execute_in_ranks(arguments, place, ranks, words[here + 1 :])

    return run_tool(execute)


def command_parser() -> ToolParser:
    """Return the parser of what is typed before the --."""
    parser = run_parser("exec", DESCRIPTION, "; rank=3; then -- and the command")
    parser.add_argument(
        "--all", action="store_true", help="beside all ranks; each line begins with its rank"
    )
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="pass on what is typed or piped into it"
    )
    parser.add_argument(
        "-t", "--tty", action="store_true", help="with -i: it has a terminal; default: a shell"
    )
    return parser


def execute_in_ranks(
    arguments: argparse.Namespace, place: str, ranks: list[int], command: Sequence[str]
) -> int:
    """Run the command, show what it prints, and return its exit code."""
    if not command and not arguments.tty:
        raise ConfigError("raydist exec: no command; type it after --: rank=0 -- nvidia-smi")
    if bool(ranks) == arguments.all:
        raise ConfigError("raydist exec: where? type rank=0, or --all for all ranks")
    check_input(arguments, ranks)
    screen = Screen(arguments.all or len(ranks) > 1, raw=arguments.tty)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(connected_run(place, arguments))
        if not arguments.interactive:
            link.send(Execute(ranks, command))
            stack.enter_context(passing_on_ctrl_c(link))
            return show_output(link, screen)
        if arguments.tty:
            size = terminal_size()
            term = os.environ.get("TERM") or "dumb"
            stack.enter_context(raw_terminal())
            link.send(Execute(ranks, command, True, term, *size))
        else:
            link.send(Execute(ranks, command, True))
        typed = stack.enter_context(InputSender(link, arguments.tty))
        return show_output(link, screen, typed)


def check_input(arguments: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Raise ConfigError if what is typed can't be passed on as -i and -t say."""
    if arguments.tty and not arguments.interactive:
        raise ConfigError("raydist exec: nobody could type into the terminal of -t; type -it")
    if not arguments.interactive:
        return
    flags = "-it" if arguments.tty else "-i"
    if arguments.all or len(set(ranks)) > 1:
        which = f"rank={ranks[0] if ranks else 0}"
        raise ConfigError(f"raydist exec: what is typed goes to one rank; type {which} {flags}")
    if arguments.job:
        why = "what is typed can't pass through the dashboard's port alone"
        where = "on a host of the cluster, such as its head (ray attach cluster.yaml)"
        raise ConfigError(f"raydist exec: {why}; type it without --job {where}")
    if arguments.tty and not sys.stdin.isatty():
        raise ConfigError(
            "raydist exec: -t needs a terminal, and the standard input is none; type -i to pass on "
            "a file or a pipe"
        )


def show_output(link: Link, screen: Screen, typed: InputSender | None = None) -> int:
    """Show what the commands print until all have ended; return the first code that is not 0.

    `typed`: what sends their input.
    """
    code = 0
    while (message := link.receive()) is not None:
        match message:
            case Printed(rank, stream, text):
                screen.show(rank, stream, text)
            case InputTaken(size):
                if typed is not None:
                    typed.note_taken(size)
            case CommandEnded(rank, ended, error):
                screen.end(rank, error)
                code = code or ended
            case TextReply():
                return code
            case _:
                raise refused_by_driver(message)
    raise ConnectionResetError


class Screen:
    """Shows what commands print: unchanged, or in whole lines with the rank before each."""

    def __init__(self, named: bool, raw: bool = False) -> None:
        """`named`: whether each line begins with its rank. `raw`: whether the terminal is raw."""
        self._with_rank, self._raw = named, raw
        self._rest: dict[tuple[int, int], str] = {}
        """By rank and stream: the beginning of a line."""

    def show(self, rank: int, stream: int, text: str) -> None:
        """Show what a command has printed."""
        if self._with_rank:
            *lines, self._rest[rank, stream] = (self._rest.get((rank, stream), "") + text).split(
                "\n"
            )
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        to = sys.stdout if stream == 1 else sys.stderr
        try:
            to.buffer.write(text.encode("utf-8", "surrogateescape"))
            to.flush()
        except BrokenPipeError:  # `raydist exec … | head`; Python must not flush the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), to.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None

    def end(self, rank: int, error: str) -> None:
        """Show the unfinished lines of a command that has ended, and what went wrong, if anything.

        `error`: as CommandEnded.error.
        """
        for stream in (1, 2):
            if self._rest.get((rank, stream)):
                self.show(rank, stream, "\n")
        if error:
            end = "\r\n" if self._raw else "\n"
            print(f"rank {rank}: {error}", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def passing_on_ctrl_c(link: Link) -> Iterator[None]:
    """Send Ctrl-C to the commands while the block runs; the second one kills them."""
    numbers = iter([signal.SIGINT])

    def send(_number: int, _frame: FrameType | None) -> None:
        link.send(SendSignal(next(numbers, signal.SIGKILL)))

    before = signal.signal(signal.SIGINT, send)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
