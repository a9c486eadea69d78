"""raydist as a person runs it: a separate process in a separate folder.

Most programs reuse the fork server of the program before them, as a person's do: torch is imported
once, not once for each program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raydist.node import kept_server
from raydist.shared.kinds import EventJson
from tests.leftovers import idle_servers, marked, poll_until_empty, server_folders
from tests.records import read_events
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
HEAD: dict[str, Any] = {"include_dashboard": False, "include_log_monitor": False}
"""Arguments of a Cluster's head, without the processes that tests do not need. The log monitor sends
output that nobody reads."""
KEEP_WARM_S = "600"
"""Seconds for which the fork server of a program waits for the next one."""
_shared: list[Path] = []
"""The TMPDIR that programs share."""


class Program:
    """A running `python -m raydist.train WORD…` in `folder`, started by the constructor.

    `tmp` is the TMPDIR of all processes that it starts. Without it the programs share one, and the
    fork server stays for the next program. With `alone` the program gets a separate TMPDIR and
    nothing stays, which a program that starts Ray needs.

    With `group` it leads its own process group, like a program that a shell starts.
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
        # short: Ray keeps its sockets there, and the path of a Unix socket has at most 107 bytes
        self._own = (
            tempfile.TemporaryDirectory(prefix="p-", ignore_cleanup_errors=True) if alone else None
        )
        self.tmp = tmp or (Path(self._own.name) if self._own else shared_tmp())
        env = {**os.environ, "TMPDIR": str(self.tmp)} | (
            {"RAY_ADDRESS": address} if address else {}
        )
        if not (tmp or alone):
            env |= {
                "RAYDIST_KEEP_WARM_S": KEEP_WARM_S,
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

    def wait(self, timeout: float = 240) -> int:
        return self.process.wait(timeout)

    @property
    def screen(self) -> str:
        return self.output.read_text()

    @property
    def run_dir(self) -> Path:
        """Return the newest run folder."""
        return max(
            (path.parent for path in self.folder.glob("runs/*/*/events.jsonl")),
            key=lambda path: path.name,
        )

    def events(self, *kinds: str) -> list[EventJson]:
        """Return the events so far, of these kinds only if any are given."""
        return [
            happened
            for happened in read_events(self.run_dir / "events.jsonl")
            if not kinds or happened["kind"] in kinds
        ]

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return result

    def wait_for_step(self, step: int, timeout: float = 180) -> None:
        """Return once a rank has reported that step."""

        def reached() -> bool:
            paths = list(self.folder.glob("runs/*/*/events.jsonl"))
            return bool(paths) and any(
                happened.get("step", 0) >= step for happened in self.events("report")
            )

        self.wait_until(reached, f"step {step}", timeout)

    def wait_until(
        self, condition: Callable[[], bool], what: str = "that", timeout: float = 180
    ) -> None:
        """Return once the condition is true; fail if the program ends before that."""

        def reached() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, self.screen
            return False

        wait_until(reached, lambda: f"{what}:\n{self.screen}", timeout)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def leftovers(self, within: float = 120.0) -> list[str]:
        """Return the processes and fork servers' folders that are still there after so many seconds.

        A server that is kept and that nobody uses does not count; its children do.
        """
        return list(poll_until_empty(self._leftovers, within))

    def _leftovers(self) -> dict[str, str]:
        kept = idle_servers(self.tmp)
        processes = {
            f"{pid} {line}": "" for pid, line in marked(str(self.tmp)).items() if pid not in kept
        }
        return processes | {
            path: "" for path in server_folders(self.tmp) if not path.endswith("-warm")
        }


CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster

exec(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={{**{HEAD!r}, "num_cpus": 2}})
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@contextmanager
def separate_ray(first: str = "", env: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start a Ray of one node in another process; its address.

    `first`: statements before it starts. `env`: what differs from this process's environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, first],
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(180) == 0


def python_with(folder: Path, module: str, text: str) -> str:
    """Return a Python that has one more module installed, besides all those of this one."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / f"{module}.py").write_text(text)
    more = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "more.pth").write_text(more)
    return str(folder / "bin/python")


def shared_tmp() -> Path:
    """Return the TMPDIR that programs share, and in which their fork servers are kept."""
    if not _shared:
        _shared.append(Path(tempfile.mkdtemp(prefix="p-")))
    return _shared[0]


def end_servers() -> None:
    """End the fork servers that wait for another program. One that is still in use is not ended, so
    that it is reported as a leftover."""
    for folder in _shared:
        for server in folder.glob("raydist-*-warm/*"):
            kept_server.end(str(server))
        shutil.rmtree(folder, ignore_errors=True)
    _shared.clear()


def strip_escapes(text: str) -> str:
    """Remove the terminal's escape codes from a text."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
