"""Which addresses are there: the kernel of each accepts or refuses a connection. (either side)"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Collection
from contextlib import ExitStack

Address = tuple[str, int]
"""A machine's address and a port."""
TRIES = 3
"""Connections to one address within a wait: a packet that is lost is sent again only after a
second."""
NOT_THERE = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
)
"""The errors that a machine that is not there leads to. A refused connection is an answer, and an
error of this machine, such as too many open files, says nothing about the other one."""


def reached_addresses(addresses: Collection[Address], within_s: float) -> set[Address]:
    """Return those of these addresses that are not known to be out of reach.

    A kernel accepts connections however busy its machine is, and also if the process that listens
    is stopped. Returns as soon as all have answered.
    """
    there: set[Address] = set()
    began = time.monotonic()
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())

        def note_answers(until: float) -> None:
            """Note the answers until then; at least those that the kernel has now."""
            while there != set(addresses):
                ready = selector.select(max(0.0, until - time.monotonic()))
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    error = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error not in NOT_THERE:
                        there.add(key.data)
                if not ready and time.monotonic() >= until:
                    return

        for number in range(1, TRIES + 1):
            for address in set(addresses) - there:
                try:
                    connection = stack.enter_context(_connect(address))
                except OSError as error:
                    if error.errno not in NOT_THERE:
                        there.add(address)
                    continue
                selector.register(connection, selectors.EVENT_WRITE, address)
            note_answers(began + within_s * number / TRIES)
    return there


def _connect(address: Address) -> socket.socket:
    """Begin a connection, without waiting for it. Raises OSError."""
    family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    error = connection.connect_ex(resolved)
    if error in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    raise OSError(error, os.strerror(error))
