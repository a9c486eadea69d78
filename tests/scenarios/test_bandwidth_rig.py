"""On three real hosts: which network carried a run, and which host is slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root

pytestmark = [pytest.mark.root, pytest.mark.ray, requires_root]
CODE = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as made:
        made.ray_up(cpus=1, env=CODE)
        yield made


def measured(rig: Rig, *words: str) -> dict[str, Any]:
    """What the tool says on the first host, and what its NICs sent meanwhile."""
    command = ["python", "-m", "raydist.tools.bandwidth", "--json", "--ops", "all_reduce", "--iters", "4", "scale=3x1"]
    before = {nic: [host.bytes(nic)[1] for host in rig.hosts] for nic in ("eth0", "ib0")}
    home = rig.hosts[0].folder / "home"
    done = rig.hosts[0].run([*command, *words], env=CODE, cwd=home)
    told: dict[str, Any] = json.loads(done.stdout)
    told["screen"] = done.stderr
    told["sent"] = {
        nic: [host.bytes(nic)[1] - was for host, was in zip(rig.hosts, before[nic], strict=True)] for nic in before
    }
    return told


@pytest.mark.parametrize(("words", "used", "idle"), [((), "eth0", "ib0"), (("fabric.interface=ib0",), "ib0", "eth0")])
def test_the_summary_names_the_network_and_its_bytes_are_those_of_the_hosts(
    rig: Rig, words: tuple[str, ...], used: str, idle: str
) -> None:
    told = measured(rig, "--min", "8M", "--max", "8M", *words)
    assert told["network"].startswith(f"gloo over {used} on 3 nodes, ")
    assert told["network"].endswith("sent; no node has InfiniBand")
    assert f"network  {told['network']}" in told["screen"]
    events = (rig.hosts[0].folder / "home").glob("runs/bandwidth/*/events.jsonl")
    lines = [json.loads(line) for line in max(events).read_text().splitlines()]
    (network,) = [line for line in lines if line["kind"] == "network"]
    for position, node in enumerate(network["nodes"]):
        counted = node["sent"][used]
        # 7 all-reduces of 8 MiB: each host sends 4/3 of it each time
        assert counted > 0.9 * 7 * 4 / 3 * 2**23
        assert counted <= told["sent"][used][position]
        assert counted > 0.8 * told["sent"][used][position]
        assert node["sent"].get(idle, 0) < 0.3 * counted
        assert node["rate"] == 0.0  # a veth pair claims 10 Gb/s, which nobody should believe


def test_a_host_on_a_slow_line_is_named(rig: Rig) -> None:
    rig.slow(rig.hosts[2], "50mbit", "eth0")
    try:
        told = measured(rig, "--min", "1M", "--max", "1M", "--pairs")
    finally:
        for space, device in ((rig.switch, rig.hosts[2].port("eth0")), (rig.hosts[2].space, "eth0")):
            space.spawn(["tc", "qdisc", "del", "dev", device, "root"]).wait()
    assert told["slow_nodes"] == ["host2"]
    assert told["slow_pairs"] == []
    assert len(told["pairs"]) == 3
