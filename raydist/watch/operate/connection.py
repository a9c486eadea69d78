"""A connection between a command and the driver of a run, and where the driver listens. (driver)

The driver listens on a Unix socket in Linux's abstract namespace: it opens no port, and leaves no
file behind when it is killed. Each side accepts only a process of its own user (or root) that it
can see: one in another container on the same network is refused, as its pid is not visible here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from raydist.messages.wire import Message, decode, encode
from raydist.shared.own_path import machine_id
from raydist.shared.whole_file import write_at_once

FILE = "driver.json"
"""The file of a run folder that says where its driver listens. It is there while ranks run."""
LIMIT = 1 << 26
"""Maximum bytes of a message; a longer one ends the connection."""


@dataclass(frozen=True)
class DriverAddress:
    """Where the driver of a run listens. It contains no secret."""

    socket: str
    """The name in the abstract namespace."""
    pid: int
    host: str
    machine: str
    """As shared.own_path.machine_id()."""
    network: str
    """The network namespace of the driver: abstract names are visible in it only."""
    node: str
    """Ray's id of the driver's node; empty without Ray."""
    buttons: bool = True
    """Whether pages may have buttons for this run (`watch.operate`)."""

    def is_here(self) -> bool:
        """Report whether the driver's name is visible to this process."""
        with contextlib.suppress(OSError):
            own = os.readlink("/proc/self/ns/net")
            return (self.machine, self.network) == (machine_id(), own)
        return False

    def write(self, folder: Path) -> None:
        """Write FILE: readers see the whole file or none."""
        write_at_once(folder / FILE, f"{json.dumps(asdict(self))}\n".encode())


def read_address(folder: Path) -> DriverAddress | None:
    """Return where the driver of this run folder listens or listened; None if unknown."""
    try:
        return DriverAddress(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class CommandLink(AbstractContextManager["CommandLink"]):
    """One end of a connection: messages as lines of JSON.

    One thread may send while another receives.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""
        self._poll = select.poll()  # a driver may have thousands of files open
        self._poll.register(sock, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send a message. OSError: the other end has closed the connection."""
        self.sock.sendall(encode(message) + b"\n")

    def receive(self, within_s: float | None = None) -> Message | None:
        """Return the next message; None once the other end has closed the connection.

        TimeoutError: none came in `within_s` seconds (None: waits). ValueError: it is no message.
        """
        line = self.receive_line(within_s)
        return None if line is None else decode(line)

    def wait(self, other: socket.socket) -> None:
        """Wait until there may be a message, or something can be read from another socket."""
        if b"\n" not in self._rest:
            poll = select.poll()
            poll.register(self.sock, select.POLLIN)
            poll.register(other, select.POLLIN)
            poll.poll()

    def receive_line(self, within_s: float | None = None) -> bytes | None:
        """Return the line of the next message, as `receive`."""
        while b"\n" not in self._rest:
            if within_s is not None and not self._poll.poll(within_s * 1000):
                raise TimeoutError
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._rest += data
            if len(self._rest) > LIMIT:
                raise ValueError("a message is too long")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def take_no_more(self) -> None:
        """Let nothing more be received; a thread that waits in `receive` gets None."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RD)

    def end(self) -> None:
        """End the connection; a thread that waits in `receive` gets None, and closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free its descriptor. No other thread may use it."""
        self.end()
        self.sock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def is_own(peer: socket.socket, or_root: bool = True) -> bool:
    """Report whether the process at the other end is of this user, or root, and visible here.

    `or_root`: whether root's counts: a driver of root's accepts no other user.
    Source: SO_PEERCRED of unix(7). The pid is 0 for a process in another container.
    """
    size = struct.calcsize("iII")
    pid, uid, _ = struct.unpack("iII", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid > 0 and (uid == os.getuid() or (or_root and uid == 0))
