"""Weeks of a run in minutes: reports, checkpoints and restarts by the thousand, and pids that the
kernel uses again.

One program, with no Ray: a run of two ranks reports and saves checkpoints as fast as it can, then
another run is killed and restarted again and again. Both use the same fork server, in a pid
namespace with few pids, as root. Rank 0 looks at all processes and folders at a tenth of the work,
at half of it, and at its end: what has grown from half to the end grows for good. (Before, torch's
flight recorder fills: 2,000 collectives are 14 MB.) 20 rounds are the whole soak: 10 million
reports, 20,000 checkpoints, 2,000 restarts.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raydist
from raydist.shared import kinds
from raydist.shared.events import read_kind

REPORTS, CHECKPOINTS, RESTARTS = 500_000, 1_000, 100
"""Of each round; reports of both ranks together."""
PIDS = 600
"""pid_max of the namespace. The kernel starts again at 300."""
EVERY = 1_000
"""Reports of a rank between two meetings of both."""
WORDS = ("scale=1x2", "group=inline", "backend=gloo", "watch.progress=none", "checkpoint.keep=2")


def look(mark: str, driver: int) -> None:
    """On rank 0: note what all processes and folders hold, once the driver has taken in what was
    sent."""
    time.sleep(3)
    server, own = os.getppid(), os.getpid()
    other = next((pid for pid in children(server) if prints_to(pid).endswith("rank-1.log")), 0)
    who = {"driver": driver, "fork server": server, "rank 0": own, "rank 1": other}
    facts = {
        "mark": mark,
        "processes": {name: of_process(pid) for name, pid in who.items() if pid},
        "all": sum(entry.name.isdecimal() for entry in os.scandir("/proc")),
        "tmp": count(Path(tempfile.gettempdir())),
        "shm": count(Path("/dev/shm")),
        "run": count(raydist.rank().run_dir),
        "events": (raydist.rank().run_dir / "events.jsonl").stat().st_size / 1e6,
    }
    with (raydist.rank().run_dir.parent / "looks.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def of_process(pid: int) -> tuple[float, int, int]:
    """(MB of memory that no file has, open descriptors, threads)."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M))
    memory = (int(status["RssAnon"]) + int(status["RssShmem"])) / 1e3
    return round(memory, 1), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def prints_to(pid: int) -> str:
    """The file that its output goes to: a rank has one of its own."""
    return os.readlink(f"/proc/{pid}/fd/1")


def count(folder: Path) -> tuple[int, float]:
    """(files, MB) below a folder."""
    sizes = [each.stat().st_size for each in folder.rglob("*") if each.is_file()]
    return len(sizes), round(sum(sizes) / 1e6, 2)


def reporting(rounds: int, driver: int) -> None:
    """On each rank: reports, and checkpoints of a small state."""
    import torch
    import torch.distributed as dist

    from raydist.worker import context

    pieces, saves = rounds * REPORTS // EVERY // 2, rounds * CHECKPOINTS
    marks = {
        pieces // 10: "a tenth of the reports",
        pieces // 2: "half of the reports",
        pieces: "all reports",
    }
    saved, state = 0, {"weights": torch.zeros(100)}
    for piece in range(1, pieces + 1):
        for step in range((piece - 1) * EVERY, piece * EVERY):
            raydist.report(step=step, loss=0.5)
        context.current().flush()  # no more than the agent takes
        while saved < saves * piece // pieces:
            saved += 1
            raydist.checkpoint.save(saved, state)
        dist.barrier()
        if piece in marks and raydist.rank().rank == 0:
            look(marks[piece], driver)
        dist.barrier()


def struck(config: Any, restarts: int, driver: int) -> None:
    """On each rank: a training in which one of them is killed at every second step."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    marks = {
        restarts // 10: "a tenth of the restarts",
        restarts // 2: "half of the restarts",
        restarts: "all restarts",
    }
    model, seen = nn.Linear(4, 2), list[int]()

    def loss(output: Any, target: Any) -> Any:
        from raydist.worker import context

        step = context.current().step
        if attempt in marks and not seen and raydist.rank().rank == 0:
            seen.append(step)
            look(marks[attempt], driver)
        if attempt < restarts and step >= 2 * attempt + 1 and raydist.rank().rank == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)

    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    raydist.fit(config, train=data, loss=loss, model=model)


def soak(rounds: int) -> list[str]:
    """The two runs, in this process; the table's rows."""
    folder = Path(tempfile.gettempdir()).parent
    began, restarts = time.monotonic(), rounds * RESTARTS
    done = raydist.run(
        reporting, *WORDS, f"hydra.run.dir={folder}/reports", rounds=rounds, driver=os.getpid()
    )
    assert not done.restarts, done.restarts
    reported = time.monotonic() - began
    words = (
        "snapshot.every=1",
        f"train.steps={2 * restarts + 4}",
        f"restart.max={10 * restarts}",
        "restart.window_s=null",
    )
    done = raydist.run(
        struck,
        *WORDS,
        *words,
        f"hydra.run.dir={folder}/struck",
        restarts=restarts,
        driver=os.getpid(),
    )
    assert len(done.restarts) == restarts, f"{len(done.restarts)} restarts"
    saves = len([*read_kind(kinds.Saved, folder / "reports" / "events.jsonl")])
    began_pids = Counter(
        each.pid for each in read_kind(kinds.Began, folder / "struck" / "events.jsonl")
    )
    reused = sum(times > 1 for times in began_pids.values())
    return [
        *rows([json.loads(line) for line in (folder / "looks.jsonl").read_text().splitlines()]),
        "",
        f"{rounds * REPORTS:,} reports and {saves:,} checkpoints in {reported:.0f} s, "
        f"{restarts:,} restarts in "
        f"{time.monotonic() - began - reported:.0f} s; {reused} pids were those of several ranks.",
    ]


def rows(looks: list[dict[str, Any]]) -> Iterator[str]:
    """The table: memory in MB, descriptors and threads of each process; files."""
    names = ["driver", "fork server", "rank 0", "rank 1"]
    left = "processes | files in TMPDIR | in /dev/shm | in the run folder | events"
    yield f"| after | {' | '.join(names)} | {left} |"
    yield "|---" * (len(names) + 6) + "|"
    for each in looks:
        cells = []
        for name in names:
            memory, descriptors, threads = each["processes"].get(name, (0, 0, 0))
            cells.append(f"{memory:.1f} MB, {descriptors} fd, {threads} thr")
        for name in ("tmp", "shm", "run"):
            files, size = each[name]
            cells.append(f"{files}, {size:.1f} MB")
        cells.insert(len(names), str(each["all"]))
        yield f"| {each['mark']} | {' | '.join(cells)} | {each['events']:.1f} MB |"


def lacking() -> str:
    """What this machine lacks for a pid namespace with few pids, on one line; empty: nothing."""
    if os.geteuid():
        return "the soak needs root, for a pid namespace with few pids"
    release = tuple(map(int, platform.release().split(".")[:2]))
    return (
        ""
        if release >= (6, 14)
        else f"Linux {platform.release()} has one pid_max for all pid namespaces: 6.14 has more"
    )


def main(rounds: int = 20) -> list[str]:
    """The table's rows. `rounds`: a twentieth of the soak each."""
    if missing := lacking():
        return [missing]
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name) / "tmp"
        tmp.mkdir()
        inside = (
            f"echo {PIDS} > /proc/sys/kernel/pid_max && exec {sys.executable} -m bench.soak "
            f"{rounds}"
        )
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inside]
        env = {**os.environ, "TMPDIR": str(tmp)}
        return subprocess.run(
            command, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.splitlines()


if __name__ == "__main__":
    print("\n".join(soak(int(sys.argv[1]))))
