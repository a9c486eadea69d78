"""A rank in a new interpreter, where a fork of the warm one is unsafe. (actor)"""

from __future__ import annotations

import os
import subprocess
import sys

from raydist.worker import protocol
from raydist.worker.protocol import RankSpec


def spawn_rank(spec: RankSpec, fds: list[int]) -> int:
    """Start the rank as a child of this process; its pid."""
    path = f"{spec.value}.spec"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds the environment
    with os.fdopen(descriptor, "wb") as file:
        file.write(protocol.encode(spec))
    command = [sys.executable, "-m", "raydist.worker.main", path, *map(str, fds)]
    env = {**spec.env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, pass_fds=[fd for fd in fds if fd >= 0], env=env).pid
