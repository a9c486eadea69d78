"""A Ray cluster whose autoscaler starts and ends nodes by itself, all on the machine that runs this file. (driver)

    python -m tests.autoscaling HEAD TYPE

HEAD: the CPUs of the first node, TYPE: those of each further one, of which there are up to two. `ray.cluster_utils` ends
every Ray process that it can see: run it in a PID namespace. It ends when its input does.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ray.cluster_utils import AutoscalingCluster

FAKE = {
    "cluster_name": "fake",
    "max_workers": 2,
    "provider": {
        "type": "fake_multinode",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.05,
    "auth": {},
    "docker": {},
    **{f"{when}_commands": [] for when in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{kind}_start_ray_commands": [] for kind in ("head", "worker")},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
}
"""Ray's own example of such a cluster, which is not in its wheel."""


class Cluster(AutoscalingCluster):
    """Ray's cluster for tests, with the example that it lacks."""

    def _generate_config(
        self, head_resources: dict[str, Any], worker_node_types: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {**FAKE, "available_node_types": {**worker_node_types, "ray.head.default": head}}


def main() -> None:
    head, each = (int(word) for word in sys.argv[1:])
    kind = {"resources": {"CPU": each}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    cluster = Cluster({"CPU": head, "object_store_memory": 2**28}, {"plus": kind}, autoscaler_v2=os.environ.get("AS_V2") == "2")
    cluster.start(override_env={"RAY_TMPDIR": os.environ["TMPDIR"]})
    print("READY", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
