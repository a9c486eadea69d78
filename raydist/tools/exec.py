"""The command `raydist exec`: run a command where a rank of a run runs. (driver)

`python -m raydist.tools.exec` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from raydist.messages.operate import CommandEnded, Execute, Printed, SendSignal, TextReply
from raydist.shared.errors import ConfigError
from raydist.tools.command_line import run_tool
from raydist.tools.running import Link, connected_run, refused_by_driver, run_and_ranks, run_parser

DESCRIPTION = """\
Runs a command where a rank of a run runs: on its node, in its folder, with its variables, in its
cgroup. It shows what the command prints, and ends with its exit code.

    raydist exec rank=3 -- nvidia-smi
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
        parser = run_parser("exec", DESCRIPTION, "; rank=3; then -- and the command")
        parser.add_argument(
            "--all", action="store_true", help="beside all ranks; each line begins with its rank"
        )
        arguments = parser.parse(words[:here])
        place, ranks = run_and_ranks("raydist exec", arguments.overrides)
        return execute_in_ranks(arguments, place, ranks, words[here + 1 :])

    return run_tool(execute)


def execute_in_ranks(
    arguments: argparse.Namespace, place: str, ranks: list[int], command: Sequence[str]
) -> int:
    """Run the command, show what it prints, and return its exit code."""
    if not command:
        raise ConfigError("raydist exec: no command; type it after --: rank=0 -- nvidia-smi")
    if bool(ranks) == arguments.all:
        raise ConfigError("raydist exec: where? type rank=0, or --all for all ranks")
    screen = Screen(arguments.all or len(ranks) > 1)
    with connected_run(place, arguments) as link:
        link.send(Execute(ranks, command))
        with passing_on_ctrl_c(link):
            return show_output(link, screen)


def show_output(link: Link, screen: Screen) -> int:
    """Show what the commands print until all have ended; return the first code that is not 0."""
    code = 0
    while (message := link.receive()) is not None:
        match message:
            case Printed(rank, stream, text):
                screen.show(rank, stream, text)
            case CommandEnded(rank, ended, error):
                screen.end(rank)
                if error:
                    print(f"rank {rank}: {error}", file=sys.stderr)
                code = code or ended
            case TextReply():
                return code
            case _:
                raise refused_by_driver(message)
    raise ConnectionResetError


class Screen:
    """Shows what commands print: unchanged, or in whole lines with the rank before each."""

    def __init__(self, named: bool) -> None:
        """`named`: whether each line begins with its rank."""
        self._named = named
        self._rest: dict[tuple[int, int], str] = {}
        """By rank and stream: the beginning of a line."""

    def show(self, rank: int, stream: int, text: str) -> None:
        """Show what a command has printed."""
        if self._named:
            *lines, self._rest[rank, stream] = (self._rest.get((rank, stream), "") + text).split(
                "\n"
            )
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        to = sys.stdout if stream == 1 else sys.stderr
        to.buffer.write(text.encode("utf-8", "surrogateescape"))
        to.flush()

    def end(self, rank: int) -> None:
        """Show the unfinished lines of a command that has ended."""
        for stream in (1, 2):
            if self._rest.get((rank, stream)):
                self.show(rank, stream, "\n")


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
