"""The memory that is left to a process, of its machine and of its container."""

from __future__ import annotations

from pathlib import Path

from raydist.shared.cgroup import memory_left


def test_the_memory_left_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    assert memory_left(tmp_path) > 1 << 60
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     500 kB\n")
    assert memory_left(tmp_path) == 500 * 1024
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("100000\n")
    assert memory_left(tmp_path) == 500 * 1024
    (cgroup / "memory.max").write_text("300000\n")
    assert memory_left(tmp_path) == 200_000
    (cgroup / "memory.stat").write_text(
        "anon 40000\ninactive_file 30000\nactive_file 20000\nshmem 5\n"
    )
    assert memory_left(tmp_path) == 250_000  # cached files make room
    inner = cgroup / "system.slice/slurmstepd.scope/job_7"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    (inner / "memory.max").write_text("90000\n")
    (inner / "memory.current").write_text("80000\n")
    assert memory_left(tmp_path) == 10_000  # a limit of a group around its own
