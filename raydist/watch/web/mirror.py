"""A local run folder whose files come from elsewhere on read: a URL, a cluster's logs. (driver)"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from raydist.shared.whole_file import write_at_once
from raydist.state.object_store import StoragePath

FIRST_S = 3.0
"""Limit on the wait for the first bytes of a file that is followed; later bytes are read later."""
AGAIN_S = 5.0
"""Seconds until a file that was missing, or whose connection broke, is requested again."""
IDLE_S = 60.0
"""Seconds after which a file that nobody reads is no longer followed."""
AT_ONCE = 16
"""Maximum number of whole files that are read at a time.

Ray's log API refuses more than 100 requests at a time.
"""
TRIES = 3
"""How often a whole file is requested if the connection breaks."""

Read = Callable[[str, bool], AsyncIterator[bytes]]
"""Yields the bytes of a file of the run, by name.

With True it also yields those that are added to it, without an end. FileNotFoundError: the file
does not exist. Another OSError: the connection broke, and the file has more bytes.
"""


@dataclass
class Following:
    """A file that is followed."""

    task: asyncio.Task[None]
    begun: asyncio.Event
    """Set once bytes of the file are here, or will not arrive for now."""
    requested_at: float
    """When the file was last requested, in the seconds of time.monotonic."""


@dataclass
class Mirror:
    """A folder into which each file is copied once it is requested."""

    folder: Path
    read: Read
    grows: bool
    """Whether files grow. If not, each is read once and completely."""
    _following: dict[str, Following] = field(default_factory=dict)
    _readers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The files that are being read completely, by name."""
    _absent: dict[str, float] = field(default_factory=dict)
    """When files were missing, by name, in the seconds of time.monotonic."""
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def fetch(self, name: str, whole: bool = False) -> None:
        """Wait until the file is in the folder, or unavailable.

        `whole`: with all its current content; OSError: the connection broke repeatedly. Otherwise
        its beginning suffices: it is followed for as long as it is requested.
        """
        await asyncio.sleep(0)  # a caller's loop must not keep the bytes from arriving
        if whole or not self.grows:
            await self._fetch_whole(name)
        else:
            await self._fetch_beginning(name)

    async def _fetch_whole(self, name: str) -> None:
        if not self.grows and (self.folder / name).exists():
            return
        if time.monotonic() - self._absent.get(name, -AGAIN_S) < AGAIN_S:
            return
        if name not in self._readers:
            task = self._readers[name] = asyncio.create_task(self._read_whole(name))
            task.add_done_callback(lambda done: self._read_ended(name, done))
        # Whoever gives up leaves the task to those who still wait.
        await asyncio.shield(self._readers[name])

    def _read_ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._readers[name]
        if not task.cancelled():
            task.exception()  # asyncio complains about an exception that nobody has retrieved

    async def _read_whole(self, name: str) -> None:
        async with self._slots:
            for tries_left in reversed(range(TRIES)):
                try:
                    await self._copy(name, follow=False, begun=asyncio.Event())
                    return
                except FileNotFoundError:
                    self._absent[name] = time.monotonic()
                    return
                except OSError:
                    if not tries_left:
                        raise

    async def _fetch_beginning(self, name: str) -> None:
        following = self._following.get(name)
        if following is None or following.task.done():
            begun = asyncio.Event()
            following = Following(asyncio.create_task(self._follow(name, begun)), begun, 0.0)
            self._following[name] = following
        following.requested_at = time.monotonic()
        self._leave_unwanted()
        if not (self.folder / name).exists():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(following.begun.wait(), FIRST_S)
        following.begun.set()  # wait only once for a silent file

    def _leave_unwanted(self) -> None:
        """Close the streams of files that nobody reads any more."""
        oldest = time.monotonic() - IDLE_S
        for name, following in [*self._following.items()]:
            if following.requested_at < oldest:
                following.task.cancel()
                del self._following[name]

    async def _follow(self, name: str, begun: asyncio.Event) -> None:
        """Copy what is added to a file.

        Whatever ends the stream (a laptop that sleeps, ssh), it is opened again.
        """
        while True:
            with contextlib.suppress(OSError):
                await self._copy(name, follow=True, begun=begun)
            begun.set()
            await asyncio.sleep(AGAIN_S)

    async def _copy(self, name: str, follow: bool, begun: asyncio.Event) -> None:
        """Read a file from its beginning, as Ray's log API does, and add what the copy lacks."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            content = b"".join([block async for block in self.read(name, False)])
            if not path.exists() or path.read_bytes() != content:
                write_at_once(path, content)
            return
        before, at = path.stat().st_size if path.exists() else 0, 0
        async for block in self.read(name, follow):
            add(path, at, block)
            at += len(block)
            begun.set()
        if at < before and not follow:
            write_at_once(path, path.read_bytes()[:at])
        path.touch()


def add(path: Path, at: int, block: bytes) -> None:
    """Make the copy contain these bytes at this position.

    Several readers may add to it, each in its turn.
    """
    path.touch()
    with path.open("r+b") as file:
        file.seek(at)
        known = file.read(len(block))
        if block.startswith(known):
            file.write(block[len(known) :])
            return
    # The name now belongs to another file, as in the folder of a new trial.
    write_at_once(path, path.read_bytes()[:at] + block)


def stored(run: StoragePath) -> Read:
    """Return a reader of a run's records in its storage; they exist once the run has ended."""

    async def read(name: str, follow: bool) -> AsyncIterator[bytes]:
        try:
            yield await asyncio.to_thread((run / name).read_bytes)
        except Exception as error:  # each store has its own exceptions
            raise FileNotFoundError(str(error)) from error

    return read
