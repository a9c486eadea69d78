"""The command `raydist stop`: stop a run as Ctrl-C does. (driver)

`python -m raydist.tools.stop` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist.messages.operate import StopRun, TextReply
from raydist.tools.command_line import run_tool
from raydist.tools.running import connected_run, one_place, receive, run_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong word, or if no such run runs."""

    def stop() -> int:
        parser = run_parser(
            "stop",
            "Stops a run as Ctrl-C does: its last state is written to the disk. It returns when "
            "the ranks have ended.",
        )
        parser.add_argument("--now", action="store_true", help="as a second Ctrl-C does")
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        place = one_place("raydist stop", arguments.overrides)
        with connected_run(place, arguments) as link:
            link.send(StopRun(arguments.now))
            print(*receive(link, TextReply).lines, flush=True)
            while link.receive() is not None:
                pass
        print("stopped")
        return 0

    return run_tool(stop)


if __name__ == "__main__":
    sys.exit(main())
