"""`python -m raydist.tools.launch`: torchrun's command line, on the nodes of a Ray cluster. (driver)"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist import storage, train
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
    for note in said.notes:
        print(f"note: {note}", file=sys.stderr)
    with storage.environment({"RAYDIST_RUNS": said.runs} if said.runs else {}):
        return train.main(said.words)


if __name__ == "__main__":
    sys.exit(main())
