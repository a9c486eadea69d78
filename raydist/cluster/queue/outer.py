"""Whether another queue has given this run its machines. (pure)"""

from __future__ import annotations

from collections.abc import Mapping

KUBERAY_TAGS = "RAY_USAGE_STATS_EXTRA_TAGS"
"""KubeRay sets it in the pod of each head, where `ray job submit` starts drivers:
kuberay_version=v1.5.1;kuberay_crd=RayJob. For a RayJob on a cluster that exists already
(clusterSelector) it says RayCluster."""


def outer_queue(environ: Mapping[str, str]) -> str:
    """Return what has queued this run before it could start: Slurm, RayJob; empty for nothing."""
    if "SLURM_JOB_ID" in environ:
        return "Slurm"
    return "RayJob" if "kuberay_crd=RayJob" in environ.get(KUBERAY_TAGS, "").split(";") else ""
