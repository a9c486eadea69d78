"""raydist as a person runs it: a process of its own, in a folder of its own.

As a person's, most programs find the fork server of the one before: torch is imported once, not
once for each program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raydist.node import kept_server
from raydist.shared.events import Event, read_events
from tests.leftovers import after, folders_of, marked, waiting_servers

ROOT = Path(__file__).parents[1]
HEAD: dict[str, Any] = {"include_dashboard": False, "include_log_monitor": False}
"""For the head of a Cluster: what tests do not look at. The log monitor sends output that nobody
reads."""
_shared: list[Path] = []
"""The TMPDIR that programs share."""


class Program:
    """`python -m raydist.train WORD…` in `folder`, started already. All that it starts has `tmp` as
    its TMPDIR.

    Without `tmp` it is the one that these programs share, and its fork server stays for the next.
    `alone`: a TMPDIR of its own, and nothing stays: for one that starts a Ray.

    `group`: it leads a process group of its own, as a program does that a shell starts.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        address: str | None = None,
        module: str = "raydist.train",
        group: bool = False,
        tmp: Path | None = None,
        alone: bool = False,
    ) -> None:
        self.folder = folder
        # short: Ray keeps its sockets there, and a Unix socket's path may have 107 bytes
        self._own = (
            tempfile.TemporaryDirectory(prefix="p-", ignore_cleanup_errors=True) if alone else None
        )
        self.tmp = tmp or (Path(self._own.name) if self._own else shared())
        env = {**os.environ, "TMPDIR": str(self.tmp)} | (
            {"RAY_ADDRESS": address} if address else {}
        )
        if not (tmp or alone):
            env |= {
                "RAYDIST_KEEP_WARM_S": "600",
                "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
            }
            env.pop("PYTEST_CURRENT_TEST", None)  # a server is kept for one environment
        self.output = folder / "screen.txt"
        with self.output.open("w") as screen:
            command = [sys.executable, "-m", module, *words]
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=screen, stderr=screen, start_new_session=group
            )
        weakref.finalize(self, self.process.kill)  # a test that failed must not leave it running

    def wait(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    @property
    def screen(self) -> str:
        return self.output.read_text()

    @property
    def run_dir(self) -> Path:
        """The newest run folder."""
        return max(
            (path.parent for path in self.folder.glob("runs/*/*/events.jsonl")),
            key=lambda path: path.name,
        )

    def events(self, *kinds: str) -> list[Event]:
        """What happened so far, of these kinds."""
        return [
            happened
            for happened in read_events(self.run_dir / "events.jsonl")
            if not kinds or happened["kind"] in kinds
        ]

    def result(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return made

    def until_step(self, step: int, timeout: float = 90) -> None:
        """Return once rank 0 has reported that step."""

        def there() -> bool:
            paths = list(self.folder.glob("runs/*/*/events.jsonl"))
            return bool(paths) and any(
                happened.get("step", 0) >= step for happened in self.events("report")
            )

        self.until(there, f"step {step}", timeout)

    def until(self, true: Callable[[], bool], what: str = "that", timeout: float = 90) -> None:
        """Return once this holds of the running program."""
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            if true():
                return
            assert self.process.poll() is None, self.screen
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {timeout} s:\n{self.screen}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def left(self, within: float = 60.0) -> list[str]:
        """What it has left behind after so many seconds: processes, and folders of fork servers.

        A server that is kept and that nobody uses is none of it; its children are.
        """
        return list(after(self._left, within))

    def _left(self) -> dict[str, str]:
        kept = waiting_servers(self.tmp)
        found = {
            f"{pid} {line}": "" for pid, line in marked(str(self.tmp)).items() if pid not in kept
        }
        return found | {path: "" for path in folders_of(self.tmp) if not path.endswith("-warm")}


def shared() -> Path:
    """The TMPDIR that programs share, and in which their fork servers are kept."""
    if not _shared:
        _shared.append(Path(tempfile.mkdtemp(prefix="p-")))
    return _shared[0]


def end_servers() -> None:
    """End the fork servers that wait for a further program; one that is in use is left to be
    found."""
    for folder in _shared:
        for server in folder.glob("raydist-*-warm/*"):
            kept_server.end(str(server))
        shutil.rmtree(folder, ignore_errors=True)
    _shared.clear()


def plain(text: str) -> str:
    """Text without the terminal's escape codes."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
