"""The small job that passes messages on: what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from raydist.messages.operate import Refused
from raydist.messages.wire import decode
from raydist.watch.operate.relay_job import CLOSED
from tests.conftest import ROOT


def test_its_log_is_for_its_own_user_only(tmp_path: Path) -> None:
    """It has what `raydist exec` printed. Ray lets all users into its folder of logs."""
    path = tmp_path / "job-driver.log"
    command = [sys.executable, "-m", "raydist.watch.operate.relay_job", "raydist-none", "x"]
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    with path.open("a") as log:  # as Ray's JobSupervisor does
        path.chmod(0o644)
        subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=True)
    assert path.stat().st_mode & 0o777 == 0o600
    first, last = path.read_bytes().splitlines()
    assert isinstance(decode(first), Refused)
    assert last == CLOSED
