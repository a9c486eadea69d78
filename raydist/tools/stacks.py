"""The command `raydist stacks`: where in their programs the ranks of a run are. (driver)

`python -m raydist.tools.stacks` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist.messages.operate import GetStacks, TextReply
from raydist.tools.command_line import run_tool
from raydist.tools.running import connected_run, receive, run_and_ranks, run_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong word, or if no such run runs."""

    def stacks() -> int:
        parser = run_parser(
            "stacks",
            "Shows where in their programs the ranks of a run are: equal stacks together, the odd "
            "rank first.",
            "; rank=3 or rank=0,2 for some of the ranks",
        )
        parser.add_argument(
            "--native", action="store_true", help="the frames of C code too, by py-spy"
        )
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        place, ranks = run_and_ranks("raydist stacks", arguments.overrides)
        with connected_run(place, arguments) as link:
            link.send(GetStacks(ranks, arguments.native))
            reply = receive(link, TextReply)
        print("\n".join(reply.lines))
        if reply.file:
            print(f"all threads: {reply.file} in the run folder")
        return 0

    return run_tool(stacks)


if __name__ == "__main__":
    sys.exit(main())
