"""Packages that only ranks may import: at import they read which rank they are in. (actor)

Lightning, for example, sets `rank_zero_only.rank` then. In a rank that is forked from a server that
has imported it, it would be rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist.shared import home
from raydist.shared.whole_file import write_at_once

VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
)
"""What torchrun tells a rank about itself."""
FILE = "rank-readers.json"
"""In the user's cache: {file of the package: its mtime in nanoseconds}."""


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Yield a set to which each of VARIABLES is added that is read inside the block."""
    kind: Any = type(os.environ)
    read = set[str]()

    class Noting(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            if name in VARIABLES:
                read.add(name)
            return super().__getitem__(name)

    # Not another object in its place: modules have `from os import environ`.
    os.environ.__class__ = Noting
    try:
        yield read
    finally:
        os.environ.__class__ = kind


def left_to_ranks(modules: Sequence[str]) -> set[str]:
    """Return those of these modules whose package was seen reading VARIABLES and is the same."""
    if not (known := _known()):
        return set()
    return {
        name for name in modules if (found := _identity(name)) and found.items() <= known.items()
    }


def remember(modules: Sequence[str]) -> None:
    """Leave the packages of these modules to the ranks from the next fork server on."""
    cache = home.user_cache()
    with contextlib.suppress(OSError):  # then the next server finds it out again
        if cache is not None:
            (cache / "raydist").mkdir(parents=True, exist_ok=True)
            known = _known()
            for name in modules:
                known |= _identity(name)
            write_at_once(cache / "raydist" / FILE, json.dumps(known, indent=1).encode())


def _known() -> dict[str, int]:
    cache = home.user_cache()
    try:
        found = json.loads((cache / "raydist" / FILE).read_text()) if cache else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _identity(name: str) -> dict[str, int]:
    """Return the file of a module's package with its mtime; empty if it is unknown."""
    with contextlib.suppress(OSError, ImportError, ValueError):
        spec = find_spec(re.split("[.:]", name)[0])
        if spec is not None and spec.origin is not None:
            return {spec.origin: Path(spec.origin).stat().st_mtime_ns}
    return {}
