"""Find the run that a person means, connect to its driver, and ask it. (driver)"""

from __future__ import annotations

import argparse
import contextlib
import select
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from raydist.messages.operate import Refused
from raydist.messages.wire import Message
from raydist.shared.errors import ConfigError, RaydistError, nearest
from raydist.shared.home import runs_folder
from raydist.shared.record_names import EVENTS
from raydist.tools.command_line import ToolParser
from raydist.watch.operate.connection import FILE, CommandLink, DriverAddress, read_address
from raydist.watch.operate.job_link import JobLink, read_job_address
from raydist.watch.operate.relay import RelayedConnection, connect_here
from raydist.watch.web.runs import no_run, runs_below

MOST = 1 << 24
"""No run has a rank above this: a larger one was mistyped."""

Kind = TypeVar("Kind", bound=Message)
Link = CommandLink | RelayedConnection | JobLink


class RunEnded(RaydistError):
    """The run ended while a command was about it."""


def run_parser(name: str, description: str, more: str = "") -> ToolParser:
    """Return the parser of a command about a run.

    `more`: what may follow the run, for its help.
    """
    parser = ToolParser(name, description)
    parser.positional("RUN", f"a run folder, or newest (default){more}")
    add_job_flags(parser)
    return parser


def add_job_flags(parser: ToolParser) -> None:
    """Add --job and --address."""
    parser.add_argument(
        "--job",
        metavar="ID",
        help="the run of a job that was submitted to Ray; needs only the dashboard's port",
    )
    parser.add_argument(
        "--address",
        default="",
        help="with --job: http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)",
    )


@contextlib.contextmanager
def connected_run(place: str, arguments: argparse.Namespace) -> Iterator[Link]:
    """Yield a connection to the driver of the run that a person's text means.

    ConfigError: there is no such run, or it does not run. RunEnded: it ended meanwhile.
    """
    check_run_words(place, arguments)
    with contextlib.ExitStack() as stack:
        if arguments.job:
            link: Link = open_job_link(arguments.job, arguments.address, place)
        else:
            folder, address = find_running(place)
            stack.enter_context(connect_to(folder, address))
            link = open_link(folder, address)
        stack.callback(link.close)
        try:
            yield link
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, BrokenPipeError) and _is_output_closed():
                raise  # of a `print`: not the driver's end
            what = arguments.job or folder
            raise RunEnded(f"{what}: the run has ended") from error
        except OSError as error:
            if not arguments.job:
                raise
            why = f"lost the connection to the dashboard ({error})"
            raise RaydistError(f"--job {arguments.job}: {why}") from error


def _is_output_closed() -> bool:
    """Report whether the reader of the standard output is gone, as in `raydist … | head`."""
    poll = select.poll()
    poll.register(1, 0)
    return any(flags & select.POLLERR for _, flags in poll.poll(0))


def check_run_words(place: str, arguments: argparse.Namespace) -> None:
    """Raise ConfigError if a word is empty, as that of a shell variable that is not set.

    It must not mean the newest run, or the current folder.
    """
    if arguments.job == "":
        raise ConfigError.of("--job", "", "it is empty", "--job ID")
    if not place:
        raise no_run("RUN", "it is empty", "a run folder, or `newest`")
    if arguments.address and arguments.job is None:
        why = "it is the dashboard of a job's cluster"
        raise ConfigError.of("--address", arguments.address, why, "--job ID --address …")


def open_job_link(job: str, address: str, place: str) -> JobLink:
    """Return a connection to the driver of a submitted job, by the dashboard's port.

    ConfigError: there is no such job, or none of its ranks runs.
    """
    from raydist.tools import submit

    if place != "newest":
        why = "a run folder and a job are two runs"
        raise no_run(f"{place} --job {job}", why, f"--job {job}")
    client = submit.job_client(address)
    info = submit.find_job(client, job)
    if (driver := read_job_address(client, job, info)) is None:
        why = "the run has ended, or its ranks have not started"
        raise no_run(f"--job {job}", why, "a job that runs")
    return JobLink(client, info, driver)


def find_running(place: str) -> tuple[Path, DriverAddress]:
    """Return the folder of the run, and where its driver listens.

    `place`: a run folder; a folder of runs, or `newest`, for the run there that began last and
    whose driver still answers: one that was killed leaves its file.
    """
    root = runs_folder() if place == "newest" else Path(place)
    if not root.is_dir():
        there = [path.name for path in root.parent.glob("*")] if root.parent.is_dir() else []
        guess = nearest(root.name, there) if place != "newest" else None
        why = (
            f"no run is below {root.absolute()}" if place == "newest" else "there is no such folder"
        )
        raise no_run(place, why, str(root.parent / guess) if guess else "a run folder")
    folders = [root] if (root / EVENTS).exists() else [*runs_below(root).values()]
    running = [(path, found) for path in folders if (found := read_address(path)) is not None]
    if not running:
        what = "the run has ended, or its ranks have not started" if folders == [root] else ""
        raise no_run(place, what or "no run is running there", "the folder of a run that runs")
    running.sort(key=lambda each: (each[0] / FILE).stat().st_mtime, reverse=True)
    return next((each for each in running if _may_answer(each[1])), running[0])


def _may_answer(address: DriverAddress) -> bool:
    """Report whether a driver answers this user; True if it is on another machine."""
    if not address.is_here():
        return True
    try:
        connect_here(address.socket).close()
    except OSError:
        return False
    return True


def connect_to(folder: Path, address: DriverAddress) -> contextlib.AbstractContextManager[object]:
    """Return a context in which this process is connected to Ray, if the driver is elsewhere.

    ConfigError: the driver is elsewhere, and has no Ray.
    """
    if address.is_here():
        return contextlib.nullcontext()
    from raydist.cluster import connect
    from raydist.settings.config import Job
    from raydist.tools.plan import connected

    if not address.node or not connect.running_address():
        which = "no Ray runs here" if address.node else "it has no Ray"
        why = f"its driver is on {address.host}, in other namespaces than this shell, and {which}"
        raise no_run(str(folder), why, f"the command on {address.host}, or set RAY_ADDRESS")
    return connected(Job())


def open_link(folder: Path, address: DriverAddress) -> Link:
    """Connect to the driver. ConfigError: it has ended."""
    try:
        if address.is_here():
            return connect_here(address.socket)
        return RelayedConnection(address.socket, address.node)
    except PermissionError as error:
        why = "its driver belongs to another user"
        raise no_run(
            str(folder), why, "the command as that user (sudo -u USER), or as root"
        ) from error
    except OSError as error:
        why = f"its driver (pid {address.pid} on {address.host}) does not answer: it has ended"
        raise no_run(str(folder), why, "the folder of a run that runs") from error


def receive(link: Link, kind: type[Kind]) -> Kind:
    """Return the driver's next message, which must be of this kind.

    ConfigError, RaydistError: the driver has refused the request, or could not carry it out.
    ConnectionError: the run has ended.
    """
    message = link.receive()
    if message is None:
        raise ConnectionResetError
    if not isinstance(message, kind):
        raise refused_by_driver(message)
    return message


def refused_by_driver(message: Message) -> RaydistError:
    """Return the error for a message with which the driver has refused a request."""
    if isinstance(message, Refused):
        return ConfigError(message.text) if message.usage else RaydistError(message.text)
    return RaydistError(f"the run's raydist is another one: it sent {type(message).__name__}")


def one_place(command: str, words: list[str]) -> str:
    """Return the run that the words name. ConfigError: they are several."""
    if len(words) > 1:
        raise no_run(" ".join(words), f"{command} is about one run at a time", words[0])
    return words[0] if words else "newest"


def run_and_ranks(command: str, words: list[str]) -> tuple[str, list[int]]:
    """Return the run and the ranks that the words name: `[RUN] [rank=0,2]`; no ranks: all."""
    named = [word for word in words if word.startswith("rank=")]
    others = [word for word in words if word not in named]
    for word in others:
        if "=" in word and not Path(word).exists():
            raise ConfigError(f"{word}: there is no such word; type rank=3", word, None, "rank=3")
    ranks = [rank for word in named for rank in ranks_of_text(word.removeprefix("rank="))]
    return one_place(command, others), ranks


def ranks_of_text(text: str) -> list[int]:
    """Return the ranks of `3`, `0,2` or `0-3`. ConfigError: it is none of these.

    ConfigError also if the last rank of a part is before the first one, or above MOST: such a part
    would mean no rank, which stands for all, or more of them than memory holds.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or part.endswith("-"):
            raise ConfigError.of("rank", text, "must be ranks", "rank=3", "rank=0,2", "rank=0-3")
        if int(first) > MOST or int(last or first) > MOST:
            raise ConfigError.of("rank", text, "no run has so many ranks", "rank=3")
        if int(first) > int(last or first):
            cause = f"{part} must be two ranks, the smaller one first"
            raise ConfigError.of("rank", text, cause, "rank=0-3")
        ranks += range(int(first), int(last or first) + 1)
    return ranks


def take_options(words: list[str], names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the words `NAME=VALUE` with these names, by name, and the others."""
    found = {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}
    options = {name: text for name, text in found.items() if name in names}
    return options, [word for word in words if word.partition("=")[0] not in options]
