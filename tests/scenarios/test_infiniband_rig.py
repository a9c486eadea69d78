"""On a host with HCAs that only claim to be there (tests/fake_infiniband): what raydist says of them is
what `ibv_devinfo` prints."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.fake_infiniband import build, plug_in, requires_fake_infiniband
from tests.machines import EDR, OPEN_DRIVER, OTHER_IB_GID, Box, Card, Link, roce, switch
from tests.rig import Host, hosts, requires_root

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    requires_root,
    requires_fake_infiniband,
]
CODE = {"PYTHONPATH": str(ROOT)}
SDR = "10 Gb/sec (4X SDR)"
BESIDE = [f"{switch(i)}/00{i}2:00:00.0/00{i}3:00:00.0" for i in range(3)]
"""Places below the same PCIe switch as a GPU."""
FAR = [f"pci00a{i}:00/00a{i}:00:01.0/00a{i}:01:00.0" for i in range(3)]
COMPUTE = (Card("mlx5_0", BESIDE[0]), Card("mlx5_1", BESIDE[1]))
PULLED = Link(SDR, state="1: DOWN", phys="2: Polling", sm_lid=0)
STORAGE = Card(
    "mlx5_2", FAR[0], (Link(EDR, gids={0: (OTHER_IB_GID, "IB/RoCE v1", "")}), PULLED), numa=1
)
ROCE = Card("mlx5_3", FAR[1], (roce("10.1.0.5", "eth0", rate="100 Gb/sec (4X EDR)"),))
UNMANAGED = Card("mlx5_4", BESIDE[2], (Link("56 Gb/sec (4X FDR)", state="2: INIT", sm_lid=0),))
FAR_TWIN = Card("mlx5_5", FAR[2], (Link(), Link("2.5 Gb/sec (1X SDR)")))
"""Its link is that of the HCAs beside GPUs."""
GPUS = tuple((f"{switch(i)}/00{i}2:00:01.0/00{i}4:00:00.0", 0) for i in range(2))
BOX = Box(
    (*COMPUTE, STORAGE, ROCE, UNMANAGED, FAR_TWIN),
    GPUS,
    files={"proc/driver/nvidia/version": OPEN_DRIVER},
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def host(driver: Path) -> Iterator[Host]:
    with hosts(1) as rig:
        plug_in(rig.hosts[0], BOX, driver)
        yield rig.hosts[0]


Devices = dict[str, dict[str, Any]]


def devinfo(host: Host) -> Devices:
    """Return what ibv_devinfo prints: devices in order of name, with their ports by number."""
    screen = host.run(["ibv_devinfo", "-v"], check=False).stdout
    devices: Devices = {}
    for text in re.split(r"^hca_id:\s*", screen, flags=re.MULTILINE)[1:]:
        head, *ports = re.split(r"^\t\tport:\s*", text, flags=re.MULTILINE)
        device = dict(re.findall(r"^\t(\w+):\s+(.+)$", head, re.MULTILINE))
        device["ports"] = {}
        for port in ports:
            own = dict(re.findall(r"^\t{3}(\w+):\s+(.+)$", port, re.MULTILINE))
            own["gids"] = re.findall(r"GID\[\s*(\d+)\]:\s+([\da-f:.]+)(?:, (.+))?$", port, re.M)
            device["ports"][int(port.split()[0])] = own
        devices[head.split()[0]] = device
    return dict(sorted(devices.items()))


def active(devices: Devices) -> dict[str, dict[str, Any]]:
    """Return the first active port of each device that has one, by the device's name."""
    ports = {
        name: [port for port in device["ports"].values() if port["state"].startswith("PORT_ACTIVE")]
        for name, device in devices.items()
    }
    return {name: own[0] for name, own in ports.items() if own}


def plan(host: Host, *words: str, **env: str) -> dict[str, str]:
    """Type `raydist plan` on the host; return the variables of rank 0."""
    command = ["python", "-m", "raydist.tools.plan", "--json", "group=inline", "scale=1x2", *words]
    done = host.run(command, cwd=host.folder / "home", env={**CODE, **env})
    return {var["name"]: var["value"] for var in json.loads(done.stdout)["variables"][0]}


def doctor(host: Host, *words: str, code: int = 0) -> dict[str, list[str]]:
    """Type `raydist doctor` on the host; return its findings by check, each with its level."""
    command = ["python", "-m", "raydist.tools.doctor", "--json", "scale=1x2", "group=inline"]
    home = host.folder / "home"
    done = host.run([*command, *words], check=False, cwd=home, env=CODE, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    by_check: dict[str, list[str]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        text = f"{finding['level']}: {finding['text']}"
        by_check.setdefault(finding["check"], []).append(text)
    return by_check


READ = """
import dataclasses, json
from raydist.node.probe import hca
print(json.dumps([dataclasses.asdict(each) for each in hca.read_hcas()]))
"""


def test_the_facts_are_those_that_ibv_devinfo_prints(host: Host) -> None:
    """Devices, ports, link layers, states, rates, GIDs: from /sys here, from the driver there."""
    theirs = devinfo(host)
    ours = {
        each["name"]: each for each in json.loads(host.run(["python", "-c", READ], env=CODE).stdout)
    }
    assert list(ours) == list(theirs) == [card.name for card in BOX.cards]
    for name, device in theirs.items():
        own = ours[name]
        assert (own["firmware"], own["board"]) == (device["fw_ver"], device["board_id"])
        assert own["card"] == device["sys_image_guid"]
        assert len(own["ports"]) == len(device["ports"]) == int(device["phys_port_cnt"])
        for port in own["ports"]:
            other = device["ports"][port["number"]]
            assert other["state"].startswith(f"PORT_{port['state']} (")
            assert (
                other["phys_state"].replace("_", "").startswith(f"{port['phys_state'].upper()} (")
            )
            assert (port["link_layer"], port["sm_lid"]) == (
                other["link_layer"],
                int(other["sm_lid"]),
            )
            lanes = int(other["active_width"].partition("X")[0])
            assert port["gbps"] == lanes * float(other["active_speed"].split()[0])
            ethernet = other["link_layer"] == "Ethernet"  # elsewhere no version of RoCE is printed
            assert [
                (str(gid["index"]), gid["kind"] if ethernet else "") for gid in port["gids"]
            ] == [
                (index, kind.replace("RoCE v1", "IB/RoCE v1")) for index, _, kind in other["gids"]
            ]
            assert [ipaddress.ip_address(gid["gid"]) for gid in port["gids"]] == [
                ipaddress.ip_address(address) for _, address, _ in other["gids"]
            ]


def test_the_plan_of_mpi_names_the_ports_that_ibv_devinfo_calls_active(host: Host) -> None:
    (host.folder / "home/solve.py").write_text("")
    words = ("backend=mpi", "script=solve.py", "scale.gpus=1", "fabric.interface=eth0")
    assert plan(host, *words)["UCX_NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    ports = devinfo(host)["mlx5_2"]["ports"]
    (number,) = (each for each, port in ports.items() if port["state"].startswith("PORT_ACTIVE"))
    assert plan(host, *words, "fabric.hca=[mlx5_2]")["UCX_NET_DEVICES"] == f"mlx5_2:{number}"


def test_an_old_nccl_gets_the_index_of_the_routable_gid(host: Host) -> None:
    (gid,) = (
        index
        for port in active(devinfo(host)).values()
        for index, address, kind in port["gids"]
        if (kind, address.startswith("::ffff:")) == ("RoCE v2", True)
    )
    package = host.folder / "home/old/nvidia_nccl_cu13-2.20.5.dist-info"
    package.mkdir(parents=True)
    text = "Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.20.5\n"
    (package / "METADATA").write_text(text)
    own = plan(host, "backend=nccl", "fabric=roce", PYTHONPATH=f"{package.parent}:{ROOT}")
    assert (own["NCCL_IB_HCA"], own["NCCL_IB_GID_INDEX"]) == ("=mlx5_3", gid)


def test_the_doctor_names_the_ports_that_are_not_active_and_the_hcas_left_out(host: Host) -> None:
    found = doctor(host, "backend=nccl")
    devices = devinfo(host)
    idle = {
        f"{name}/{number}": port["state"].split()[0].removeprefix("PORT_")
        for name, device in devices.items()
        for number, port in device["ports"].items()
        if not port["state"].startswith("PORT_ACTIVE")
    }
    assert idle == {"mlx5_2/2": "DOWN", "mlx5_4/1": "INIT"}
    assert sorted(found["hca state"]) == [
        f"note: mlx5_2/2 is {idle['mlx5_2/2']}, Polling",
        f"warn: mlx5_4/1 is {idle['mlx5_4/1']}, not ACTIVE",
    ]
    left_out = [name for name in active(devices) if name not in ("mlx5_0", "mlx5_1")]
    assert left_out == ["mlx5_2", "mlx5_3", "mlx5_5"]
    reasons = "; ".join(f"{name} shares no PCIe switch with a GPU" for name in left_out)
    assert found["storage hcas"] == [f"note: active HCAs left out: {reasons}"]
    assert not {"rdma libraries", "rdma devices", "memlock", "roce gid", "gpudirect"} & set(found)


def test_without_a_gpu_near_an_hca_it_says_that_it_guesses(driver: Path) -> None:
    """The speed of a link is all that tells gradients from storage: fabric.hca= decides."""
    far = [replace(card, pci=f"pci00b{i}:00/00b{i}:01:00.0") for i, card in enumerate(COMPUTE)]
    with hosts(1) as rig:
        (host,) = rig.hosts
        plug_in(host, replace(BOX, cards=(*far, STORAGE)), driver)
        assert list(active(devinfo(host))) == ["mlx5_0", "mlx5_1", "mlx5_2"]
        (text,) = doctor(host, "backend=nccl")["storage hcas"]
        assert text.startswith("warn: PCIe does not show which HCAs are for storage")
        assert "mlx5_2 is InfiniBand at 100 Gbit/s in subnet fec0:0000:0000:0002" in text


def test_hcas_that_libibverbs_cannot_use_are_failures(driver: Path, tmp_path: Path) -> None:
    """Their device files are missing, as in containers; the driver's package was removed, and its
    file in /etc/libibverbs.d was not. In both cases ibv_devinfo finds no device."""
    with hosts(1) as rig:
        (host,) = rig.hosts
        plug_in(host, replace(BOX, cards=COMPUTE), driver)
        host.run(["mount", "--bind", str(tmp_path), "/dev/infiniband"])
        assert devinfo(host) == {}
        host.run(["umount", "/dev/infiniband"])
        assert list(devinfo(host)) == ["mlx5_0", "mlx5_1"]
        host.run(["mount", "--bind", str(tmp_path), str(driver.parent)])
        assert devinfo(host) == {}
        host.run(["mount", "--bind", str(tmp_path), "/dev/infiniband"])
        found = doctor(host, "backend=nccl", code=1)
        files = "/dev/infiniband/uverbs0, /dev/infiniband/uverbs1"
        assert found["rdma devices"] == [f"fail: can't open {files}"]
        assert found["rdma libraries"] == ["fail: libibverbs has no driver mlx5"]
