"""False alarms of a run on busy nodes: `--rounds` is the number of minutes.

Two ranks on two of three hosts train with a spare beside 20 busy loops, each in a session of its
own, so that the kernel gives none of them less than a rank. Nothing fails: each restart, hang or
loss that raydist reports is a false alarm. The hosts are those of tests/rig: it needs root.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from bench.silence import JOB, steps
from raydist.shared.events import read_events

LOOPS = 20
WORDS = (
    "scale=2x1",
    "scale.spares=1",
    "backend=gloo",
    "watch.progress=none",
    "train.steps=1000000000",
    "checkpoint.every=100000",
)
ALARMS = ("hang", "failure", "restart", "stop")


def alarms(minutes: int) -> tuple[Counter[str], list[float], list[float]]:
    """Return the alarms, the load each ten seconds, and the seconds between two steps."""
    from tests.rig import hosts

    loads: list[float] = []
    with tempfile.TemporaryDirectory() as name, hosts(3) as rig:
        folder, root = Path(name), str(Path(__file__).parent.parent)
        (folder / "busy.py").write_text(JOB.format(folder=name))
        rig.ray_up(cpus=1, env={"PYTHONPATH": root})
        env = {"PYTHONPATH": root, "RAY_ADDRESS": rig.ray_address}
        words = [f"job={folder}/busy.py", f"hydra.run.dir={folder}/run", *WORDS]
        command = ["python", "-m", "raydist.train", *words]
        run = rig.hosts[0].popen(command, env=env, cwd=folder)
        while len(steps(folder)) < 40:
            assert run.poll() is None, "the run ended before its first steps"
            time.sleep(0.5)
        busy = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            for _ in range(LOOPS)
        ]
        try:
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until and run.poll() is None:
                time.sleep(10)
                loads.append(os.getloadavg()[0])
                if len(loads) % 30 == 0:
                    print(f"  {len(loads) // 6} min: {len(steps(folder))} steps", flush=True)
        finally:
            for each in busy:
                each.kill()
                each.wait()
        asked = time.time()
        run.send_signal(signal.SIGINT)
        run.wait(120)
        found = read_events(folder / "run" / "events.jsonl")
        told = Counter(each.kind for each in found if each.t < asked)
        times = [at for at, _, _ in steps(folder) if at < asked]
        gaps = [after - before for before, after in pairwise(times)]
        return Counter({kind: told[kind] for kind in ALARMS}), loads, gaps


def main(rounds: int = 60) -> list[str]:
    """The table's rows."""
    told, loads, gaps = alarms(rounds)
    figures = ", ".join(f"{kind} {count}" for kind, count in told.items())
    return [
        "| minutes | load, median | steps | longest pause | alarms |",
        "|---|---|---|---|---|",
        f"| {rounds} | {statistics.median(loads):.0f} | {len(gaps)} | {max(gaps):.1f} s | "
        f"{figures} |",
    ]
