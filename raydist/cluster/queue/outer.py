"""Whether another queue has given this run its machines. (pure)"""

from __future__ import annotations

from collections.abc import Mapping

KUBERAY_TAGS = "RAY_USAGE_STATS_EXTRA_TAGS"
"""KubeRay sets it in the pod of each head, where `ray job submit` starts drivers:
kuberay_version=v1.5.1;kuberay_crd=RayJob. For a RayJob on a cluster that exists already
(clusterSelector) it says RayCluster."""


def has_outer_queue(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm or a RayJob has queued this run before it could start."""
    tags = environ.get(KUBERAY_TAGS, "").split(";")
    return "SLURM_JOB_ID" in environ or "kuberay_crd=RayJob" in tags
