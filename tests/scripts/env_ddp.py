"""DDP as PyTorch's own examples do it under torchrun: everything from the environment."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail", default="")
args = parser.parse_args()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(rank)
    model = DDP(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        loss = model(torch.randn(20, 10)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.fail and rank == 1:
            end(args.fail)
    weights = [torch.empty(1, 10) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.weight.data)
    same = all(torch.equal(weights[0], each) for each in weights)
    print(f"rank {rank} local {local_rank} of {dist.get_world_size()}: same weights {same}")


def end(how):
    if how == "raise":
        raise ValueError("the loss went away")
    if how == "kill":
        os.kill(os.getpid(), 9)
    raise SystemExit(int(how))


if __name__ == "__main__":
    main()
    # now that the model is gone: with it there torch 2.8 to 2.10 may hang, over gloo
    dist.destroy_process_group()
