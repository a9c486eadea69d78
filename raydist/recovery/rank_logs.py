"""What each rank printed, in the run folder: rank-N.log, and rank-N.nccl of NCCL. (driver)"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import IO

TAIL = 1 << 16
"""Bytes at the end of a log that `tail` reads."""


class RankLogs(AbstractContextManager["RankLogs"]):
    """The log files of one attempt, open for appending inside the `with` block."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._files: list[IO[bytes]] = []
        self._begins: list[int] = []
        """The size of each log when the attempt began, in bytes."""
        self._stack = ExitStack()

    def __enter__(self) -> RankLogs:
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = (self.path(rank) for rank in range(self._ranks))
        self._files = [self._stack.enter_context(path.open("ab", buffering=0)) for path in paths]
        self._begins = [os.fstat(file.fileno()).st_size for file in self._files]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self._folder / f"rank-{rank}.log"

    def append(self, rank: int, output: bytes, nccl: bytes) -> None:
        """Append what a rank printed, and what NCCL wrote for it.

        On a full disk it is dropped; the events report that.
        """
        with suppress(OSError):
            self._files[rank].write(output)
            if nccl:
                with self.path(rank).with_suffix(".nccl").open("ab") as file:
                    file.write(nccl)

    def tail(self, rank: int) -> str:
        """Return the end of what a rank has printed in this attempt.

        An error of an earlier attempt, perhaps on another node, is no cause of its end.
        """
        with self.path(rank).open("rb") as file:
            file.seek(max(self._begins[rank], self.path(rank).stat().st_size - TAIL))
            return file.read().decode(errors="replace")
