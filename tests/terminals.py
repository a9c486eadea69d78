"""A terminal into which a test types, as a person does."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tests.waiting import wait_until

LIMIT_S = 120.0
"""Limit on the wait for what a program shows on a busy machine."""
LOOK_S = 0.05
"""Seconds between two looks whether the window was closed."""
TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that of a new session, and becomes the program."""


class Terminal:
    """A program in a terminal of its own, of whose session it is the leader.

    A thread reads what it shows, unless `reads` is False.
    """

    def __init__(
        self,
        argv: Sequence[str],
        start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
        reads: bool = True,
        **options: Any,
    ) -> None:
        """`start`: the Popen of this machine or of a host of the rig."""
        self._ours, self._its = os.openpty()
        self.resize(24, 80)
        self.modes_before = self.modes
        streams = {"stdin": self._its, "stdout": self._its, "stderr": self._its}
        self.process = start([sys.executable, "-c", TAKE_TERMINAL, *argv], **streams, **options)
        self.bytes = bytearray()
        self._closed = False
        self._reading = threading.Lock()
        """Held from the read of some bytes until `bytes` has them."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        if reads:
            self._thread.start()

    def _read(self) -> None:
        # Not in `read`, which would keep the window open after `close`.
        while not self._closed:
            if self._is_readable(LOOK_S):
                with self._reading:
                    self.bytes += os.read(self._ours, 1 << 16)

    def _is_readable(self, within_s: float) -> bool:
        return bool(select.select([self._ours], [], [], within_s)[0])

    @property
    def shown(self) -> str:
        """What it has shown since the beginning."""
        return self.bytes.decode(errors="replace")

    @property
    def modes(self) -> list[Any]:
        """What termios says of the terminal."""
        return termios.tcgetattr(self._its)

    def enter(self, text: str) -> None:
        """Type a text: "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._ours, text.encode())

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Return once it has shown this often what the pattern describes."""

        def is_there() -> bool:
            if len(re.findall(pattern, self.shown)) >= times:
                return True
            assert self.process.poll() is None, self.shown
            return False

        wait_until(is_there, lambda: f"{pattern}:\n{self.shown}", LIMIT_S)

    def resize(self, rows: int, columns: int) -> None:
        """Change the size of the window."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def close(self) -> None:
        """Close the window: the kernel hangs up."""
        self._closed = True
        if self._thread.ident is not None:
            self._thread.join()
        os.close(self._its)
        os.close(self._ours)

    def wait(self) -> int:
        """Return its exit code, once what it wrote last has been read."""
        code = self.process.wait(LIMIT_S)
        while self._thread.ident is not None and not self._closed:
            with self._reading:
                if not self._is_readable(0):
                    break
            time.sleep(0.01)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        if not self._closed:
            self.close()
