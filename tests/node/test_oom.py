"""The OOM verdict: from files of other machines, and for a rank in a real cgroup with a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.node import oom
from raydist.shared.errors import RunFailed
from tests.machines import write

NOT_KERNEL = "SIGKILL was not sent by the kernel's OOM killer"
V2 = "0::/kubepods/pod1/abc"
V1 = "9:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/"
LOG = (
    "6,1,{early},-;Out of memory: Killed process 42 (python3) total-vm:1kB, anon-rss:1kB, "
    "file-rss:1kB, shmem-rss:0kB\n"
    "3,2,{late},-;Memory cgroup out of memory: Killed process {pid} (python3) total-vm:221356kB, "
    "anon-rss:1048576kB, "
    "file-rss:5352kB, shmem-rss:524288kB, UID:0 pgtables:188kB oom_score_adj:0\n"
)
"""Records as this machine's kernel (6.18) writes them."""


def machine(
    root: Path, kills: int | None, whole: int | None, group: str = V2, log: str = ""
) -> Path:
    """Return a machine whose kernel has killed so often in the process's group, and in total; None
    if it does not report that."""
    write(root / "proc/7/cgroup", group)
    write(root / "proc/vmstat", "pgfault 12" + ("" if whole is None else f"\noom_kill {whole}"))
    if kills is not None and group == V2:
        folder = root / "sys/fs/cgroup/kubepods/pod1/abc"
        write(
            folder / "memory.events",
            f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 0",
        )
        write(folder / "memory.max", "2147483648")
    elif kills is not None:  # in a container, its own group is the root
        write(
            root / "sys/fs/cgroup/memory/memory.oom_control",
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}",
        )
        write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    if log:
        write(root / "dev/kmsg", log)
    return root


def verdict(
    root: Path,
    before: tuple[int | None, int | None],
    after: tuple[int | None, int | None],
    **how: Any,
) -> str:
    counted = oom.read_count(7, machine(root, *before, **how))
    why, by_kernel = oom.oom_verdict(7, counted, machine(root, *after, **how))
    assert by_kernel == why.startswith("out of memory")
    return why


@pytest.mark.parametrize(
    ("before", "after", "group", "words"),
    [
        (
            (1, 5),
            (2, 6),
            V2,
            "out of memory: the kernel's out-of-memory killer chose it; its cgroup may have 2.0 "
            "GiB",
        ),
        (
            (1, 5),
            (2, 6),
            V1,
            "out of memory: the kernel's out-of-memory killer chose it; the machine had no more",
        ),
        ((1, 5), (1, 5), V2, f"{NOT_KERNEL} (its counter did not change): another process sent it"),
        (
            (1, 5),
            (1, 6),
            V2,
            f"{NOT_KERNEL} (it ended processes of other cgroups only): another process sent it",
        ),
        ((None, 5), (None, 6), V2, ""),
        ((None, None), (None, None), V2, ""),
        (
            (1, None),
            (1, None),
            V2,
            f"{NOT_KERNEL} (none of its cgroup's processes was ended): another process sent it",
        ),
    ],
)
def test_the_verdict_of_the_counters(
    tmp_path: Path, before: Any, after: Any, group: str, words: str
) -> None:
    assert verdict(tmp_path, before, after, group=group) == words


def test_the_kernels_log_has_the_memory_of_the_process(tmp_path: Path) -> None:
    now = int(time.monotonic() * 1e6)
    log = LOG.format(early=now - 60_000_000, late=now, pid=7)
    assert "it held 1.5 GiB; its cgroup may have 2.0 GiB" in verdict(
        tmp_path, (0, 0), (1, 1), log=log
    )


@pytest.mark.parametrize(("ago_s", "pid"), [(60, 7), (0, 8)])
def test_records_of_another_pid_or_of_earlier_do_not_count(
    tmp_path: Path, ago_s: int, pid: int
) -> None:
    now = int((time.monotonic() - ago_s) * 1e6)
    log = LOG.format(early=now - 60_000_000, late=now, pid=pid)
    assert verdict(tmp_path, (0, 0), (0, 0), log=log).startswith(NOT_KERNEL)


def test_kills_of_other_processes_of_the_cgroup(tmp_path: Path) -> None:
    counted = oom.read_count(7, machine(tmp_path, 1, 1))
    assert oom.other_victims(counted) == ""
    machine(tmp_path, 3, 3)
    assert (
        oom.other_victims(counted)
        == "the kernel's out-of-memory killer ended 2 of its cgroup's processes meanwhile"
    )


@pytest.fixture
def small() -> Iterator[Path]:
    """A cgroup of this very machine with little memory; entered by writing to its cgroup.procs."""
    own = oom.memory_cgroup("self", Path("/"))
    if own is None or os.geteuid() != 0:
        pytest.skip("a memory cgroup is made by root, where the controller is mounted")
    group = own / f"raydist-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(
            group / name
            for name in ("memory.max", "memory.limit_in_bytes")
            if (group / name).exists()
        )
        limit.write_text(str(900 << 20))
    except (OSError, StopIteration):
        pytest.skip("this machine does not allow memory limits of cgroups")
    yield group
    group.rmdir()


@pytest.mark.root
def test_a_rank_that_the_oom_killer_ends_is_reported_as_that(tmp_path: Path, small: Path) -> None:
    """As in a container: all that the run starts has a limit together, and the kernel takes the
    largest."""
    (tmp_path / "hungry.py").write_text(
        "import torch, raydist\n\n\ndef job():\n    raydist.report(step=1)\n    held = []\n"
        "    while raydist.rank().rank == 1:\n        held.append(torch.ones(1 << 22))\n"
        "    torch.distributed.barrier()\n"
    )
    command = [
        sys.executable,
        "-m",
        "raydist.train",
        "job=hungry.py",
        "scale=1x2",
        "group=inline",
        "restart=none",
    ]
    enter = f'echo $$ > {small}/cgroup.procs; exec "$@"'
    env = {**os.environ, "PYTHONPATH": str(Path(raydist.__file__).parent.parent)}
    ran = subprocess.run(
        ["sh", "-c", enter, "sh", *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "rank 1 on" in ran.stdout
    assert (
        "killed by SIGKILL (out of memory: the kernel's out-of-memory killer chose it" in ran.stdout
    )
    assert "its cgroup may have 900 MiB" in ran.stdout
    assert "advice: reduce the memory of the ranks" in ran.stdout


def test_a_rank_that_another_process_kills_is_reported_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def job() -> None:
        if raydist.rank().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RunFailed, match=NOT_KERNEL) as caught:
        raydist.run(job, "scale=1x2", "group=inline", "restart=none", "watch.progress=none")
    assert not caught.value.result.cause.oom
