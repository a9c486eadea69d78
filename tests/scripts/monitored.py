"""A Ray of one node with its dashboard at this port; says its address, waits for the end of its
input, then ends."""

import os
import sys

from ray.cluster_utils import Cluster

head = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
settings = {"metrics_report_interval_ms": 2000}  # of drivers
os.environ["RAY_metrics_report_interval_ms"] = (
    "2000"  # of Ray's agent, which forgets a gauge after twice as long
)
cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": settings})
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
