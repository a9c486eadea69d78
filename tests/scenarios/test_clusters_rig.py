"""cluster.yaml as it is shipped: `ray up` over ssh from a person's own machine, a run on two
hosts, `ray down`."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import yaml

from tests.conftest import ROOT
from tests.rig import Host, Rig, hosts, requires_root
from tests.rig.namespaces import CAPTURED, finish
from tests.rig.ssh import key_pair, mount_packages, prepare_logins, requires_ssh, start_sshd
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.timeout(1800),
    requires_root,
    requires_ssh,
]
# `ray down` stops the head; the others end after a minute without a message from it, here for
# five seconds.
QUICK_END = "export RAY_gcs_rpc_server_reconnect_timeout_s=5"

EXPECTED = {
    "RAY_AUTH_MODE": "token",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_TMPDIR": "/tmp/ray-0",
    "RAY_JOB_STOP_WAIT_TIME_S": "300",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "6000",  # what the machine has set
    "RAY_health_check_failure_threshold": "4",
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two hosts with nothing but Python, torch and sshd, and a third that is the person's: it has
    the key."""
    with hosts(3, nics=("eth0",)) as rig:
        for host in rig.hosts:
            (host.folder / "home/.ray/auth_token").unlink()
            prepare_logins(host, QUICK_END, "export RAY_health_check_timeout_ms=6000")
            mount_packages(host)
        *nodes, own = rig.hosts
        _, public = key_pair(own.folder / "home/.ssh", "id_ed25519")
        for node in nodes:
            start_sshd(node, public)
        check_out(own, rig)
        yield rig


def check_out(own: Host, rig: Rig) -> None:
    """What `git clone` brings, as far as cluster.yaml sends it, with the three lines and Ray's
    version changed."""
    folder = own.folder / "home/raydist"
    shipped = yaml.safe_load((ROOT / "cluster.yaml").read_text())["file_mounts"].values()
    for name in (name for name in shipped if not name.startswith("~")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    lines = (ROOT / "cluster.yaml").read_text()
    head, *workers = (host.address() for host in rig.hosts[:-1])
    for before, after in (
        (r"head_ip: 10\.0\.0\.1\b", f"head_ip: {head}"),
        (r"worker_ips: \[.*\]", f"worker_ips: [{', '.join(workers)}]"),
        (r"ssh_user: ubuntu\b", "ssh_user: root"),
        # nothing can be fetched: the versions that are there
        (r"- RAY=\S+", f"- RAY={ray.__version__}"),
    ):
        lines, count = re.subn(rf"^([^#\n]*){before}", rf"\g<1>{after}", lines, flags=re.MULTILINE)
        assert count == 1, before
    (folder / "cluster.yaml").write_text(lines)


def commands() -> list[str]:
    """Return the lines of the README's part on clusters."""
    (part,) = re.findall(
        r"^## A cluster of your own$(.*?)^## ",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return [line.strip() for line in part.splitlines() if line.startswith("    ")]


def start(own: Host, *lines: str, **options: Any) -> subprocess.Popen[str]:
    """Lines typed at the person's own machine, one after the other: with nothing set but a home."""
    unset = [
        f"--unset={name}"
        for name in own.environment
        if name not in ("HOME", "PATH", "TERM", "LANG")
    ]
    there = own.folder / "home/raydist"
    return own.popen(
        ["env", *unset, "bash", "-e", "-c", "\n".join(lines)], cwd=there, **{**CAPTURED, **options}
    )


def type_lines(own: Host, *lines: str) -> str:
    """Type lines at the person's machine and wait for their end; return the output. An error fails
    the test."""
    return finish(start(own, *lines, stderr=subprocess.STDOUT), timeout=600).stdout


def test_the_readmes_commands_lead_from_bare_hosts_to_a_run_and_back(rig: Rig) -> None:
    *nodes, own = rig.hosts
    token, up, status, dashboard, export, submit, down = commands()
    type_lines(own, token, up)
    # to ask costs seconds of the CPU that sets up the others
    wait_until(
        lambda: all(any("raylet" in line for line in of_ray(node)) for node in nodes),
        "two raylets",
        400,
    )
    wait_until(lambda: "2 local.cluster.node" in type_lines(own, status), "two nodes", 400)
    tunnel = start(
        own, dashboard.removesuffix(" &"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    reached = "until (exec 3<>/dev/tcp/127.0.0.1/8265) 2>/dev/null; do sleep 0.2; done"
    screen = type_lines(own, reached, export, submit)
    patience(own, nodes[0], export)
    tunnel.kill()
    assert re.search(r"^  network +gloo over eth0 on 2 nodes", screen, re.MULTILINE), screen
    assert "succeeded" in screen

    assert (nodes[0].folder / "home/saved").exists()
    (result,) = (nodes[0].folder / "home/raydist/runs").glob("*/*/result.json")
    assert json.loads(result.read_text())["world_size"] == sum(
        1 for _ in result.parent.glob("logs/rank-*.log")
    )
    for node in (
        nodes
    ):  # who has no key of the cluster's gets nothing, and others of the machine can't read it
        key = node.folder / "home/.ray/auth_token"
        assert key.read_text() == (own.folder / "home/.ray/auth_token").read_text()
        assert key.stat().st_mode & 0o77 == 0
    versions = [
        (node.folder / "home/.raydist/src/deploy/node/versions.txt").read_text() for node in nodes
    ]
    assert versions == versions[:1] * 2, "all nodes install what the head has"
    assert f"\nray=={ray.__version__}\n" in versions[0]
    started = environment_of(nodes[0], "gcs_server")
    assert {name: started.get(name) for name in EXPECTED} == EXPECTED
    for node in nodes:  # Ray's own folders in it are open to every account
        assert stat.S_IMODE((node.root / "tmp/ray-0").stat().st_mode) == 0o700

    type_lines(own, down)
    wait_until(lambda: [of_ray(node) for node in nodes] == [[], []], "two hosts without Ray", 300)


LATE = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: [time.sleep(6), pathlib.Path.home().joinpath("saved").touch(), exit()])
pathlib.Path.home().joinpath("begun").touch()
while True: time.sleep(1)
"""


def patience(own: Host, head: Host, export: str) -> None:
    """`ray job stop` gives a job longer than Ray's own three seconds to save."""
    (own.folder / "home/late").mkdir()
    (own.folder / "home/late/late.py").write_text(LATE)
    sent = "ray job submit --submission-id late --no-wait --working-dir ~/late -- python late.py"
    type_lines(own, export, sent)
    wait_until((head.folder / "home/begun").exists, "the job", 300)
    assert "was stopped" in type_lines(own, export, "ray job stop late", "ray job status late")


def environment_of(host: Host, program: str) -> dict[str, str]:
    """Return the environment of the first process of this name."""
    pid = next(pid for pid, line in host.processes().items() if program in line.split()[0])
    entries = (host.root / "proc" / str(pid) / "environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def of_ray(host: Host) -> list[str]:
    return [
        line
        for line in host.processes().values()
        if "sshd" not in line and re.search(r"\bray(let|::|/)|gcs_server", line)
    ]
