"""A small job beside a driver: passes a command's messages on, and prints the replies. (driver)

`python -m raydist.watch.operate.relay_job SOCKET NAME`: the driver's socket, and the name of the
job. No message is an argument: all users of the node see those. See job_link.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Sequence

from raydist.cluster import ray_private
from raydist.messages.operate import Refused
from raydist.messages.wire import encode
from raydist.watch.operate.connection import CommandLink
from raydist.watch.operate.relay import connect_here

CLOSED = b"raydist: closed"
"""What it prints after the driver's last message."""
FIRST_S = 60.0
"""Limit on the wait for the first message; after it the command has ended."""
SECOND_S = 1.0
"""Seconds until it looks for a second message: most commands send one only."""
SIGN = "alive"
"""What a sign of life of the command has in place of a number."""
GONE_S = 300.0
"""Seconds without such a sign after which the command has gone: its machine or its connection is
lost. A rank in the debugger would stand still until somebody ended this job."""
SIGNS_S = 5.0
"""Seconds between two looks for a sign."""
LOOK_S = 0.2
"""Seconds between two looks for a message."""


def main(argv: Sequence[str]) -> int:
    """Pass messages on until the driver closes the connection."""
    socket, name = argv
    with contextlib.suppress(OSError):  # Ray's log of this job: all users may enter its folder
        os.fchmod(sys.stdout.fileno(), 0o600)
    try:
        first = take_message(name, 0, FIRST_S)
        link = connect_here(socket)  # afterwards: the driver waits for a request for seconds only
    except OSError:
        print_line(encode(Refused("the run has ended", usage=True)))
    else:
        link.sock.sendall(first + b"\n")
        for further in (pass_further_on, end_without_signs):
            threading.Thread(target=further, args=(link, name), daemon=True).start()
        while (line := link.receive_line()) is not None:
            print_line(line)
        with contextlib.suppress(OSError):  # the last one would stay in the store
            ray_private.take_package(os.environ["RAY_ADDRESS"], f"{name}-{SIGN}.zip")
    print_line(CLOSED)
    return 0


def print_line(line: bytes) -> None:
    """Print a line at once."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def pass_further_on(link: CommandLink, name: str) -> None:
    """Send the driver each further message of the command."""
    time.sleep(SECOND_S)
    with contextlib.suppress(OSError):  # the driver has closed the connection
        for number in itertools.count(1):
            line = None
            while line is None:
                try:
                    line = take_message(name, number)
                except OSError:  # the GCS does not answer now
                    time.sleep(SECOND_S)
            link.sock.sendall(line + b"\n")


def end_without_signs(link: CommandLink, name: str) -> None:
    """End the connection to the driver once the command has shown no sign of life for long."""
    until = time.monotonic() + GONE_S
    while time.monotonic() < until:
        time.sleep(SIGNS_S)
        try:
            sign = ray_private.take_package(os.environ["RAY_ADDRESS"], f"{name}-{SIGN}.zip")
        except OSError:  # the GCS does not answer, and so has none
            sign = b""
        if sign is not None:
            until = time.monotonic() + GONE_S
    link.take_no_more()


def take_message(name: str, number: int, within_s: float = math.inf) -> bytes:
    """Return a message that the command has put into Ray's store, once it is there.

    OSError: it was not within so many seconds, or the GCS does not answer.
    """
    address = os.environ["RAY_ADDRESS"]  # Ray's job server sets it to that of the GCS
    until = time.monotonic() + within_s
    while (line := ray_private.take_package(address, f"{name}-{number}.zip")) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"no message came within {within_s:g} s")
        time.sleep(LOOK_S)
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
