"""A rank's output on its node: the agent reads it, and frees what it has read. (actor)"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from raydist.node.nccl_output import MAX_BYTES

FREED_AT_ONCE = 1 << 22
"""Bytes; a multiple of a page and of the offset of a mapping."""


class OutputFile:
    """The file that a rank appends to.

    Its beginning is kept, because NCCL's log is in it. The driver has all of the output.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._freed_until = MAX_BYTES

    def read(self, most: int) -> bytes:
        """Return at most `most` further bytes."""
        data = self._file.read(most)
        # `> /dev/stderr` in a shell script empties the file, and what follows is at its beginning.
        if not data and os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._freed_until = MAX_BYTES
            data = self._file.read(most)
        while self._file.tell() - self._freed_until >= FREED_AT_ONCE:
            # If the file system can't free a part, the file stays as it is.
            with (
                contextlib.suppress(OSError),
                self._map() as part,
            ):
                part.madvise(mmap.MADV_REMOVE)
            self._freed_until += FREED_AT_ONCE
        return data

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), FREED_AT_ONCE, offset=self._freed_until)
