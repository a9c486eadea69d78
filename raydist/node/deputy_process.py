"""Starts the deputy of a run on its node, and tells it that the driver lives. (actor)

The agents start it, not the fork server: a rank, which is forked from that, would inherit the
webhook.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

from raydist.messages.deputy import DISMISSED, Duty, beat_line
from raydist.messages.wire import encode
from raydist.node.fork_launcher import own_search_path
from raydist.shared import env_names

MODULE = "raydist.watch.notify.deputy"
BEAT_S = 1.0
"""Seconds between two lines to the deputy, at least."""


class DeputyProcess:
    """The deputy of one run on this node, which outlives the agents if nobody dismisses it."""

    def __init__(self, lines: IO[bytes]) -> None:
        self._lines = lines
        self._next = 0.0
        """When the next line is due, on the monotonic clock."""

    @classmethod
    def start(cls, duty: Duty) -> DeputyProcess:
        """Start a deputy; return once it is no child of this process. OSError: it did not start.

        Ray kills the children of a worker that it ends. The duty is written to its input: everybody
        on the machine can read a command line, and every process of the user an environment.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            cwd="/",  # nothing there is imported, and it is on no file server that may be lost too
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(own_search_path()),
                env_names.PYTHONPATH_BEFORE: os.environ.get("PYTHONPATH", ""),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the exit code says more
            process.stdin.write(encode(duty) + b"\n")
            process.stdin.flush()
        if code := process.wait():
            with suppress(BrokenPipeError):
                process.stdin.close()
            raise OSError(f"{MODULE} ended with code {code}; the log of the Ray worker says why")
        os.set_blocking(
            process.stdin.fileno(), False
        )  # a stopped deputy must not hold the agents up
        return cls(process.stdin)

    def note_question(self, step: int) -> None:
        """Note that the driver has just asked something. `step`: the newest of the node's ranks."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + BEAT_S
            self._write(beat_line(step))

    def dismiss(self) -> None:
        """Have the deputy end without a word."""
        self._write(DISMISSED)
        with suppress(OSError):
            self._lines.close()

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # it has ended, or is stopped
            os.write(self._lines.fileno(), line)
