"""On three real hosts, each of whose names leads to 127.0.1.1: which network carried a run, and
which host is slow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(900), requires_root]
CODE = {"PYTHONPATH": str(ROOT)}
NICS = ("eth0", "ib0", "docker0")
JOB = """
    import torch
    from torch.utils.data import TensorDataset
    import raydist

    def job(config):
        torch.manual_seed(0)
        net = torch.nn.Linear(1024, 2048)  # 8 MiB of gradients
        data = TensorDataset(torch.randn(96, 1024), torch.zeros(96, 2048))
        raydist.fit(config, model=net, train=data, loss=torch.nn.functional.mse_loss)
"""
WORDS = (
    "job=train.py", "scale=3x1", "train.steps=30", "train.epochs=100", "data.batch_size=1", "checkpoint.every=1000",
    "watch.progress=lines",
)  # fmt: skip


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    import textwrap

    with hosts(3) as rig:
        for host in rig.hosts:
            (host.folder / "home" / "train.py").write_text(textwrap.dedent(JOB))
        rig.ray_up(cpus=1, env=CODE)
        yield rig


def trained(rig: Rig, *words: str, **env: str) -> tuple[dict[str, int], str, dict[str, Any]]:
    """Train on all hosts; return the bytes that each kind of NIC sent meanwhile, the output and the
    result."""
    home = rig.hosts[0].folder / "home"
    shutil.rmtree(home / "runs", ignore_errors=True)
    before = {nic: sum(host.bytes(nic)[1] for host in rig.hosts) for nic in NICS}
    done = rig.hosts[0].run(
        ["python", "-m", "raydist.train", *WORDS, *words], env={**CODE, **env}, cwd=home
    )
    sent = {nic: sum(host.bytes(nic)[1] for host in rig.hosts) - before[nic] for nic in NICS}
    (result,) = home.glob("runs/train/*/result.json")
    return sent, done.stdout, json.loads(Path(result).read_text())


@pytest.mark.parametrize(
    ("backend", "words", "used"),
    [("gloo", (), "eth0"), ("horovod", ("fabric.interface=ib0",), "ib0")],
    ids=["gloo-eth0", "horovod-ib0"],
)
def test_the_bytes_are_on_the_network_that_was_asked_for(
    rig: Rig, backend: str, words: tuple[str, ...], used: str
) -> None:
    if backend == "horovod":
        pytest.importorskip("horovod.torch", reason="Horovod is not built: raydist horovod build")
    sent, screen, result = trained(rig, f"backend={backend}", *words)
    assert result["status"] == "finished", screen
    # 30 steps of 8 MiB over three hosts: a ring sends 4/3 of it from each
    assert sent[used] > 30 * 3 * 2**23
    assert sent[used] >= 0.95 * sum(sent.values())
    assert sent["docker0"] < 10_000
    assert f"over {used} on 3 nodes" in result["network"]


def test_what_a_site_has_set_wins_and_is_told(rig: Rig) -> None:
    """Its nccl.conf, on one host: the plan's variables there are the site's, and the reason says
    so."""
    conf = rig.hosts[1].root / "etc" / "nccl.conf"
    conf.write_text("NCCL_SOCKET_IFNAME==ib0\n")
    command = ["python", "-c", ASK]
    try:
        ours, theirs = (json.loads(host.run(command, env=CODE).stdout) for host in rig.hosts[:2])
    finally:
        conf.unlink()
    assert ours["value"] == "=eth0"
    assert theirs["value"] == "=ib0"
    assert "/etc/nccl.conf on host1" in theirs["reason"]
    assert "raydist's own choice: env.NCCL_SOCKET_IFNAME==eth0" in theirs["reason"]


ASK = """
import json, socket
from raydist.network import variables as fabric; from raydist.cluster import placement
from raydist.settings.config import Job
from raydist.cluster.nodes import Node
from raydist.node import probe
facts = probe.read_facts(ip=probe.interfaces()["eth0"][0])
node = Node("a", facts.ip, facts.hostname, {"CPU": 2.0}, {"CPU": 2.0})
plan = placement.assign_ranks(placement.resources_for(Job(), [node]), [node] * 1)
own = fabric.plan_variables(Job(), plan, [facts] * plan.world_size, fabric.Rendezvous("10.0.0.1", 1))[0]
(var,) = [var for var in own if var.name == "NCCL_SOCKET_IFNAME"]
print(json.dumps({"value": var.value, "reason": var.reason}))
"""


# raydist.tools.bandwidth


def measured(rig: Rig, *words: str) -> dict[str, Any]:
    """Run the tool on the first host; return its report and the bytes that the NICs sent
    meanwhile."""
    command = [
        "python",
        "-m",
        "raydist.tools.bandwidth",
        "--json",
        "--ops",
        "all_reduce",
        "--iters",
        "4",
        "scale=3x1",
    ]
    before = {nic: [host.bytes(nic)[1] for host in rig.hosts] for nic in ("eth0", "ib0")}
    home = rig.hosts[0].folder / "home"
    done = rig.hosts[0].run([*command, *words], env=CODE, cwd=home)
    result: dict[str, Any] = json.loads(done.stdout)
    result["screen"] = done.stderr
    result["sent"] = {
        nic: [host.bytes(nic)[1] - was for host, was in zip(rig.hosts, before[nic], strict=True)]
        for nic in before
    }
    return result


def test_the_summary_names_the_network_and_its_bytes_are_those_of_the_hosts(rig: Rig) -> None:
    used, idle = "ib0", "eth0"
    result = measured(rig, "--min", "8M", "--max", "8M", f"fabric.interface={used}")
    assert result["network"].startswith(f"gloo over {used} on 3 nodes, ")
    assert result["network"].endswith("sent; no node has InfiniBand")
    assert f"network  {result['network']}" in result["screen"]
    events = (rig.hosts[0].folder / "home").glob("runs/bandwidth/*/events.jsonl")
    lines = [json.loads(line) for line in max(events).read_text().splitlines()]
    (network,) = [line for line in lines if line["kind"] == "network"]
    for position, node in enumerate(network["nodes"]):
        counted = node["sent"][used]
        # 7 all-reduces of 8 MiB: each host sends 4/3 of it each time
        assert counted > 0.9 * 7 * 4 / 3 * 2**23
        assert counted <= result["sent"][used][position]
        assert counted > 0.8 * result["sent"][used][position]
        assert node["sent"].get(idle, 0) < 0.3 * counted
        assert node["rate"] == 0.0  # a veth pair claims 10 Gb/s, which nobody should believe


def test_a_host_on_a_slow_line_is_named(rig: Rig) -> None:
    rig.slow(rig.hosts[2], "50mbit", "eth0")
    try:
        for _ in range(3):  # a stall spoils the milliseconds that the other two need
            result = measured(rig, "--min", "1M", "--max", "1M", "--pairs")
            if result["slow_nodes"]:
                break
    finally:
        for space, device in (
            (rig.switch, rig.hosts[2].port("eth0")),
            (rig.hosts[2].space, "eth0"),
        ):
            space.spawn(["tc", "qdisc", "del", "dev", device, "root"]).wait()
    assert result["slow_nodes"] == ["host2"]
    assert result["slow_pairs"] == []
    assert len(result["pairs"]) == 3
