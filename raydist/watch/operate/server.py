"""Listens for commands about a run while its ranks run, one thread for each command. (driver)"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager

from raydist.launch.limits import ANSWER_S
from raydist.messages.operate import Refused
from raydist.messages.wire import Message
from raydist.shared.errors import ConfigError, last_line
from raydist.shared.own_path import machine_id
from raydist.watch.operate.answers import OperatedRun, answer
from raydist.watch.operate.connection import FILE, CommandLink, DriverAddress, is_own

REQUEST_S = 10.0
"""Seconds within which a command sends its first request."""
AGAIN_S = 3600.0
"""Seconds within which it sends another one: it may be suspended. One by `--job` may be gone."""
LAST_S = 2.0
"""Limit on the wait, at the end of the run, for the answers that are in its last events."""


class OperateServer(AbstractContextManager["OperateServer"]):
    """Answers commands about a run inside the `with` block. Its failure ends no run.

    Until a command connects, its only thread waits in the kernel.
    """

    def __init__(self, run: OperatedRun) -> None:
        self._run = run
        self._listener: socket.socket | None = None
        self._open = set[CommandLink]()
        self._changed = threading.Condition()
        """Guards the connections, and tells that one was closed."""

    def __enter__(self) -> OperateServer:
        if sys.platform != "linux":  # elsewhere there is no abstract namespace
            return self
        name = f"raydist-{secrets.token_hex(8)}"
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{name}")
            self._listener.listen()
            self._address(name).write(self._run.folder)
        except OSError as error:  # a full disk, or too many files are open
            self._run.events.warn(
                f"raydist ranks, stacks, … cannot reach this run ({error.strerror})"
            )
            return self
        threading.Thread(
            target=self._accept, args=(self._listener,), name="raydist-operate", daemon=True
        ).start()
        return self

    def _address(self, name: str) -> DriverAddress:
        return DriverAddress(
            name,
            os.getpid(),
            socket.gethostname(),
            machine_id(),
            os.readlink("/proc/self/ns/net"),
            self._run.node,
            self._run.buttons,
        )

    def __exit__(self, *_: object) -> None:
        if self._listener is None:
            return
        (self._run.folder / FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()
        # `raydist set` may still have to read that the ranks have changed their settings.
        self._run.ended.set()
        with self._changed:
            for connection in self._open:
                connection.take_no_more()
            self._changed.wait_for(lambda: not self._open, LAST_S)
            for connection in self._open:
                connection.end()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                sock, _ = listener.accept()
                if is_own(sock):
                    threading.Thread(
                        target=self._serve,
                        args=(CommandLink(sock),),
                        name="raydist-command",
                        daemon=True,
                    ).start()
                else:
                    sock.close()

    def _serve(self, connection: CommandLink) -> None:
        """Answer one command, which may have several requests."""
        with self._changed:
            self._open.add(connection)
        try:
            self._answer_all(connection)
        except OSError:  # the command has been ended, or the run has
            pass
        finally:
            with self._changed:
                self._open.discard(connection)
                connection.close()
                self._changed.notify()

    def _answer_all(self, connection: CommandLink) -> None:
        within_s = REQUEST_S
        try:
            while (request := self._request(connection, within_s)) is not None:
                answer(self._run, request, connection)
                within_s = AGAIN_S
        except ConnectionError:  # the command has gone, or the run has ended
            raise
        except FutureTimeoutError:  # on Python 3.10 this is not the built-in one
            connection.send(Refused(f"an agent has not answered within {ANSWER_S:.0f} s", False))
        except Exception as error:
            connection.send(Refused(last_line(error), isinstance(error, ConfigError)))

    @staticmethod
    def _request(connection: CommandLink, within_s: float) -> Message | None:
        """Return the next request; None: there is no other one."""
        try:
            return connection.receive(within_s)
        except TimeoutError:
            return None
