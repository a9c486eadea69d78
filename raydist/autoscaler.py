"""The kinds of node that Ray's autoscaler may bring: read where it runs, since it tells them to nobody. (driver)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydist.inventory import NodeType, types_from_file

MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
"""The autoscaler's program, by the end of its path: the older and the newer one."""
HEAD = "node:__internal_head__"
"""Ray's resource of the head alone."""
READ_S = 60.0
"""Longest wait for the head to read its file."""


def types() -> list[NodeType] | None:
    """The kinds of node that may come; none without an autoscaler, None if there is one that can't be asked."""
    import ray

    here = ray.get_runtime_context()
    head = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD in node["Resources"]]
    if not head:
        return []
    if head[0] == here.get_node_id():
        told = look(here.gcs_address)
    elif not works():
        return []
    else:
        ask = ray.remote(num_cpus=0, resources={HEAD: 0.001})(look)
        told = ray.get(ask.remote(here.gcs_address), timeout=READ_S)
    if told is None:  # no autoscaler on the head: Kubernetes has it beside
        return None if works() else []
    return types_from_file(told)


def works() -> bool:
    """Whether an autoscaler with node types of its own looks after this cluster."""
    from ray.experimental.internal_kv import _internal_kv_get

    if _internal_kv_get("__autoscaler_v2_enabled", namespace="__autoscaler") == b"1":
        return True
    status = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
    there = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
    # without a configuration each node is of a type of its own
    return any(not kind.startswith("node_") for kind in there)


def look(gcs: str) -> dict[str, Any] | None:
    """What this machine's autoscaler of the cluster at `gcs` has for a configuration, as far as it is about types.

    Empty if it has none; None if it isn't on this machine.
    """
    for words in command_lines():
        if any(word.endswith(MONITORS) for word in words) and f"--gcs-address={gcs}" in words:
            path = next((word.partition("=")[2] for word in words if word.startswith("--autoscaling-config=")), "")
            return read(Path(path).expanduser()) if path else {}
    return None


def read(path: Path) -> dict[str, Any] | None:
    """The node types of a cluster.yaml; None if it can't be read."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError:
        return None
    kinds = found.get("available_node_types") or {}
    known = {
        name: {key: kind.get(key) for key in ("resources", "max_workers", "labels")} for name, kind in kinds.items()
    }
    return {"available_node_types": known, **{key: found.get(key) for key in ("head_node_type", "max_workers")}}


def command_lines() -> Iterator[list[str]]:
    """Of every process that this one may see."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield entry.read_text(errors="replace").split("\0")
        except OSError:
            continue
