"""The image of deploy/docker, built and run: the commands of docs/docker.md, as they stand there.

`make image` runs these tests: a quarter of an hour the first time. The engine is podman, hosts are
those of the rig, and ubuntu:24.04 is made by debootstrap, so no registry of images is needed. Left
out of the commands is what this machine can't have: GPUs, InfiniBand, Horovod with CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.records import read_events
from tests.rig import Host, Rig, hosts, requires_root
from tests.rig.containers import LACKING, engine, install_docker
from tests.rig.namespaces import CAPTURED, finish
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("RAYDIST_IMAGE"), reason="`make image` builds the image"),
    pytest.mark.skipif(bool(LACKING), reason=f"apt-get install {' '.join(LACKING)}"),
    requires_root,
]

STORE = Path("/var/tmp/raydist-image")
"""The engine that builds the image. It stays for the next time: only what has changed is built."""
PAGE = (ROOT / "docs/docker.md").read_text()
MNIST = ROOT / "tests/scripts/mnist.py"
BOTH = [f"rank {rank} of 2: same weights True, accuracy above 0.8 True" for rank in (0, 1)]
SOURCE = (ROOT / "deploy/docker/Dockerfile").read_text()
KEYS = (
    "https://archive.ubuntu.com/ubuntu/pool/main/u/ubuntu-keyring/"
    "ubuntu-keyring_2023.11.28.1_all.deb"
)
"""The keys of Ubuntu's archive, which Debian does not have."""
KEYS_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"
BASE = """
dpkg -x keys.deb keys
debootstrap --variant=minbase --components=main,universe \\
    --keyring=keys/usr/share/keyrings/ubuntu-archive-keyring.gpg \\
    noble base http://archive.ubuntu.com/ubuntu gutsy
tar -C base -c . | podman import - ubuntu:24.04
"""
"""Make the image ubuntu:24.04. `gutsy` is the script for all releases of Ubuntu since 7.10."""


def typed(start: str, page: str = PAGE) -> str:
    """Return the one command of a page that begins so, without its comment."""
    text = re.sub(r"^#", "", page, flags=re.MULTILINE)
    text = re.sub(r"\\\n *", "", text)
    (line,) = set(re.findall(rf"^ +({re.escape(start)}.*?)(?:  +#.*)?$", text, re.MULTILINE))
    return str(line)


def on_this_machine(script: str, folder: Path) -> str:
    """Run a script with the engine that builds the image, and return its output."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **engine(STORE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
    return done.stdout


def make_base(folder: Path) -> None:
    with urllib.request.urlopen(KEYS, timeout=60) as reply:
        package = reply.read()
    assert hashlib.sha256(package).hexdigest() == KEYS_SHA256
    (folder / "keys.deb").write_bytes(package)
    on_this_machine(BASE, folder)


def write_pip_settings(folder: Path) -> None:
    """Write how pip of this machine reaches its index, for pip in the build."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # lines of the environment, `:env:.NAME`, are first, and win
    found = dict(reversed(re.findall(r"^\S+\.([a-z-]+)=(.*)$", listed, re.MULTILINE)))
    lines = ["[global]"]
    for name in ("proxy", "trusted-host", "timeout", "default-timeout", "cert"):
        if name in found:
            value = literal_eval(found[name])
            if name == "cert":
                shutil.copy(value, folder / "cert.pem")
                value = "/etc/xdg/pip/cert.pem"
            lines.append(f"{name} = {value}")
    (folder / "pip.conf").write_text("\n".join([*lines, ""]))


@pytest.fixture(scope="module")
def image() -> None:
    """Build `raydist:cpu` as the Dockerfile's first lines say, and name it `raydist` too."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)  # for the image's user
        if "ubuntu" not in on_this_machine("podman images", folder):
            make_base(folder)
        write_pip_settings(folder)
        line = typed("docker build -f deploy/docker/Dockerfile --build-arg BASE=ubuntu", SOURCE)
        # PyPI has the same torch, with CUDA
        line, changed = re.subn(r"--build-arg TORCH_INDEX=\S+", "", line)
        assert changed
        # podman's own container would need a network of its own
        how = f"--isolation chroot --network host --pull=never --volume {folder}:/etc/xdg/pip:ro"
        on_this_machine(line.replace("docker build", f"docker build {how}"), ROOT)
        on_this_machine("docker tag raydist:cpu raydist; podman image prune --force", folder)


@pytest.fixture(scope="module")
def rig(image: None) -> Iterator[Rig]:
    with hosts(2, nics=("eth0",)) as rig:
        for host in rig.hosts:
            install_docker(host, STORE)
        yield rig


@pytest.fixture(autouse=True)
def containers_end(rig: Rig) -> Iterator[None]:
    yield
    for host in rig.hosts:
        host.run(["podman", "rm", "--all", "--force", "--time", "0"])
        host.run(["podman", "volume", "prune", "--force"])


@pytest.fixture
def folder(rig: Rig, tmp_path: Path) -> Path:
    """What both machines see: deploy/docker with its .env, and a folder for the runs."""
    shutil.copytree(ROOT / "deploy/docker", tmp_path / "deploy/docker")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o1777)
    env = (ROOT / "deploy/docker/example.env").read_text()
    for name, value in {
        "HEAD_ADDRESS": rig.hosts[0].address(),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RUNS": str(tmp_path / "runs"),
    }.items():
        env = re.sub(rf"^{name}=.*$", f"{name}={value}", env, flags=re.MULTILINE)
    (tmp_path / "deploy/docker/.env").write_text(env)
    compose = tmp_path / "deploy/docker/compose.yaml"
    lines = re.sub(r"    devices: .*\n(?:    deploy:.*\n(?:      .*\n)+)?", "", compose.read_text())
    # limits above this machine's, which nobody here may raise
    compose.write_text(re.sub(r"  ulimits:\n(?:    .*\n)+", "", lines))
    return tmp_path


def shell(host: Host, line: str, folder: Path, timeout: float = 300) -> str:
    """Type a line on a host, and return what it prints."""
    line = line.replace("/mnt/shared/runs", str(folder / "runs")).replace(
        "192.0.2.10", "$HEAD_ADDRESS"
    )
    line = f"set -a; . deploy/docker/.env; set +a; unset RAY_AUTH_TOKEN; {line} 2>&1"
    return host.run(["bash", "-c", line], cwd=folder, timeout=timeout).stdout


def logs(host: Host, container: str) -> str:
    return host.run(["bash", "-c", f"podman logs {container} 2>&1"], check=False).stdout


def assert_trained(folder: Path, screen: str, nodes: list[str]) -> None:
    """The run ended well, and had ranks on these nodes."""
    (path,) = folder.glob("runs/*/*/result.json")
    assert json.loads(path.read_text())["status"] == "finished", screen
    plans = [event["slots"] for event in read_events(path.parent / "events.jsonl", "plan")]
    assert sorted({slot["host"] for slot in plans[-1]}) == nodes


def test_the_default_job_on_this_machine(rig: Rig, folder: Path) -> None:
    line = typed("docker run --rm").replace("--gpus all ", "")
    screen = shell(rig.hosts[0], line, folder)
    assert "finished in" in screen
    kept = "docker run --rm --volume raydist-runs:/runs raydist sh -c 'ls /runs/*/*/result.json'"
    assert "result.json" in shell(rig.hosts[0], kept, folder)


def test_the_image_can_compile_a_model(rig: Rig, folder: Path) -> None:
    """It has no CUDA toolkit, but what torch.compile needs."""
    line = typed("docker run --rm").replace("--gpus all ", "")
    screen = shell(rig.hosts[0], f"{line} python -m raydist.train train.compile=true", folder)
    assert "finished in" in screen


def test_docker_stop_ends_a_run_in_order(rig: Rig, folder: Path) -> None:
    host = rig.hosts[0]
    line = typed("docker run --detach --name long").replace("--gpus all ", "")
    line = line.replace("raydist-runs:", f"{folder / 'runs'}:")
    shell(host, f"{line} checkpoint.every=1000000 train.epochs=100000", folder)

    def step() -> int:
        for path in folder.glob("runs/*/*/events.jsonl"):
            return max((int(event["step"]) for event in read_events(path, "report")), default=0)
        return 0

    wait_until(lambda: step() > 20, lambda: logs(host, "long"), timeout=300)
    assert not list(folder.glob("runs/*/*/checkpoints/*"))
    shell(host, typed("docker stop"), folder)
    state = shell(host, "docker inspect --format '{{.State.ExitCode}}' long", folder)
    assert state.strip() == "143", logs(host, "long")
    (path,) = folder.glob("runs/*/*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["signal"]) == ("stopped", 15)
    (saved,) = folder.glob("runs/*/*/checkpoints/*")
    assert int(saved.name.removeprefix("step-")) >= 20


def test_compose_on_two_machines(rig: Rig, folder: Path) -> None:
    compose = "docker compose -f deploy/docker/compose.yaml"
    (folder / "runs").chmod(0o755)
    shell(rig.hosts[0], typed("sudo chown").removeprefix("sudo "), folder)
    for host, name in zip(rig.hosts, ("head", "worker"), strict=True):
        screen = shell(host, typed(f"{compose} up --detach {name}"), folder)
        assert "exit code: 0\n" in screen, screen  # podman-compose itself ends with 0
        wait_for_ray(host, f"docker_{name}_1")
    screen = shell(rig.hosts[0], typed(f"{compose} exec head"), folder)
    assert_trained(folder, screen, ["head", "worker"])


@pytest.mark.parametrize(("user", "methods"), [("0", ["env"]), ("12345", ["tcp", "file"])])
def test_two_machines_with_fewer_rights(
    rig: Rig, folder: Path, user: str, methods: list[str]
) -> None:
    """And the program of test_two_containers_by_hand, by one command."""
    shell(rig.hosts[0], typed("chown 12345").replace("12345", user), folder)
    for host, name in zip(rig.hosts, ("head", "worker"), strict=True):
        line = typed(f"docker run --detach --name {name}")
        assert "--user 12345" in line
        shell(host, line.replace("--user 12345", f"--user {user}"), folder)
        wait_for_ray(host, name)
    screen = shell(rig.hosts[0], typed("docker exec head python -m raydist.train"), folder)
    assert_trained(folder, screen, ["host0", "host1"])
    shutil.copy(MNIST, folder / "runs")
    for method in methods:
        line = typed("docker exec --workdir /runs head").replace("=tcp", f"={method}")
        screen = shell(rig.hosts[0], line, folder)
        assert sorted(re.findall(r"^\[\d\] (.*?)\r?$", screen, re.MULTILINE)) == BOTH, screen


@pytest.mark.parametrize(
    "method", ["env://", "tcp://192.0.2.10:23456", "file:///work/group"], ids=["env", "tcp", "file"]
)
def test_two_containers_by_hand(rig: Rig, folder: Path, method: str) -> None:
    """The tutorials of 2019: the same command in a container of each machine, but for the rank."""
    work = folder / "runs"
    shutil.copy(MNIST, work)
    address = rig.hosts[0].address()
    (folder / "group.env").write_text(
        f"MASTER_ADDR={address}\nMASTER_PORT=29500\nGLOO_SOCKET_IFNAME=eth0\n"
    )
    line = (
        f"docker run --rm --network host --env-file group.env --volume {work}:/work --workdir /work "
        f"raydist python mnist.py --init-method {method.replace('192.0.2.10', address)} "
        "--world-size 2 --rank {}"
    )
    running = [
        host.popen(["bash", "-c", line.format(rank)], cwd=folder, **CAPTURED)
        for rank, host in enumerate(rig.hosts)
    ]
    assert [finish(each, timeout=300).stdout.strip() for each in running] == BOTH


def wait_for_ray(host: Host, container: str) -> None:
    wait_until(
        lambda: "Ray runtime started" in logs(host, container),
        lambda: logs(host, container),
        timeout=300,
    )
