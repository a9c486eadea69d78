"""A run folder on this machine whose files come from elsewhere when they are read: a URL, a cluster's logs. (driver)"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raydist.state.object_store import StoragePath

FIRST_S = 3.0
"""Longest wait for the first bytes of a file; what comes later is read later."""
AGAIN_S = 5.0
"""Seconds until a file that was not there is asked for again."""

Open = Callable[[str], Iterator[bytes]]
"""Gives the bytes of a file of the run; of one that grows also those still to come. OSError: it is not there."""


@dataclass
class Mirror:
    """Copies each file into `folder` once it is asked for, by a thread that ends with the program."""

    folder: Path
    open: Open
    _copies: dict[str, threading.Event] = field(default_factory=dict)
    """By name: set once bytes of the file are here, or will not come for now."""

    async def fetch(self, name: str) -> None:
        """Return when the file, or its beginning, is in the folder; or when it is not to be had."""
        if name not in self._copies:
            self._copies[name] = threading.Event()
            threading.Thread(target=self._copy, args=(name,), name=f"raydist-{name}", daemon=True).start()
        if not self._copies[name].is_set():
            await asyncio.to_thread(self._copies[name].wait, FIRST_S)

    def _copy(self, name: str) -> None:
        path, here = self.folder / name, self._copies[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            with path.open("wb", buffering=0) as file:
                for block in self.open(name):
                    file.write(block)
                    here.set()
            here.set()
            return
        path.unlink(missing_ok=True)
        here.set()
        threading.Event().wait(AGAIN_S)
        del self._copies[name]


def stored(run: StoragePath) -> Open:
    """Files of a run's records in its storage; they are there when the run has ended."""

    def read(name: str) -> Iterator[bytes]:
        try:
            yield (run / name).read_bytes()
        except Exception as error:  # each store has its own
            raise OSError(str(error)) from error

    return read
