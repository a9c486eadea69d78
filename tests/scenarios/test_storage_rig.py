"""A folder that only one host has: real hosts with separate homes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig import Host, Rig, hosts, requires_root

pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.timeout(900), requires_root]
ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": str(ROOT)}
WORDS = ("job=digits", "train.epochs=1", "scale=2x1", "watch.progress=none")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(2) as rig:
        rig.ray_up(cpus=1, env=ENV)
        yield rig


def train(rig: Rig, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    first: Host = rig.hosts[0]
    env = {**ENV, "RAY_ADDRESS": f"{first.address()}:6379"}
    return first.run(
        ["python", "-m", "raydist.train", *WORDS, *words],
        env=env,
        cwd=folder,
        check=False,
        timeout=400,
    )


def test_a_folder_of_one_host_is_no_storage_and_nothing_to_go_on_from(
    rig: Rig, tmp_path: Path
) -> None:
    shared, name = tmp_path / "shared", rig.hosts[1].name
    done = train(rig, tmp_path, f"storage={shared}")
    assert done.returncode == 0, done.stdout + done.stderr
    (saved,) = shared.glob("digits/*/checkpoints/step-*")

    private = "/dev/shm"  # each host has its own
    refused = train(rig, tmp_path, f"storage={private}/runs")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert (
        f"{name} cannot see it (there is no {private}/runs/digits/"
        in refused.stdout + refused.stderr
    )

    rig.hosts[0].run(["cp", "-r", str(saved), private])
    refused = train(rig, tmp_path, f"resume={private}/{saved.name}")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert (
        f"resume={private}/{saved.name}: {name} cannot see it, and each rank reads it"
        in refused.stdout + refused.stderr
    )
