"""Node types of Ray's autoscaler, read from its config file: Ray has no API for them. (driver)

The file is on the head node.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydist.cluster.nodes import NodeType, types_from_file
from raydist.cluster.ray_private import internal_kv

MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
"""The end of the path of the autoscaler's program: versions 1 and 2."""
HEAD = "node:__internal_head__"
"""Ray's resource that only the head node has."""
READ_S = 60.0
"""Longest wait for the head to read its file."""


def autoscaler_types() -> list[NodeType] | None:
    """Return the node types that the autoscaler may add.

    Empty without an autoscaler, None if they can't be read.
    """
    import ray

    context = ray.get_runtime_context()
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    if not head:
        return []
    if head[0] == context.get_node_id():
        config = read_config(context.gcs_address)
    elif not is_active():
        return []
    else:
        config = read_config_there(head[0], context.gcs_address)
    # The head node may run no autoscaler: on Kubernetes it has its own container.
    if config is None:
        return None if is_active() else []
    return types_from_file(config)


def read_config_there(node: str, gcs: str) -> Any:
    """Run `read_config` on this node.

    The node is chosen by its id, not by one of its resources: a task without its own strategy
    belongs to the placement group of the calling actor, such as that of a Ray Tune trial, which
    lacks such a resource.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )(read_config)
    return ray.get(task.remote(gcs), timeout=READ_S)


def is_active() -> bool:
    """Report whether an autoscaler with its own node types serves this cluster."""
    if internal_kv("__autoscaler_v2_enabled", namespace="__autoscaler") == b"1":
        return True
    status = json.loads(internal_kv("__autoscaling_status") or "{}")
    active = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
    # Without a configuration Ray gives each node its own type, node_ADDRESS.
    return any(not kind.startswith("node_") for kind in active)


def read_config(gcs: str) -> dict[str, Any] | None:
    """Return the node types in the config file of this machine's autoscaler.

    `gcs`: the address of its cluster.

    Empty if the autoscaler has no config file; None if it does not run on this machine as this
    user.
    """
    for arguments in command_lines():
        if (
            any(argument.endswith(MONITORS) for argument in arguments)
            and f"--gcs-address={gcs}" in arguments
        ):
            option = "--autoscaling-config="
            path = next(
                (each.removeprefix(option) for each in arguments if each.startswith(option)), ""
            )
            return read_cluster_yaml(Path(path).expanduser()) if path else {}
    return None


def read_cluster_yaml(path: Path) -> dict[str, Any] | None:
    """Return the keys of a cluster.yaml that describe node types; None if it can't be read."""
    import yaml

    try:
        config = yaml.safe_load(path.read_text())
    except OSError:
        return None
    types = {
        name: {key: kind.get(key) for key in ("resources", "max_workers", "labels")}
        for name, kind in (config.get("available_node_types") or {}).items()
    }
    return {
        "available_node_types": types,
        **{key: config.get(key) for key in ("head_node_type", "max_workers")},
    }


def command_lines() -> Iterator[list[str]]:
    """Yield the command line of every process of this user.

    Any user can start a process with the command line of an autoscaler, also one of root.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                yield (process / "cmdline").read_text(errors="replace").split("\0")
