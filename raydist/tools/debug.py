"""The command `raydist debug`: a session of pdb in a rank of a run. (driver)

`python -m raydist.tools.debug` is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Sequence

from raydist.messages.operate import Debug, DebuggerState, ListRanks, RankTable, TypedLine
from raydist.shared.errors import ConfigError
from raydist.shared.signals import stoppable
from raydist.tools.command_line import number, run_tool
from raydist.tools.editor_port import (
    PORT,
    launch_json,
    listen_for_editor,
    pass_both_ways,
    wait_for_editor,
)
from raydist.tools.running import Link, connected_run, receive, run_and_ranks, run_parser

DESCRIPTION = """\
Begins a session of pdb in the main thread of a rank, at its next line of Python, or where a
breakpoint() waits. `continue`, `quit` and Ctrl-D leave the rank, and it continues; nothing ends it.
The others wait for it in their next collective, as long as that may take.

    raydist debug rank=1
    raydist debug rank=1 --vscode      VS Code debugs it, by debugpy
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong word, or if no such run runs."""

    def debug() -> int:
        parser = run_parser(
            "debug", DESCRIPTION, "; rank=1 (default: the only rank that waits at a breakpoint())"
        )
        parser.add_argument(
            "--vscode", action="store_true", help="wait for an editor, which needs debugpy there"
        )
        parser.add_argument(
            "--port", default=str(PORT), help=f"with --vscode: of 127.0.0.1 (default: {PORT})"
        )
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        place, ranks = run_and_ranks("raydist debug", arguments.overrides)
        if len(ranks) > 1:
            raise ConfigError.of("rank", ranks, "one rank at a time", f"rank={ranks[0]}")
        if arguments.vscode:
            return debug_in_editor(arguments, place, ranks)
        with stoppable(), connected_run(place, arguments) as link:
            link.send(Debug(ranks[0] if ranks else waiting_rank(link)))
            threading.Thread(target=pass_lines, args=(link,), daemon=True).start()
            return show_session(link)

    return run_tool(debug)


def debug_in_editor(arguments: argparse.Namespace, place: str, ranks: list[int]) -> int:
    """Wait for an editor, and pass on what it and debugpy send until it leaves."""
    port = int(number("--port", arguments.port, 0, 65535, whole=True))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen_for_editor(port))
        stack.enter_context(stoppable())
        link = stack.enter_context(connected_run(place, arguments))
        rank = ranks[0] if ranks else waiting_rank(link)
        link.send(Debug(rank, by_editor=True))
        receive(link, DebuggerState)
        print(launch_json(rank, listener.getsockname()[1]))
        print("waiting for VS Code: put this into launch.json, and begin to debug", flush=True)
        editor = stack.enter_context(wait_for_editor(listener, link))
        listener.close()
        print(f"an editor debugs rank {rank}; Ctrl-C ends its session", flush=True)
        pass_both_ways(editor, link)
        print("the rank continues")
    return 0


def waiting_rank(link: Link) -> int:
    """Return the only rank that waits in the debugger. ConfigError: there are none, or several."""
    link.send(ListRanks())
    rows = receive(link, RankTable).rows
    waiting = [row["rank"] for row in rows if row["state"].startswith("waits in the debugger")]
    if len(waiting) != 1:
        which = ", ".join(f"rank={rank}" for rank in waiting or range(len(rows))[:4])
        why = "several ranks wait" if waiting else "no rank waits at a breakpoint()"
        raise ConfigError(f"raydist debug: {why}; type one of {which}")
    return waiting[0]


def pass_lines(link: Link) -> None:
    """Send what the person types, until the end of the input."""
    for line in sys.stdin:
        link.send(TypedLine(line))
    link.send(TypedLine("quit\n"))


def show_session(link: Link) -> int:
    """Show what the debugger says until the session is over."""
    entered = warned = False
    while True:
        state = receive(link, DebuggerState)
        if state.place and not entered:
            entered = True
        elif not entered and not warned and not state.over:
            warned = True
            print(
                "the rank is in C code, and enters at its next line of Python; Ctrl-C gives up",
                file=sys.stderr,
            )
        print(state.text, end="", flush=True)
        if state.over:
            print("the rank continues")
            return 0


if __name__ == "__main__":
    sys.exit(main())
