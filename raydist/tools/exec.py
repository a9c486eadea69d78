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
from raydist.shared.ending import discard
from raydist.shared.errors import ConfigError
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.own_terminal import InputSender, raw_terminal, terminal_size
from raydist.tools.running import Link, connected_run, refused_by_driver, run_and_ranks, run_parser

DESCRIPTION = """\
Runs a command alongside a rank of a run: on its node, in its folder, with its environment
variables, in its cgroup. Prints the output of the command, and returns its exit code.

    raydist exec rank=3 -- nvidia-smi
    raydist exec rank=3 -it                      a shell
    raydist exec --all -- sh -c 'echo $CUDA_VISIBLE_DEVICES'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code: that of the command (with several ranks, the first that is not 0); 2 for a wrong
    argument, or if no such run is running.
    """

    def execute() -> int:
        words = [*(sys.argv[1:] if argv is None else argv)]
        here = words.index("--") if "--" in words else len(words)
        arguments = command_parser().parse(words[:here])
        place, ranks = run_and_ranks("raydist exec", arguments.overrides)
        return execute_in_ranks(arguments, place, ranks, words[here + 1 :])

    return run_tool(execute)


def command_parser() -> ToolParser:
    """Return the parser of the arguments before the --."""
    parser = run_parser("exec", DESCRIPTION, "; rank=3; then -- and the command")
    parser.add_argument(
        "--all", action="store_true", help="alongside each rank; each line begins with its rank"
    )
    parser.add_argument(
        "-i", "--interactive", action="store_true", help="forward standard input to the command"
    )
    parser.add_argument(
        "-t",
        "--tty",
        action="store_true",
        help="with -i: in a terminal; by default a shell",
    )
    return parser


def execute_in_ranks(
    arguments: argparse.Namespace, place: str, ranks: list[int], command: Sequence[str]
) -> int:
    """Run the command, print its output, and return its exit code."""
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
            stack.enter_context(forwarding_ctrl_c(link))
            return show_output(link, screen)
        if arguments.tty:
            size = terminal_size()
            term = os.environ.get("TERM") or "dumb"
            stack.enter_context(raw_terminal())
            link.send(Execute(ranks, command, True, term, *size))
        else:
            link.send(Execute(ranks, command, True))
        sender = stack.enter_context(InputSender(link, arguments.tty))
        return show_output(link, screen, sender)


def check_input(arguments: argparse.Namespace, ranks: Sequence[int]) -> None:
    """Raise ConfigError if -i and -t are not possible here."""
    if arguments.tty and not arguments.interactive:
        raise ConfigError("raydist exec: -t without -i is a terminal without input; type -it")
    if not arguments.interactive:
        return
    flags = "-it" if arguments.tty else "-i"
    if arguments.all or len(set(ranks)) > 1:
        which = f"rank={ranks[0] if ranks else 0}"
        raise ConfigError(f"raydist exec: {flags} is for one rank; type {which} {flags}")
    if arguments.tty and not sys.stdin.isatty():
        raise ConfigError(
            "raydist exec: -t needs a terminal, and standard input is none; type -i to forward a "
            "file or a pipe"
        )


def show_output(link: Link, screen: Screen, sender: InputSender | None = None) -> int:
    """Print the output of the commands until all have ended; return the first code that is not 0.

    `sender`: sends their input, if they have any.
    """
    code = 0
    while (message := link.receive()) is not None:
        match message:
            case Printed(rank, stream, text):
                screen.show(rank, stream, text)
            case InputTaken(size):
                if sender is not None:
                    sender.note_taken(size)
            case CommandEnded(rank, ended, error):
                screen.end(rank, error)
                code = code or ended
            case TextReply():
                return code
            case _:
                raise refused_by_driver(message)
    raise ConnectionResetError


class Screen:
    """Prints the output of commands: unchanged, or as whole lines that begin with the rank."""

    def __init__(self, with_rank: bool, raw: bool = False) -> None:
        """`with_rank`: whether lines begin with the rank. `raw`: whether the terminal is raw."""
        self._with_rank, self._raw = with_rank, raw
        self._rest: dict[tuple[int, int], str] = {}
        """By rank and stream: the beginning of a line that is not complete yet."""

    def show(self, rank: int, stream: int, text: str) -> None:
        """Print output of a command. `stream`: 1 or 2, as in Printed."""
        if self._with_rank:
            *lines, self._rest[rank, stream] = (self._rest.get((rank, stream), "") + text).split(
                "\n"
            )
            text = "".join(f"[{rank}] {line}\n" for line in lines)
        to = sys.stdout if stream == 1 else sys.stderr
        try:
            to.buffer.write(text.encode("utf-8", "surrogateescape"))
            to.flush()
        except BrokenPipeError:  # `raydist exec … | head`; Python must not flush the rest
            discard(to.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None

    def end(self, rank: int, error: str) -> None:
        """Print the incomplete lines of a command that has ended, and its error, if there is one.

        `error`: as CommandEnded.error.
        """
        for stream in (1, 2):
            if self._rest.get((rank, stream)):
                self.show(rank, stream, "\n")
        if error:
            end = "\r\n" if self._raw else "\n"
            print(f"rank {rank}: {error}", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def forwarding_ctrl_c(link: Link) -> Iterator[None]:
    """Forward Ctrl-C to the commands while the block runs; the second Ctrl-C kills them."""
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
