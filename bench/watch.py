"""What the page of a run costs: CPU of the driver and of the page's process; and how soon a large
run's page is drawn.

A run of two ranks makes ten steps a second, without Ray, so that the agents' work is the driver's
too. It has no page, a page that nobody looks at, or a page with one viewer. The large run has 16
ranks and 100,000 steps; it is drawn by a headless Chromium.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from bench.measure import alternate, heads, row
from tests.browser import Browser
from tests.scenarios.test_watch_page import large_run, watching

MEASURED_S = 20.0
SETTLE_S = 8.0
"""Seconds after the first step until the measurement begins: the page's process has started, agents
answer seldom."""
JOB = """
import time
import torch.distributed as dist
import raydist

def job(config):
    for step in range(1, 100000):
        dist.barrier()
        time.sleep(0.1)
        raydist.report(step=step, loss=1 / step, grad_norm=1.0, lr=0.1)
"""


def turn(page: bool, viewer: bool) -> float:
    """CPU of the driver and of the page's process, in percent of a core."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(JOB)
        words = [
            "job=job.py",
            "group=inline",
            "scale=1x2",
            f"watch.page={str(page).lower()}",
            "watch.progress=lines",
        ]
        command = [sys.executable, "-m", "raydist.train", *words]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            link = ""
            for line in program.stdout:
                link = link or "".join(re.findall(r"page  (http\S+)", line))
                if "step 1," in line:
                    break
            threading.Thread(target=program.stdout.read, daemon=True).start()
            if viewer:
                threading.Thread(target=look, args=(f"{link}stream",), daemon=True).start()
            time.sleep(SETTLE_S)
            processes = [psutil.Process(program.pid)]
            processes += [
                each for each in processes[0].children() if "raydist.watch.web" in each.cmdline()
            ]
            assert len(processes) == 1 + viewer
            before = sum(sum(each.cpu_times()[:2]) for each in processes)
            time.sleep(MEASURED_S)
            used = sum(sum(each.cpu_times()[:2]) for each in processes) - before
            program.send_signal(signal.SIGINT)
    return 100 * used / MEASURED_S


def look(link: str) -> None:
    """Read the stream as a browser does, to its end."""
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        urllib.request.urlopen(link) as reply,
    ):
        while reply.read1():
            pass


def read_all(link: str) -> None:
    """Until the server has read all events."""
    with urllib.request.urlopen(link) as reply:
        while b'"share":1.0' not in reply.readline():
            pass


def seconds_to_draw(link: str) -> float:
    """From the click to the first drawn curves."""
    with Browser() as browser:
        browser.open(link)
        browser.wait_until(
            "document.body.dataset.drawn > 0 && raydist.curves.loss.steps.at(-1) == 100000"
        )
        return float(browser.value("raydist.drawn")) / 1000


def main(rounds: int) -> list[str]:
    sides = {
        "no page": lambda: turn(False, False),
        "a page, nobody looks": lambda: turn(True, False),
        "a page, one viewer": lambda: turn(True, True),
    }
    figures = alternate(sides, rounds)
    with tempfile.TemporaryDirectory() as folder:
        run = large_run(Path(folder) / "runs/large/one")
        size = os.path.getsize(run / "events.jsonl") / 1e6
        with watching(Path(folder), str(run)) as link:
            read_all(f"{link}stream")  # as the command does, by itself, from its beginning
            drawn = [seconds_to_draw(link) for _ in range(rounds)]
    return [
        f"| CPU, in percent of a core | {heads(sides, 'a page')} |",
        "|---" * 6 + "|",
        f"| driver and page | {row(figures, 'a page', '%')} |",
        "",
        f"16 ranks, 100,000 steps, {size:.0f} MB of events: "
        f"drawn {statistics.median(drawn):.2f} s after the click.",
    ]
