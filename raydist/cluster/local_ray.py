"""A Ray that this program has started ends with the program, even if the program is killed. (driver)"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable


def reaper(leaders: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start a process that waits for the end of this one, and then kills the process groups of `leaders`."""
    groups = [f"-{pid}" for pid in leaders]
    command = ["sh", "-c", 'read -r _; kill -s KILL -- "$@"', "reaper", *groups]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
