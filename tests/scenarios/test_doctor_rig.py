"""The doctor on three hosts with a separate network: it finds and names what is broken."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from raydist.tools import doctor_findings
from raydist.tools.doctor_findings import Host
from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(900), requires_root]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Three hosts whose Ray says that each has a GPU: no rank is started, and NCCL's dry run needs
    none."""
    with hosts(3) as rig:
        rig.ray_up(cpus=1, env={"PYTHONPATH": str(ROOT), "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'})
        yield rig


def doctor(
    rig: Rig, *words: str, code: int, timeout_s: int = 1
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Run the doctor on the first host; return its JSON report and the findings by check.

    `timeout_s`: the doctor's own, which it waits for where something is broken.
    """
    first = rig.hosts[0]
    command = [
        "python",
        "-m",
        "raydist.tools.doctor",
        "--json",
        f"--timeout={timeout_s}",
        "scale=cluster",
        *words,
    ]
    home = first.folder / "home"
    done = first.run(command, check=False, cwd=home, env={"PYTHONPATH": str(ROOT)}, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [path.name for path in home.iterdir()] == [".ray"]  # nothing of it stays
    by_check: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return report, by_check


CPU = ("backend=gloo", "scale.gpus=0")


def test_three_healthy_hosts_are_fine_and_their_loopback_names_only_a_warning(rig: Rig) -> None:
    report, by_check = doctor(rig, code=0, timeout_s=30)
    assert report["job"] == "3 ranks on 3 nodes, backend nccl, over eth0"
    assert {
        "lookup",
        "rendezvous",
        "peers",
        "mtu",
        "latency",
        "clock",
        "gloo",
        "nccl",
        "versions",
    } <= set(report["checks"])
    assert report["network"]["calls"] == 6
    assert [finding["level"] for finding in by_check.pop("hostname")] == ["warn"]
    assert not {
        finding["check"]
        for own in by_check.values()
        for finding in own
        if finding["level"] != "note"
    } - {
        "latency"  # a machine that is busy with other things
    }


def test_a_broken_link_wrong_words_and_a_folder_of_one_host_are_found_at_once(rig: Rig) -> None:
    """The words lead gloo and NCCL to the loopback; each host has a separate /run."""
    _, second, third = rig.hosts
    words = (
        "env.GLOO_SOCKET_IFNAME=lo",
        "env.NCCL_SOCKET_IFNAME='^eth0,ib0,docker0'",
        "hydra.run.dir=/run/mine",
    )
    second.run(["ip", "route", "add", "blackhole", third.address()])
    try:
        report, by_check = doctor(rig, *words, code=1)
    finally:
        second.run(["ip", "route", "del", "blackhole", third.address()])
    pair = [f"host1 ({second.address()})", f"host2 ({third.address()})"]
    there, back = sorted(finding["text"] for finding in by_check["peers"])
    assert there.startswith(f"{pair[0]} -> {pair[1]}: ")
    assert back == f"{pair[1]} -> {pair[0]}: no answer within 1 s"
    assert report["checks"]["peers"] == {"host0": "ok", "host1": "FAIL", "host2": "FAIL"}
    (gloo,), (nccl,), (folder,) = by_check["gloo"], by_check["nccl"], by_check["run folder"]
    assert (gloo["text"], gloo["level"]) == ("gloo would use 127.0.0.1, not eth0", "fail")
    assert (nccl["text"], nccl["level"]) == ("nccl would use 127.0.0.1, not eth0", "fail")
    assert gloo["nodes"] == nccl["nodes"] == ["host0", "host1", "host2"]
    assert folder["nodes"] == ["host1", "host2"]
    broken = {"peers", "gloo", "nccl"}
    assert report["verdict"].startswith("this job would break: "), report["verdict"]
    assert broken <= set(report["verdict"].replace(",", " ").split()), report["verdict"]


def test_a_path_that_loses_long_packets_is_told_from_one_that_loses_all(rig: Rig) -> None:
    """The second host's NIC has a carrier, and what it sends goes nowhere, as by a firewall."""
    dropped, short = (host.port("ib0") for host in rig.hosts[1:])
    rig.switch.ip(f"link set {dropped} nomaster")
    rig.switch.ip(f"link set {short} mtu 1400")
    for host in rig.hosts:
        host.run(
            ["ip", "link", "set", "ib0", "gso_max_segs", "1"]
        )  # a veth lets a bundle pass that no wire would
    try:
        report, by_check = doctor(rig, *CPU, "fabric.interface=ib0", code=1)
    finally:
        rig.switch.ip(f"link set {dropped} master ib0")
        rig.switch.ip(f"link set {short} mtu 1500")
    assert {node for finding in by_check["peers"] for node in finding["nodes"]} == {"host1"}
    assert by_check["rendezvous"][0]["nodes"] == ["host1"]
    assert report["checks"]["peers"] == {"host0": "ok", "host1": "FAIL", "host2": "ok"}
    assert report["checks"]["mtu"] == {"host0": "FAIL", "host1": "ok", "host2": "FAIL"}
    assert "ip link set dev ib0 mtu 1400" in by_check["mtu"][0]["fix"]


def test_a_pulled_cable_is_named_as_train_would(rig: Rig) -> None:
    first, _, last = rig.hosts
    rig.cut(last, "ib0")
    try:
        command = [
            "python",
            "-m",
            "raydist.tools.doctor",
            "scale=cluster",
            *CPU,
            "fabric.interface=ib0",
        ]
        done = first.run(
            command, check=False, cwd=first.folder / "home", env={"PYTHONPATH": str(ROOT)}
        )
    finally:
        rig.restore(last, "ib0")
    assert done.returncode == 2
    assert "host2 (10." in done.stderr
    assert "fabric.interface=ib0" in done.stderr


# A name server that takes each question and answers none.
SILENT_NAME_SERVER = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("listening", flush=True)
while True:
    server.recv(1 << 16)
"""

CHECK_HOST = """
import asyncio, json, sys
from raydist.node.checkup import Checkup
from raydist.messages.checkup import CheckHost
request = CheckHost("/", sys.argv[1], json.loads(sys.argv[2]))
print(asyncio.run(Checkup().handle(request)).lookup_s)
"""


def test_a_silent_name_server_is_found_and_the_resolvers_options_shorten_the_look_up() -> None:
    with hosts(1) as rig:
        (host,) = rig.hosts
        (host.root / "etc/nsswitch.conf").write_text("hosts: files dns\n")
        (host.root / "etc/resolv.conf").write_text(
            "nameserver 127.0.0.1\noptions timeout:4 attempts:1\n"
        )
        server = host.popen(["python", "-c", SILENT_NAME_SERVER], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"

        def lookup_s(address: str, env: dict[str, str]) -> float:
            command = ["python", "-c", CHECK_HOST, address, json.dumps(env)]
            return float(host.run(command, env={"PYTHONPATH": str(ROOT)}).stdout)

        unknown = "192.0.2.77"
        slow = lookup_s(unknown, {})
        (finding,) = doctor_findings.check_lookups([Host("host0", unknown, "eth0")], [slow])
        assert (finding.check, finding.level, finding.nodes) == ("lookup", "warn", ("host0",))
        assert lookup_s(unknown, {"RES_OPTIONS": "timeout:1 attempts:1"}) < slow
        assert lookup_s(host.address(), {}) < slow
