"""MNIST as the tutorials of 2019 train it, one process per machine, on scikit-learn's digits."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="gloo")
parser.add_argument("-i", "--init-method", default="env://")
parser.add_argument("-r", "--rank", type=int, required=True)
parser.add_argument("-s", "--world-size", type=int, required=True)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

dist.init_process_group(
    args.backend, init_method=args.init_method, rank=args.rank, world_size=args.world_size
)
torch.manual_seed(args.rank)  # the weights differ until DDP sends those of rank 0
digits = load_digits()
dataset = TensorDataset(
    torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=1)
model = DistributedDataParallel(
    nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    right = torch.zeros(1)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        F.cross_entropy(output, target).backward()
        optimizer.step()
        right += (output.argmax(1) == target).sum()
    dist.all_reduce(right)
weight = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
mean = weight.clone()
dist.all_reduce(mean)
print(
    f"rank {args.rank} of {args.world_size}: same weights "
    f"{torch.allclose(mean / args.world_size, weight)}, accuracy above 0.8 "
    f"{right.item() / len(dataset) > 0.8}"
)
dist.destroy_process_group()
