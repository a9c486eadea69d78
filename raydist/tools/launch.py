"""`python -m raydist.tools.launch`: torchrun's command line, on the nodes of a Ray cluster. (driver)"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from raydist import train
from raydist.errors import ConfigError
from raydist.words import torchrun


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. The exit code, as of raydist.train."""
    try:
        said = torchrun.translate(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return train.tell(error)
    except SystemExit as asked:  # --help
        return int(asked.code or 0)
    if said.runs:
        os.environ["RAYDIST_RUNS"] = said.runs
    for note in said.notes:
        print(f"note: {note}", file=sys.stderr)
    return train.main(said.words)


if __name__ == "__main__":
    sys.exit(main())
