"""A rank that writes down how it was bound, what it inherited, and at which steps it collected
garbage."""

import gc
import json
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
at, full = 0, []
gc.callbacks.append(
    lambda phase, info: full.append(at) if phase == "stop" and info["generation"] == 2 else None
)
for at in range(1, 21):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    for _ in range(
        2000 * dist.get_rank()
    ):  # garbage that only a collection frees, more of it on some ranks
        ring = []
        ring.append(ring)
facts = {
    "cpus": sorted(os.sched_getaffinity(0)),
    "inductor": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    "enabled": gc.isenabled(),
    "full": full,
}
with open(f"facts-{dist.get_rank()}.json", "w") as out:
    json.dump(facts, out)
dist.destroy_process_group()
