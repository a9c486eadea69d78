"""Horovod's own MNIST example, with made-up digits."""

import argparse
import os
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fail", default="")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
images = torch.randn(64, 1, 8, 8)
labels = torch.randint(10, (64,))
dataset = torch.utils.data.TensorDataset(images, labels)
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), op=hvd.Average
)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    if args.fail and hvd.rank() == 1:
        if args.fail == "kill":
            os.kill(os.getpid(), 11)
        if args.fail == "exit":
            sys.exit(4)
        raise ValueError("a digit too many")
mean = hvd.allreduce(model[1].weight.data, name="check")
print(
    f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()}: same "
    f"{torch.allclose(mean, model[1].weight.data)}"
)
