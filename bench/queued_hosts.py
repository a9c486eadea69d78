"""The storm of bench/queued.py on three hosts of tests/rig, as root: besides drivers, agents are
killed and stopped, and hosts lose their power.

In each round five runs of one or two hosts, one of them elastic, wait for the room of two. Every
run whose driver was left alone must finish, and with the losses of an undisturbed run if its size
does not change. The store must be empty afterwards, and the first in line must not wait while
there is room for it: the longest such time is printed. Ranks of a lost host begin again at the last
checkpoint on the disk, which every host sees. The model has no dropout: with a lost agent its ranks
lose their random generators.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.queued import JOB, events, losses
from bench.silence import HEALTH

ROOT = Path(__file__).parent.parent
CPUS = 2
"""Of a host, and of a run's node: a host has room for one node of a run."""
STEPS = 128
WORDS = (
    "job=short.py",
    "backend=gloo",
    "data.batch_size=8",
    "train.epochs=1000",
    f"train.steps={STEPS}",
    "snapshot.every=1",
    "checkpoint.every=16",
    "restart.max=100",
    "watch.progress=none",
)
QUEUE = ("queue=on", "queue.exempt_s=0", "scale.wait_s=200")
SIZES = {"one": "scale=1x2", "two": "scale=2x2", "elastic": "scale=1..2x2"}
HOST_AWAY_S = 12.0
"""Seconds until a host that has lost its power boots and joins Ray."""
LONG_S = 2.0
"""Seconds with room for the first in line after which the state of the queue is printed."""
ROUND_S = 400.0
"""Limit on a round."""
WATCH = """
import json, sys, time
import ray
from raydist.cluster import connect, ray_private
from raydist.cluster.queue import store

ray_private.load_auth_token()
ray.init(logging_level="ERROR", log_to_driver=False)
while True:
    try:
        free = {each.host: each.free.get("CPU", 0) for each in connect.alive_nodes()}
        line = store.read_all().entries
    except Exception as error:
        print(f"watch: {error!r}", file=sys.stderr)
        free, line = {}, []
    seen = [(e.name, e.state, e.demand.bundles, list(e.order), e.outside) for e in line]
    print(json.dumps({"t": time.time(), "free": free, "entries": seen}), flush=True)
    time.sleep(0.1)
"""


@dataclass
class Watch:
    """What the hosts have free, and who waits: the newest line of a program on the first host."""

    program: subprocess.Popen[str]
    newest: dict[str, Any] = field(default_factory=lambda: {"free": {}, "entries": []})

    def read(self) -> None:
        """Read until the program ends."""
        assert self.program.stdout is not None
        for line in self.program.stdout:
            if line.startswith("{"):  # Ray prints there as well
                self.newest = json.loads(line)

    def idle(self, held_back: set[str]) -> bool:
        """Return whether the first in line has room and is not placed. `held_back`: the runs whose
        driver is stopped."""
        line = [each for each in self.newest["entries"] if each[1] in ("waiting", "placing")]
        if any(each[1] == "placing" or each[4] or each[0] in held_back for each in line):
            return False
        hosts = sum(free >= CPUS for free in self.newest["free"].values())
        first = min(line, key=lambda each: each[3], default=None)
        return first is not None and first[2] <= hosts


@dataclass
class Storm:
    """One round."""

    rig: Any
    folder: Path
    watch: Watch
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    size_of: dict[str, str] = field(default_factory=dict)
    struck: set[str] = field(default_factory=set)
    """Runs whose driver was killed or interrupted."""
    stopped: dict[str, float] = field(default_factory=dict)
    """Runs whose driver is stopped -> when it goes on."""
    away: dict[str, float] = field(default_factory=dict)
    """Hosts without power -> when they boot."""
    hits: list[str] = field(default_factory=list)

    def start(self, name: str, size: str, *words: str) -> None:
        """Type a run on the first host."""
        where = self.folder / name
        where.mkdir()
        (where / "short.py").write_text(JOB.replace("nn.Dropout(0.2), ", ""))
        command = ["python", "-m", "raydist.train", *WORDS, SIZES[size], f"name={name}", *words]
        env = {"PYTHONPATH": str(ROOT)}
        with (where / "screen.txt").open("w") as screen:
            self.running[name] = self.rig.hosts[0].popen(
                command, env=env, cwd=where, stdout=screen, stderr=screen
            )
        self.size_of[name] = size

    def strike_driver(self, how: str) -> None:
        """Kill, interrupt or stop the driver of one run that still runs."""
        alive = [name for name, run in self.running.items() if run.poll() is None]
        if not alive:
            return
        name = random.choice(alive)
        self.running[name].send_signal(getattr(signal, f"SIG{how}"))
        self.hits.append(f"{how} driver of {name}")
        if how == "STOP":
            self.stopped[name] = time.monotonic() + random.uniform(1, 5)
        else:
            self.struck.add(name)

    def strike_agent(self, how: str) -> None:
        """Kill or stop an agent on one of the hosts with ranks."""
        host = random.choice([each for each in self.rig.hosts[1:] if each.name not in self.away])
        agents = [pid for pid, line in host.processes().items() if "NodeActor" in line]
        if agents:
            host.run(["kill", f"-{how}", str(random.choice(agents))], check=False)
            self.hits.append(f"{how} agent on {host.name}")

    def strike_host(self) -> None:
        """Cut the power of a host with ranks, if the other one has it."""
        if not self.away:
            host = random.choice(self.rig.hosts[1:])
            host.kill()
            self.away[host.name] = time.monotonic() + HOST_AWAY_S
            self.hits.append(f"power of {host.name}")

    def repair(self, now: float) -> None:
        """Let stopped drivers go on, and boot hosts, whose time has come."""
        for name in [name for name, until in self.stopped.items() if now > until]:
            self.running[name].send_signal(signal.SIGCONT)
            del self.stopped[name]
        for host in self.rig.hosts:
            if host.name in self.away and now > self.away[host.name]:
                host.boot()
                self.rig.ray_join(host, CPUS)
                del self.away[host.name]

    def strike(self) -> None:
        """Strike something."""
        how = random.choice(("INT", "KILL", "STOP", "agent KILL", "agent STOP", "host", "none"))
        if how == "host":
            self.strike_host()
        elif how.startswith("agent"):
            self.strike_agent(how.removeprefix("agent "))
        elif how != "none":
            self.strike_driver(how)

    def go(self) -> float:
        """Return the longest time for which there was room for the first in line."""
        began = time.monotonic()
        starts = sorted(random.uniform(0, 12) for _ in range(5))
        sizes = ["one", "one", "two", random.choice(("one", "two")), "elastic"]
        random.shuffle(sizes)
        strikes = sorted(random.uniform(2, 30) for _ in range(4))
        idle_since, idle_s = 0.0, 0.0
        while starts or self.away or any(run.poll() is None for run in self.running.values()):
            now = time.monotonic()
            if starts and now - began > starts[0]:
                starts.pop(0)
                size = sizes.pop()
                more = ("queue.shrink=true", "data.global_batch=16") if size == "elastic" else ()
                priority = f"queue.priority={random.choice((-1, 0, 0, 1))}"
                self.start(f"r{len(starts)}", size, *QUEUE, priority, *more)
            if strikes and now - began > strikes[0]:
                strikes.pop(0)
                self.strike()
            self.repair(now)
            idle_since = (idle_since or now) if self.watch.idle({*self.stopped}) else 0.0
            here_s = now - idle_since if idle_since else 0.0
            if idle_s < LONG_S <= here_s:
                print(f"room for {here_s:.1f} s: {self.watch.newest} {self.hits}", flush=True)
            idle_s = max(idle_s, here_s)
            assert now - began < ROUND_S, self.report()
            time.sleep(0.05)
        return idle_s

    def check(self, expected: dict[str, dict[int, float]]) -> int:
        """Check how the runs have ended; return the number of those that were left alone."""
        alone = self.running.keys() - self.struck
        for name in alone:
            assert self.running[name].returncode == 0, self.report()
            done = losses(self.folder / name)
            assert last_step(self.folder / name) == STEPS, self.report()
            # A lost agent takes the reports of its last half second with it.
            if self.size_of[name] != "elastic":
                whole = expected[self.size_of[name]]
                assert done == {step: whole[step] for step in done}, self.report()
        until = time.monotonic() + 15
        while self.watch.newest["entries"]:
            assert time.monotonic() < until, (self.watch.newest, self.report())
            time.sleep(0.1)
        return len(alone)

    def report(self) -> str:
        """Return what was done to the runs, and what they say."""
        screens = [
            f"--- {name} ({self.size_of[name]}), exit code {run.poll()}\n"
            + (self.folder / name / "screen.txt").read_text()[-5000:]
            for name, run in self.running.items()
        ]
        return "\n".join([f"struck: {self.hits}", *screens])

    def pauses(self) -> int:
        """Return how often runs made way."""
        found = [event for name in self.running for event in events(self.folder / name)]
        return sum(event["kind"] == "pause" for event in found)


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint of the run in a folder, as its result names it."""
    (file,) = folder.glob("runs/*/*/result.json")
    return int(json.loads(file.read_text())["checkpoint"].rpartition("-")[2])


@contextlib.contextmanager
def watched(rig: Any) -> Iterator[Watch]:
    """Yield a watch of these hosts."""
    program = rig.hosts[0].popen(
        ["python", "-c", WATCH],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
    )
    watch = Watch(program)
    reader = threading.Thread(target=watch.read, daemon=True)
    reader.start()
    try:
        yield watch
    finally:
        program.kill()
        program.wait()
        reader.join()


def main(rounds: int = 50) -> list[str]:
    """The table's rows."""
    from tests.rig import hosts

    figures = []
    with hosts(3, nics=("eth0",)) as rig, tempfile.TemporaryDirectory() as made:
        rig.ray_up(cpus=CPUS, head_cpus=0, env={**HEALTH, "PYTHONPATH": str(ROOT)})
        folder = Path(made)
        with watched(rig) as watch:
            whole = Storm(rig, folder, watch)
            for size in ("one", "two"):
                whole.start(size, size)
                assert whole.running[size].wait() == 0, whole.report()
            expected = {size: losses(folder / size) for size in ("one", "two")}
            for number in range(rounds):
                (where := folder / f"round{number}").mkdir()
                storm = Storm(rig, where, watch)
                figures.append((storm.go(), storm.check(expected), storm.pauses(), storm.hits))
                print(f"queued_hosts: round {number}: {figures[-1]}", flush=True)
    idle_s, alone, pauses, hits = zip(*figures, strict=True)
    kinds = [each.split(" of ")[0].split(" on ")[0] for struck in hits for each in struck]
    return [
        "| rounds | struck | pauses | runs left alone, with the losses of an undisturbed run | "
        "longest time with room for the first in line |",
        "|---|---|---|---|---|",
        f"| {rounds} | {', '.join(f'{kinds.count(each)} x {each}' for each in sorted({*kinds}))} "
        f"| {sum(pauses)} | {sum(alone)} | {max(idle_s):.2f} s |",
    ]
