"""The command `raydist watch`: the page of a run or sweep, by folder, storage or job id. (driver)

`python -m raydist.tools.watch` is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from raydist.cluster import ray_private
from raydist.reporting.log_link import FOLDER, SWEEP
from raydist.reporting.trace import trace_of
from raydist.shared.errors import ConfigError, nearest
from raydist.shared.events import read_events
from raydist.shared.home import runs_folder
from raydist.shared.record_names import EVENTS
from raydist.shared.signals import stoppable
from raydist.state import object_store
from raydist.tools import command_line, submit
from raydist.tools.command_line import ToolParser, run_tool
from raydist.tools.running import add_job_flags, check_run_words
from raydist.watch.web.export import export, export_folder, export_list, export_sweep
from raydist.watch.web.follow import Fetch, FollowedRun, file_size, is_here
from raydist.watch.web.mirror import Mirror, Read, stored
from raydist.watch.web.runs import find_place, no_run, runs_below
from raydist.watch.web.server import PageServer, link, open_port, serve_page
from raydist.watch.web.sweep import SUMMARY, FollowedSweep, is_sweep

OTHERS = 6
"""Maximum number of other runs in the charts of a run: each has a colour of its own."""


def watch_parser() -> ToolParser:
    """Return the parser of the flags and the place."""
    parser = ToolParser("watch", "Shows a run in a browser, while it runs or afterwards.")
    parser.positional(
        "RUN",
        "folder of a run, of a sweep or of many; URL of a run or sweep in its storage; or newest "
        "(default)",
    )
    add_job_flags(parser)
    parser.add_argument(
        "--with",
        dest="others",
        metavar="RUN",
        action="append",
        default=[],
        help="draw another run in the same charts: its folder, or its name next to RUN; up to six",
    )
    parser.add_argument("--port", default="0", help="the port on 127.0.0.1 (default: a free one)")
    parser.add_argument(
        "--export",
        metavar="FILE.html",
        help="write the page into one file; into FOLDER/: a list or sweep, with a page of each run",
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="write a trace for https://ui.perfetto.dev instead"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C, or export it.

    The exit code: 0; 2 for a wrong flag, or if there is no such run.
    """
    return run_tool(lambda: watch(watch_parser().parse(sys.argv[1:] if argv is None else argv)))


def watch(arguments: argparse.Namespace) -> int:
    """Find the run, then serve or export it."""
    places = arguments.overrides or ["newest"]
    for place in places:
        check_run_words(place, arguments)
    if len(places) > 1 or (arguments.job and arguments.overrides):
        what = " ".join([*places, *(["--job", arguments.job] if arguments.job else [])])
        raise no_run(what, "one run, or one folder of runs, can be watched at a time", places[0])
    port = int(command_line.number("--port", arguments.port, 0, 65535, whole=True))
    with stoppable(), tempfile.TemporaryDirectory(prefix="raydist-watch-") as folder:
        root, first, fetch = find_run(arguments, places[0], Path(folder))
        others = find_others(arguments.others, root, first)
        if arguments.export:
            return write_export(arguments.export, root, first, fetch, others)
        if arguments.trace:
            return write_trace(arguments.trace, root, first)
        near = [name for name, path in others.items() if path == root / name]
        if len(near) < len(others):
            raise no_run(
                f"--with {arguments.others[0]}",
                "a page shows runs of one folder",
                "--export FILE.html, which takes any run",
            )
        query = f"?{urlencode([('with', name) for name in near])}" if near else ""
        server = PageServer(root, first, secrets.token_urlsafe(16), fetch)
        return serve_until_stopped(server, port, query)


def find_others(names: Sequence[str], root: Path, first: str) -> dict[str, Path]:
    """Return the folders of the runs that are drawn, too, by the name that the page shows.

    ConfigError: there is no such run, there are too many, or no run to draw them with.
    """
    if len(names) > OTHERS:
        cause = f"at most {OTHERS} other runs are drawn"
        raise ConfigError.of("--with", names[OTHERS], cause, "without it")
    if names and not first:
        raise no_run(f"--with {names[0]}", "a list or a sweep has no such charts", "a run as RUN")
    found = {}
    for text in names:
        folder = next(
            (path for path in (root / text, Path(text)) if (path / EVENTS).exists()), None
        )
        if folder is None:
            guess = nearest(text, list(runs_below(root)))
            raise no_run(f"--with {text}", "there is no such run", f"--with {guess or 'FOLDER'}")
        folder = folder.resolve()
        below = folder.is_relative_to(root.resolve())
        name = str(folder.relative_to(root.resolve())) if below else str(folder)
        if name == first:
            raise no_run(f"--with {text}", "that is the run itself", "another one")
        found[name] = root / name if below else folder
    return found


def find_run(arguments: argparse.Namespace, place: str, copies: Path) -> tuple[Path, str, Fetch]:
    """Return what the typed arguments refer to.

    It is (the folder of the list of runs, the run in it or "", what fetches its files).
    """
    if not arguments.job and not object_store.scheme(place):
        return *find_place(place, runs_folder()), is_here
    if arguments.job:
        name = arguments.job
        files = files_of_job(name, arguments.address)
        sweep_files = files_of_job(name, arguments.address, SWEEP)
    else:
        object_store.check_url("watch", place)
        name = place.rstrip("/").rpartition("/")[2]
        files = sweep_files = stored(object_store.parse_path(place))
    folder = copies / name
    sweep = Mirror(folder, sweep_files, grows=True)  # its trials continue to end
    run = Mirror(folder, files, grows=bool(arguments.job))
    try:
        asyncio.run(sweep.fetch(SUMMARY, whole=True))
        if file_size(folder / SUMMARY):
            return folder, "", sweep.fetch
        asyncio.run(run.fetch(EVENTS, whole=True))
    except OSError as error:
        raise no_run(
            f"--job {arguments.job}", f"it cannot be read ({error})", "it again"
        ) from error
    if file_size(folder / EVENTS):
        return copies, name, run.fetch
    if arguments.job:
        raise no_run(f"--job {arguments.job}", "the job has no run folder (yet)", "it again later")
    raise nothing_stored(place)


def nothing_stored(place: str) -> ConfigError:
    """Return why a URL is not that of a run.

    It cannot be read, or it is a folder of runs, or nothing is there.
    """
    folder = object_store.parse_path(place)
    try:
        files = folder.sizes() if isinstance(folder, object_store.Remote) else {}
    except Exception as error:  # each store has its own exceptions
        why = f"it cannot be read ({object_store.reason(error)})"
        return no_run(place, why, "it again with the store's credentials in the environment")
    if below := sorted(
        path.removesuffix(f"/{EVENTS}") for path in files if path.endswith(f"/{EVENTS}")
    ):
        why = "that is a folder of runs, and a store shows one run at a time"
        return no_run(place, why, f"{place.rstrip('/')}/{below[-1]}")
    return no_run(
        place, "no run is there: a run's records are stored when it ends", "it again later"
    )


def files_of_job(job: str, address: str, kind: str = "") -> Read:
    """Return a reader of a job's run folder, through its cluster's dashboard (watch.log_link).

    `kind`: SWEEP for the folder of its sweep. ConfigError: there is no such job.
    """
    client = submit.job_client(address)
    node, folder = submit.find_job(client, job).driver_node_id, f"{FOLDER}/{job}{kind}"
    return lambda name, follow: ray_private.read_log(client, node, f"{folder}/{name}", follow)


def write_export(to: str, root: Path, first: str, fetch: Fetch, others: Mapping[str, Path]) -> int:
    """Write the page of a run, a sweep or a list, or a folder of pages (--export)."""
    whole = to.endswith("/") or Path(to).is_dir()
    if first:
        if whole:
            file = f"--export {Path(to, 'run.html')}"
            raise ConfigError.of("--export", to, "the page of a run is one file", file)
        run = FollowedRun(root / first, fetch)
        return write_files("--export", to, lambda path: export(run, path, others))
    if whole:
        return write_files("--export", to, lambda path: export_folder(root, path, fetch))
    if is_sweep(root):
        return write_files("--export", to, partial(export_sweep, FollowedSweep(root, fetch)))
    return write_files("--export", to, partial(export_list, root))


def write_trace(file: str, root: Path, first: str) -> int:
    """Write the trace of a run (--trace)."""
    if not first:
        raise no_run(str(root), "a trace is that of one run", "the folder of one")

    async def write(to: Path) -> Path:
        to.write_text(json.dumps(trace_of(read_events(root / first / EVENTS))), encoding="utf-8")
        return to

    return write_files("--trace", file, write)


def write_files(
    flag: str, to: str, write: Callable[[Path], Coroutine[Any, Any, Path | Sequence[Path]]]
) -> int:
    """Write a file or several, and print their size. ConfigError: one can't be written.

    `write`: writes them, and returns the file; or all of them, the first one first.
    """
    try:
        written = asyncio.run(write(Path(to)))
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise no_run(f"{flag} {to}", f"the connection broke ({error})", "it again") from error
        raise ConfigError.of(
            flag, to, f"it cannot be written ({error.strerror})", f"{flag} report"
        ) from error
    first, *more = [written] if isinstance(written, Path) else written
    size = sum(file.stat().st_size for file in (first, *more))
    pages = f"{1 + len(more)} pages, " if more else ""
    where = "; open it at https://ui.perfetto.dev" if flag == "--trace" else ""
    print(f"{flag.strip('-')}  {first} ({pages}{size / 1e6:.1f} MB){where}")
    return 0


def serve_until_stopped(server: PageServer, port: int, query: str = "") -> int:
    """Serve the page, and print its link, with this query.

    The events of the first run are read before somebody opens it.
    """
    try:
        sock = open_port(port)
    except OSError as error:
        raise ConfigError.of(
            "--port", str(port), f"it cannot be used ({error.strerror})", "--port 0"
        ) from error

    async def until_stopped() -> None:
        stopped = asyncio.Event()
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, stopped.set)
        print(f"page  {link(sock, server.token)}{query}\n      Ctrl-C ends it", flush=True)
        reading = asyncio.create_task(server.read_first())
        await serve_page(server, sock, stopped.wait())
        reading.cancel()

    asyncio.run(until_stopped())
    return 0


if __name__ == "__main__":
    sys.exit(main())
