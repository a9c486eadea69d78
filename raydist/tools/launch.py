"""The command `raydist launch`: torchrun's command line on the nodes of a Ray cluster. (driver)

`python -m raydist.tools.launch` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist import train
from raydist.settings import torchrun
from raydist.shared import env_names
from raydist.shared.ending import run_to_the_end
from raydist.state import object_store
from raydist.tools.command_line import run_tool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program. The exit codes are those of raydist.train."""

    def launch() -> int:
        translated = torchrun.translate_torchrun(sys.argv[1:] if argv is None else argv)
        for note in translated.notes:
            print(f"note: {note}", file=sys.stderr)
        with object_store.environment({env_names.RUNS: translated.runs} if translated.runs else {}):
            return train.main([*translated.flags, *translated.overrides])

    return run_tool(launch)


if __name__ == "__main__":
    run_to_the_end(main)
