"""The facts of a machine: real interfaces where they are this machine's, fixture folders where they
are another's."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from raydist.node import probe
from raydist.shared.errors import ConfigError, LaunchError

HOME = pwd.getpwuid(os.getuid()).pw_dir


def test_the_loopback_interface_owns_its_address() -> None:
    facts = probe.read_facts("127.0.0.1")
    assert facts.interface in ("lo", "lo0")
    assert facts.address == "127.0.0.1"
    assert facts.ip == "127.0.0.1"
    assert "127.0.0.1" in facts.interfaces[facts.interface]


def test_each_address_of_this_machine_is_found_on_its_interface() -> None:
    for name, own in probe.interfaces().items():
        for address in own:
            if not address.startswith("fe80"):  # the same link-local address may be on several
                facts = probe.read_facts(address)
                assert address in facts.interfaces[facts.interface]
                assert facts.address == address
                assert name in facts.interfaces


def test_the_kernel_knows_the_same_interfaces() -> None:
    assert set(probe.interfaces()) <= {name for _, name in socket.if_nameindex()}


def test_a_name_for_an_address_becomes_numeric() -> None:
    assert probe.read_facts("localhost").address in ("127.0.0.1", "::1")


def test_an_address_of_nobody_here_is_refused_with_those_that_are() -> None:
    with pytest.raises(LaunchError, match=r"203\.0\.113\.77.*lo \(127\.0\.0\.1.*--node-ip-address"):
        probe.read_facts("203.0.113.77")


KNOWN = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.5", "fe80::1"),
    "ib0": ("fe80::2", "10.82.0.5"),
    "v6": ("fd00::1",),
}


@pytest.mark.parametrize(
    ("ip", "setting", "interface", "address"),
    [
        ("10.0.0.5", None, "eth0", "10.0.0.5"),
        ("10.82.0.5", None, "ib0", "10.82.0.5"),
        ("fd00::1", None, "v6", "fd00::1"),
        ("FD00:0::1", None, "v6", "fd00::1"),
        # asked for: an address of the family of the node's own, and never a link-local one where
        # there is another
        ("10.0.0.5", "ib0", "ib0", "10.82.0.5"),
        ("fd00::1", "ib0", "ib0", "10.82.0.5"),
        ("10.0.0.5", "eth0", "eth0", "10.0.0.5"),
        ("10.0.0.5", "v6", "v6", "fd00::1"),
        ("127.0.0.1", "lo", "lo", "127.0.0.1"),
        ("::1", "lo", "lo", "::1"),
        ("172.17.0.1", "eth0", "eth0", "10.0.0.5"),
    ],
)
def test_the_interface_is_the_owner_of_the_address_or_the_one_asked_for(
    ip: str, setting: str | None, interface: str, address: str
) -> None:
    assert probe.choose_interface(KNOWN, ip, setting) == (interface, address)


def test_an_interface_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"fabric\.interface=eht0.*did you mean fabric\.interface=eth0\?.*ib0, lo"
    ):
        probe.choose_interface(KNOWN, "10.0.0.5", "eht0")


def test_an_interface_without_an_address_that_can_be_bound_is_refused() -> None:
    """IPoIB that is up without an IPv4 address: the store could not listen on fe80::2."""
    known = {"eth0": ("10.0.0.5", "fe80::1"), "ib0": ("fe80::2",), "v6": ("fd00::1",)}
    with pytest.raises(ConfigError) as refused:
        probe.choose_interface(known, "10.0.0.5", "ib0")
    assert refused.value.key == "fabric.interface"
    assert refused.value.suggestion == "fabric.interface=eth0"
    assert "(known: eth0, v6)" in str(refused.value)
    near = {"direct": ("169.254.7.1",)}
    assert probe.choose_interface(near, "10.0.0.5", "direct") == ("direct", "169.254.7.1")


def test_an_address_with_a_label_belongs_to_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ip addr add … label eth0:1`: no interface seemed to have the address that Ray uses."""
    plain, labelled, v6 = (
        SimpleNamespace(family=family, address=address)
        for family, address in (
            (socket.AF_INET, "10.0.0.5"),
            (socket.AF_INET, "10.0.0.50"),
            (socket.AF_INET6, "fe80::1%eth0"),
        )
    )
    there = {"eth0": [v6, plain], "eth0:1": [labelled], "eth1": [plain]}
    states = {"eth0": SimpleNamespace(isup=True), "eth1": SimpleNamespace(isup=False)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: there)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    assert probe.interfaces() == {"eth0": ("10.0.0.5", "10.0.0.50", "fe80::1")}
    assert probe.read_facts("10.0.0.50").interface == "eth0"


def test_what_is_set_already_is_noted_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if probe.SITE.fullmatch(name)]:
        monkeypatch.delenv(name)
    meant = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth9", "UCX_TLS": "tcp", "OMPI_MCA_pml": "ob1",
             "HOROVOD_CYCLE_TIME": "5", "TORCH_NCCL_BLOCKING_WAIT": "0", "OMP_NUM_THREADS": "3",
             "CUDA_VISIBLE_DEVICES": "1,0"}  # fmt: skip
    for name, value in {
        **meant,
        "AWS_SECRET": "x",
        "XNCCL_DEBUG": "x",
        "OMP_NUM_THREADS_X": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert probe.read_facts("127.0.0.1").environment == meant


def test_versions_and_python_are_those_of_this_process() -> None:
    import torch

    import raydist

    facts = probe.read_facts("127.0.0.1", gpus=["1"])
    assert facts.versions["torch"] == torch.__version__.partition("+")[0]
    assert facts.versions["raydist"] == raydist.__version__
    assert facts.python == "{}.{}.{}".format(*sys.version_info[:3])
    assert facts.gpus == ("1",)
    assert 1 <= facts.cpus <= (os.cpu_count() or 1)
    assert facts.hostname == socket.gethostname()


def write(root: Path, file: str, text: str) -> None:
    path = root / file.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_users_nccl_conf_is_over_the_machines(tmp_path: Path) -> None:
    write(tmp_path, "/etc/nccl.conf", "NCCL_DEBUG=WARN\nNCCL_IB_HCA==mlx5_0,mlx5_1\n")
    write(
        tmp_path,
        f"{HOME}/.nccl.conf",
        "# mine\nNCCL_DEBUG=INFO\nno setting\n#NCCL_NET=IB\n NCCL_ALGO=Ring\n",
    )
    assert probe.nccl_conf({}, tmp_path) == {
        "NCCL_DEBUG": ("INFO", f"{HOME}/.nccl.conf"),
        " NCCL_ALGO": ("Ring", f"{HOME}/.nccl.conf"),  # NCCL strips nothing: this sets nothing
        "NCCL_IB_HCA": ("=mlx5_0,mlx5_1", "/etc/nccl.conf"),
    }


def test_nccl_conf_file_is_in_place_of_the_users(tmp_path: Path) -> None:
    write(tmp_path, "/etc/nccl.conf", "NCCL_DEBUG=WARN\n")
    write(tmp_path, f"{HOME}/.nccl.conf", "NCCL_ALGO=Ring\n")
    write(tmp_path, "/opt/site.conf", "NCCL_PROTO=LL\n")
    environ = {"NCCL_CONF_FILE": "/opt/site.conf", "HOME": "/elsewhere"}
    assert probe.nccl_conf(environ, tmp_path) == {
        "NCCL_PROTO": ("LL", "/opt/site.conf"),
        "NCCL_DEBUG": ("WARN", "/etc/nccl.conf"),
    }


def test_a_machine_without_nccl_files_has_no_settings(tmp_path: Path) -> None:
    assert probe.nccl_conf({}, tmp_path) == {}
    assert probe.read_facts("127.0.0.1", root=tmp_path).nccl_conf == {}


def test_a_uid_without_a_password_entry_has_no_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "/etc/nccl.conf", "NCCL_DEBUG=WARN\n")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    with pytest.raises(KeyError):
        pwd.getpwuid(os.getuid())
    assert probe.nccl_conf({}, tmp_path) == {"NCCL_DEBUG": ("WARN", "/etc/nccl.conf")}
    write(tmp_path, "/opt/site.conf", "NCCL_PROTO=LL\n")
    assert probe.nccl_conf({"NCCL_CONF_FILE": "/opt/site.conf"}, tmp_path)["NCCL_PROTO"] == (
        "LL",
        "/opt/site.conf",
    )


@pytest.mark.parametrize(
    ("visible", "there", "count"),
    [
        (None, 0, 0),
        (None, 3, 3),
        ("", 3, 0),
        ("-1", 3, 0),
        ("0,2", 3, 2),
        ("GPU-8932f937", 3, 1),
        ("NoDevFiles", 3, 0),
    ],
)
def test_gpus_are_counted_without_cuda(
    visible: str | None, there: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for i in range(there):
        write(tmp_path, f"/proc/driver/nvidia/gpus/0000:0{i}:00.0/information", "Model: H200")
    assert probe.gpus_of_driver(tmp_path) == count


def test_looking_imports_neither_torch_nor_ray() -> None:
    look = "import sys; from raydist.node import probe; probe.read_facts('127.0.0.1')"
    code = f"{look}; assert not {{'torch', 'ray'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
