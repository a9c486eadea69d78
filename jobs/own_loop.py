"""own_loop: a hand-written loop in plain torch: DDP, a separate process group, reports and
checkpoints."""

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import raydist
from raydist import checkpoint, models


def job(config: raydist.Job, hidden: int = 64) -> float:
    me, steps = raydist.rank(), config.train.steps or 100
    model = DistributedDataParallel(models.MLP(hidden=hidden).to(me.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = (torch.tensor(part, device=me.device) for part in load_digits(return_X_y=True))
    images = images.float() / 16

    begin = 0
    if (found := checkpoint.latest()) is not None:
        begin = found.step
        model.module.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])

    # Ranks with an even number compare their losses among themselves; every rank must make every
    # group.
    even: Any = dist.new_group(list(range(0, me.world_size, 2)))

    for step in range(begin, steps):
        order = torch.Generator().manual_seed(config.seed + step)
        batch = torch.randperm(len(labels), generator=order)[me.rank :: me.world_size][
            : config.data.batch_size
        ]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        raydist.report(step=step + 1, steps=steps, loss=loss)
        if config.checkpoint.every and (step + 1) % config.checkpoint.every == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(step + 1, state, {"loss": loss.item()})

    mean = F.cross_entropy(model.module(images), labels).detach()
    if me.rank % 2 == 0:
        dist.all_reduce(mean, group=even)
        mean /= dist.get_world_size(even)
    return float(mean)


if __name__ == "__main__":
    raydist.main(job)
