"""The command `raydist ranks`: where each rank of a run is, and what it is doing. (driver)

`python -m raydist.tools.ranks` is the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from raydist.messages.operate import ListRanks, RankTable
from raydist.shared.errors import Stopped
from raydist.shared.signals import stoppable
from raydist.tools.command_line import run_tool
from raydist.tools.running import RunEnded, connected_run, one_place, receive, run_parser
from raydist.watch.operate.wording import rank_table

FOLLOW_S = 1.0
"""Seconds between two tables of --follow."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong flag, or if no such run runs."""

    def ranks() -> int:
        parser = run_parser("ranks", "Lists the ranks of a run: where they are, what they do.")
        parser.add_argument("--json", action="store_true", help="print it as JSON, one line a rank")
        parser.add_argument(
            "--follow", action="store_true", help="again every second, until Ctrl-C"
        )
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        try:
            return show_ranks(arguments)
        except (Stopped, RunEnded):  # what --follow waits for
            if not arguments.follow:
                raise
            return 0

    return run_tool(ranks)


def show_ranks(arguments: argparse.Namespace) -> int:
    """Print the ranks once, or until Ctrl-C or the end of the run."""
    place = one_place("raydist ranks", arguments.overrides)
    with stoppable(), connected_run(place, arguments) as link:
        while True:
            link.send(ListRanks())
            rows = receive(link, RankTable).rows
            lines = [json.dumps(row) for row in rows] if arguments.json else rank_table(rows)
            print("\n".join(lines), flush=True)
            if not arguments.follow:
                return 0
            time.sleep(FOLLOW_S)
            if not arguments.json:
                print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
