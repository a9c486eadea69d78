"""A Ray with its dashboard, a run on it that is struck, and what else a run may say; waits for a line, then ends."""

import os
import sys

import ray
from ray.cluster_utils import Cluster

import raydist
from raydist.shared.events import event
from raydist.watch.metrics import Metrics
from raydist.watch.result import Figures
from tests.faults import kill, training

head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
settings = {"metrics_report_interval_ms": 1000}
cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": settings})
os.environ["RAY_ADDRESS"] = cluster.address
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
print("up", flush=True)
done = raydist.run(training, "scale=1x2", "train.epochs=3", "data.batch_size=8", "snapshot.every=1", "name=struck",
                   "watch.progress=none", struck=(kill(1, 20),), pause=0.1)  # fmt: skip
slow = {"rank": 1, "host": "n1", "own_s": 0.2, "others_s": 0.1, "step_s": 0.2, "share": 0.5}
more = Metrics("told/1", Figures())
for happened in (
    event("cluster", address=cluster.address),
    event("slow", ranks=[slow], text=""),
    event("hang", s=7.0),
    event("nodes", nodes={"n1": {"ports": {"mlx5_0/1": [1000, 2000]}}}),
    event("nodes", nodes={"n1": {"ports": {"mlx5_0/1": [4000, 9000]}}}),
):
    more(happened)
print("ran", done.dir.name, flush=True)
sys.stdin.readline()
ray.shutdown()
cluster.shutdown()
