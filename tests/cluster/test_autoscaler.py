"""Which process of the machine is taken for the autoscaler of a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from raydist.cluster import autoscaler
from tests.waiting import wait_until

GCS = "192.0.2.1:6379"


@pytest.mark.parametrize("own", [True, False])
def test_only_an_autoscaler_of_this_user_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Another user named node types that do not exist, or a FIFO, for which the driver waited."""
    config = tmp_path / "config.yaml"
    config.write_text("available_node_types: {gpu: {max_workers: 8}}\n")
    monitor = [f"/x/{autoscaler.MONITORS[1]}", f"--gcs-address={GCS}"]
    process = subprocess.Popen(
        ["sh", "-c", "read -r _", *monitor, f"--autoscaling-config={config}"], stdin=subprocess.PIPE
    )
    try:
        cmdline = Path(f"/proc/{process.pid}/cmdline")
        wait_until(lambda: GCS in cmdline.read_text())
        if not own:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        found = autoscaler.read_config(GCS)
    finally:
        process.communicate()
    assert (found is not None) is own
    assert not found or found["available_node_types"]["gpu"]["max_workers"] == 8
