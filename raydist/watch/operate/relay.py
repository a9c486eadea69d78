"""Reach a driver from another host: an actor on the driver's node passes the messages on. (driver)

Ray lets only those in who have the cluster's token. The actor ends with the command.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from raydist.messages.wire import Message, decode, encode
from raydist.watch.operate.connection import CommandLink, is_own

CALL_S = 0.5
"""Seconds that a call to the actor waits for a message."""
CLOSED = b""
ANOTHER_USER = "another user listens there"
"""Also part of what Ray's error says if the actor cannot connect."""


class Relay:
    """The actor: one connection to the driver, on the driver's node."""

    def __init__(self, name: str) -> None:
        """Connect. OSError: nothing listens there. `name`: as DriverAddress.socket."""
        self._connection = connect_here(name)

    def send(self, line: bytes) -> None:
        """Pass a message to the driver. OSError: it has closed the connection."""
        self._connection.sock.sendall(line)

    def receive(self, within_s: float) -> bytes | None:
        """Return a message of the driver; CLOSED after the last; None: none came in this time."""
        try:
            line = self._connection.receive_line(within_s)
        except TimeoutError:
            return None
        return CLOSED if line is None else line


class RelayedConnection(contextlib.AbstractContextManager["RelayedConnection"]):
    """A connection to a driver on another host: the same methods as CommandLink."""

    def __init__(self, name: str, node: str) -> None:
        """Start the actor. `name`, `node`: as in DriverAddress. OSError: no driver is there."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._get: Any = ray.get
        self._kill: Any = ray.kill
        self._actor: Any = (
            ray.remote(Relay)
            .options(
                num_cpus=0,
                max_concurrency=2,  # one call may wait while another sends
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(name)
        )
        try:
            self._get(self._actor.receive.remote(0.0))
        except Exception as error:  # of Ray: its constructor failed, or the node is gone
            if ANOTHER_USER in str(error):
                raise PermissionError(ANOTHER_USER) from error
            raise ConnectionRefusedError(str(error)) from error

    def send(self, message: Message) -> None:
        """Send a message. OSError: the other end has closed the connection."""
        self._get(self._actor.send.remote(encode(message) + b"\n"))

    def receive(self, within_s: float | None = None) -> Message | None:
        """Return the next message, as CommandLink does."""
        waited = 0.0
        while within_s is None or waited <= within_s:
            line = self._get(self._actor.receive.remote(CALL_S))
            if line is not None:
                return decode(line) if line else None
            waited += CALL_S
        raise TimeoutError

    def close(self) -> None:
        """End the actor, and with it the connection."""
        self._kill(self._actor)

    def __exit__(self, *_: object) -> None:
        self.close()


def connect_here(name: str) -> CommandLink:
    """Connect to a driver of this machine.

    OSError: nothing listens there. PermissionError: another user does, and this process is not
    root's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
        if os.getuid() != 0 and not is_own(sock, or_root=False):
            raise PermissionError(ANOTHER_USER)
    except OSError:
        sock.close()
        raise
    return CommandLink(sock)
