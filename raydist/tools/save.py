"""The command `raydist save`: have a run save a checkpoint now, without stopping. (driver)

`python -m raydist.tools.save` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist.messages.operate import SaveNow, TextReply
from raydist.tools.command_line import run_tool
from raydist.tools.running import connected_run, one_place, receive, run_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code: 0; 1 if no checkpoint became complete; 2 for a wrong word, or if no such run
    runs, or its program is not in raydist.fit.
    """

    def save() -> int:
        parser = run_parser(
            "save", "Has a run save a checkpoint after its current step, and continue."
        )
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        place = one_place("raydist save", arguments.overrides)
        with connected_run(place, arguments) as link:
            link.send(SaveNow())
            receive(link, TextReply)
            print(*receive(link, TextReply).lines)
        return 0

    return run_tool(save)


if __name__ == "__main__":
    sys.exit(main())
