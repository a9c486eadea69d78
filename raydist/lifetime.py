"""Processes of a Ray that this program starts: apart from its process group, and ended when it is killed. (driver)"""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Iterable, Iterator


def reaper(leaders: Iterable[int]) -> subprocess.Popen[bytes]:
    """A process that waits for the end of this one, and then kills the process groups of `leaders`."""
    groups = [f"-{pid}" for pid in leaders]
    waits = ["sh", "-c", 'read -r _; kill -s KILL -- "$@"', "reaper", *groups]
    return subprocess.Popen(
        waits, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


@contextlib.contextmanager
def in_own_sessions() -> Iterator[None]:
    """Start Ray's processes apart from this one's group.

    `timeout`, a shell or a batch system sends its SIGTERM to the whole group. Without its GCS, Ray lets every call wait
    for a minute, and then aborts this process.
    """
    from ray._private import services

    plain = services.ConsolePopen
    services.ConsolePopen = functools.partial(plain, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = plain
