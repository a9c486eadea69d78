"""watch.page=true: the page of a running run or sweep, served from the first visit on. (driver)

The process that serves it starts with that visit.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

END_S = 3.0
"""Longest wait at the end of a run for viewers to get the last changes."""


class LivePage(AbstractContextManager["LivePage"]):
    """A context manager that serves the page of a run.

    It costs nothing while nobody has opened the page.
    """

    def __init__(self, folder: Path, wanted: bool) -> None:
        """Open the port, if the page is wanted.

        `folder`: that of a run or of a sweep.
        """
        self._folder = folder
        self._token = secrets.token_urlsafe(16)
        self._child: subprocess.Popen[bytes] | None = None
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=16) if wanted else None
        self._end, self._ended = os.pipe() if wanted else (-1, -1)
        self._thread = threading.Thread(target=self._wait, name="raydist-page", daemon=True)

    @property
    def link(self) -> str:
        """The address of the page; empty if it is not wanted."""
        return (
            ""
            if self._socket is None
            else f"http://127.0.0.1:{self._socket.getsockname()[1]}/{self._token}/"
        )

    def __enter__(self) -> LivePage:
        if self._socket is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is None:
            return
        os.close(self._ended)
        self._thread.join()
        self._socket.close()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            try:
                self._child.wait(END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()

    def _wait(self) -> None:
        """Start the process at the first connection, which waits in the socket's queue."""
        assert self._socket is not None
        waiting = select.poll()
        for descriptor in (self._socket.fileno(), self._end):
            waiting.register(descriptor, select.POLLIN | select.POLLHUP)
        ready = [descriptor for descriptor, _ in waiting.poll()]
        with contextlib.suppress(OSError):
            if self._end not in ready:
                self._child = self._start(self._socket)
        os.close(self._end)

    def _start(self, sock: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process.

        It ends when its standard input does, even after a SIGKILL of the driver; no Ctrl-C reaches
        it.
        """
        number = str(sock.fileno())
        child = subprocess.Popen(
            [sys.executable, "-m", "raydist.watch.web", str(self._folder.absolute()), number],
            pass_fds=[sock.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert child.stdin is not None
        child.stdin.write(self._token.encode() + b"\n")
        child.stdin.flush()
        return child
