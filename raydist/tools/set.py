"""The command `raydist set`: change settings of a run while it runs. (driver)

`python -m raydist.tools.set` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from raydist.messages.operate import ChangeSettings, TextReply
from raydist.settings.changeable import CHANGEABLE, read_changes
from raydist.tools.command_line import run_tool
from raydist.tools.running import connected_run, one_place, receive, run_parser

DESCRIPTION = f"""\
Changes settings of a running raydist.fit, on all ranks after the same step. Checkpoints have the
new values, so a restart and a resume use them, too.

    raydist set optim.lr=0.01

It can change {", ".join(CHANGEABLE[:-1])}
and {CHANGEABLE[-1]}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code: 0; 1 if the training ended before; 2 for a wrong word, or if no such run runs, or
    its program is not in raydist.fit.
    """

    def set_values() -> int:
        parser = run_parser("set", DESCRIPTION, "; optim.lr=0.01 and others")
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        words = arguments.overrides
        changes = [word for word in words if "=" in word and not Path(word).exists()]
        read_changes(changes)
        place = one_place("raydist set", [word for word in words if word not in changes])
        with connected_run(place, arguments) as link:
            link.send(ChangeSettings(changes))
            print(*receive(link, TextReply).lines, flush=True)
            print("set", *receive(link, TextReply).lines)
        return 0

    return run_tool(set_values)


if __name__ == "__main__":
    sys.exit(main())
