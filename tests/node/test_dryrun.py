"""The addresses that the real gloo and the real NCCL choose; NCCL needs no GPU for that."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from typing import Any

import psutil
import pytest

from raydist.node import dryrun
from tests.conftest import ROOT

needs_nccl = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or not os.path.exists(dryrun.nccl_library()),
    reason="this torch came without NCCL",
)


def outward() -> tuple[str, str]:
    """Return an interface that is no loopback, and its IPv4 address."""
    for name, own in psutil.net_if_addrs().items():
        for one in own:
            up = psutil.net_if_stats()[name].isup
            if one.family == socket.AF_INET and up and not one.address.startswith("127."):
                return name, one.address
    pytest.skip("this machine has no interface but the loopback")


def tried(*names: str, **env: str) -> dict[str, dict[str, Any]]:
    """Return the output of the program with these variables and none of this machine's."""
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "GLOO"))
    }
    command = [sys.executable, "-m", "raydist.node.dryrun", *names]
    path = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env={**own, **path, **env}, capture_output=True, text=True, check=True
    )
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


def test_gloo_listens_on_the_interface_of_its_variable() -> None:
    name, address = outward()
    assert tried("gloo", GLOO_SOCKET_IFNAME=name) == {"gloo": {"addresses": [address]}}


def test_gloo_on_the_loopback_is_seen() -> None:
    assert tried("gloo", GLOO_SOCKET_IFNAME="lo") == {"gloo": {"addresses": ["127.0.0.1"]}}


def test_lines_that_gloo_prints_are_skipped() -> None:
    output = (
        "[Gloo] Rank 0 is connected to 0 peer ranks. Expected number of connected peer ranks "
        "is : 0"
    )  # torch 2.8
    assert dryrun.read_output(f'{output}\n{{"addresses": ["10.0.0.5"]}}\n', "", 0) == {
        "addresses": ["10.0.0.5"]
    }


def test_the_error_of_gloo() -> None:
    result = tried("gloo", GLOO_SOCKET_IFNAME="nosuch0")["gloo"]
    assert "Unable to find address for: nosuch0" in result["error"]
    assert "enforce fail" not in result["error"]


@needs_nccl
def test_nccl_takes_the_interface_that_is_planned() -> None:
    name, address = outward()
    result = tried("nccl", NCCL_SOCKET_IFNAME=f"={name}")["nccl"]
    assert result == {"interface": name, "addresses": [address]}


@needs_nccl
def test_nccl_uses_the_loopback_when_others_are_excluded() -> None:
    # The trap of many recipes: a list that begins with ^ also ends the built-in exclusion of lo.
    name, _ = outward()
    result = tried("nccl", NCCL_SOCKET_IFNAME=f"^{name},docker0")["nccl"]
    assert result == {"interface": "lo", "addresses": ["127.0.0.1"]}


@needs_nccl
def test_the_error_of_nccl_wherever_its_log_goes() -> None:
    result = tried(
        "nccl", NCCL_SOCKET_IFNAME="=nosuch0", NCCL_DEBUG_FILE="/nowhere/log", NCCL_DEBUG="VERSION"
    )["nccl"]
    assert "no socket interface found" in result["error"]


def test_a_missing_library_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert dryrun.nccl_library() == "libnccl.so.2"
    assert (
        "libnccl"
        in dryrun.read_output("", "OSError: libnccl.so.2: cannot open shared object file", 1)[
            "error"
        ]
    )


LOGS = {
    "2.18": "h:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>",
    "2.30": "h:1:1 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>",
    "timestamped": "[2026-11-21 05:00:00] h:1:1 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>",
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_the_bootstrap_line_of_each_nccl_version(log: str) -> None:
    result = dryrun.read_output('{"addresses": [], "status": 0}', f"NCCL version 2\n{log}\nmore", 0)
    assert result == {"interface": "eth0", "addresses": ["10.0.0.5"]}


def test_ipv6_is_read_without_brackets_and_scope() -> None:
    log = "h:1:1 [0] NCCL INFO Bootstrap: Using eth0:[fe80::1%eth0]<0>"
    assert dryrun.read_output('{"addresses": [], "status": 0}', log, 0)["addresses"] == ["fe80::1"]
    log = "h:1:1 [0] NCCL INFO Bootstrap: Using eth0:fd00::2<0>"
    assert dryrun.read_output('{"addresses": [], "status": 0}', log, 0)["addresses"] == ["fd00::2"]


def test_the_address_in_a_unique_id() -> None:
    magic = bytes(8)
    four = socket.AF_INET.to_bytes(2, sys.byteorder) + bytes(2) + bytes([10, 0, 0, 5])
    six = (
        socket.AF_INET6.to_bytes(2, sys.byteorder)
        + bytes(6)
        + socket.inet_pton(socket.AF_INET6, "fd00::2")
    )
    assert dryrun.address_in((magic + four).ljust(128, b"\0")) == "10.0.0.5"
    assert dryrun.address_in((magic + six).ljust(128, b"\0")) == "fd00::2"
    assert dryrun.address_in(bytes(128)) is None


def test_the_error_is_the_librarys_own_message() -> None:
    assert dryrun.read_output("", "", -11) == {"error": "it ended with code -11"}
    log = (
        "h:1:1 [0] misc/socket.cc:99 NCCL WARN Bootstrap : no socket interface found\nh NCCL "
        "INFO bye"
    )
    assert dryrun.read_output('{"addresses": [], "status": 5}', log, 0) == {
        "error": "Bootstrap : no socket interface found"
    }
