"""Write a file as a whole, or not at all. (either side)"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_at_once(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the whole file, or what was there before.

    OSError: it can't be written, as on a full disk; nothing of it is left.
    """
    with replacing(path) as part:
        part.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the file that the block writes, and that then becomes the one at `path`.

    OSError: as of write_at_once.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
