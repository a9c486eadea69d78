"""Limits, host name, mounts, plug-ins: the facts of a machine apart from its devices."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from raydist.network.facts import Machine
from raydist.node.probe import cpus, machine
from tests import machines
from tests.machines import Box, build


def test_limits_of_this_process() -> None:
    limits = machine.read_limits()
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert limits.memlock == (-1 if soft == resource.RLIM_INFINITY else soft)
    assert limits.nofile == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.shm == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize


def test_limits_of_a_container(tmp_path: Path) -> None:
    text = (
        "Max open files            1024  4096  files\nMax locked memory         65536  65536  bytes"
    )
    root = build(
        tmp_path,
        Box(files={"proc/self/limits": text, "proc/self/status": "CapEff:\t0000000000004000"}),
    )
    limits = machine.read_limits(root)
    assert (limits.memlock, limits.nofile, limits.ipc_lock) == (65536, 1024, True)
    assert not machine.read_limits(build(tmp_path / "plain", Box())).ipc_lock
    assert machine.read_limits(tmp_path / "plain").memlock == -1


def test_nothing_there_is_nothing_known(tmp_path: Path) -> None:
    limits = machine.read_limits(tmp_path)
    assert (limits.memlock, limits.nofile, limits.ipc_lock, limits.shm) == (None, None, False, None)
    assert machine.machine("a", {}, tmp_path) == Machine()


def test_kernel_driver_cloud_and_container(tmp_path: Path) -> None:
    files = {"proc/driver/nvidia/version": machines.OPEN_DRIVER, "sys/class/dmi/id/sys_vendor": "Amazon EC2",
             ".dockerenv": "", "sys/class/iommu/dmar0/x": ""}  # fmt: skip
    result = machine.machine("a", {}, build(tmp_path, Box(files=files)))
    assert (result.kernel, result.driver, result.cloud) == (
        "6.8.0-45-generic",
        "580.95.05",
        "Amazon EC2",
    )
    assert result.container
    assert result.iommu
    assert result.boot_id == "8f1c0a32-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ("127.0.0.1 localhost\n127.0.1.1 node-1.site node-1", ["127.0.1.1"]),
        ("10.0.0.5\tnode-1 # mine\n::1 node-1", ["10.0.0.5", "::1"]),
        ("#127.0.1.1 node-1\n\n127.0.0.1 node-10", []),
    ],
)
def test_the_hosts_own_name(hosts: str, addresses: list[str]) -> None:
    assert list(machine.own_name(hosts, "node-1")) == addresses


def test_file_servers_of_lustre_and_nfs() -> None:
    mounts = (
        "/dev/sda1 / ext4 rw 0 0\n10.1.0.5@o2ib:10.1.0.6@o2ib:/scratch /scratch lustre rw,flock "
        "0 0\n"
        "nas:/home /home nfs4 rw,proto=rdma,clientaddr=10.0.0.9,addr=10.3.0.7 0 0\n"
        "10.4.0.5@tcp:/slow /slow lustre rw 0 0\n"
    )
    assert list(machine.slow_mounts(mounts)) == ["10.1.0.5", "10.1.0.6", "10.3.0.7"]


def test_plug_ins_of_a_vendors_image_and_on_the_loaders_path(tmp_path: Path) -> None:
    root = build(tmp_path, machines.efa_box())
    machines.write(root / "opt/site/libnccl-net-own.so", "")
    plugins = machine.machine("a", {"LD_LIBRARY_PATH": "/opt/site"}, root).plugins
    assert plugins == ("/opt/site/libnccl-net-own.so", "/opt/amazon/ofi-nccl/lib/libnccl-net.so")
    assert machine.machine("a", {}, build(tmp_path / "p", machines.plain_box())).plugins == ()
    gib = "usr/local/gib/lib64/libnccl-net_internal.so"
    assert machine.machine("a", {}, build(tmp_path / "g", Box(files={gib: ""}))).plugins == (
        f"/{gib}",
    )


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "350000 100000"}, 3),  # a container: its limit is at the root of the mount
        ({"cpu.max": "50000 100000"}, 1),
        (
            {
                "system.slice/cpu.max": "600000 100000",
                "system.slice/job.service/cpu.max": "max 100000",
            },
            6,
        ),
        (
            {
                "system.slice/cpu.max": "600000 100000",
                "system.slice/job.service/cpu.max": "200000 100000",
            },
            2,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            {
                "cpu/batch/job/cpu.cfs_quota_us": "400000",
                "cpu/batch/job/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_the_quota_of_each_cgroup_on_the_way_to_the_root_counts(
    tmp_path: Path, files: dict[str, str], count: int
) -> None:
    for name, text in {
        "cpu/batch/job/tasks": "",
        "system.slice/job.service/cgroup.procs": "",
        **files,
    }.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    own = "4:cpu,cpuacct:/batch/job\n0::/system.slice/job.service\n"
    (tmp_path / "proc/self/cgroup").write_text(own)
    assert cpus.count_cpus(set(range(8)), tmp_path) == count
