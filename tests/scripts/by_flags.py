"""The older style: who a rank is, and where all meet, stands on the command line."""

import argparse
import json
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
parser.add_argument("--world-size", type=int, required=True)
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--init-method", required=True)
parser.add_argument("--backend", required=True)
parser.add_argument("--hparams", type=json.loads, default={})
parser.add_argument("--fail-rank", type=int, default=-1)
parser.add_argument("--fail", default="assert")
args = parser.parse_args()

dist.init_process_group(
    args.backend, init_method=args.init_method, rank=args.rank, world_size=args.world_size
)
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
total = torch.tensor([float(args.rank)])
dist.all_reduce(total)
if args.rank == args.fail_rank and args.fail == "kill":
    os.abort()
if args.rank == args.fail_rank and args.fail == "exit":
    os._exit(9)
assert args.rank != args.fail_rank, f"rank {args.rank} was told to fail"
print(
    type(store).__name__,
    args.init_method.partition(":")[0],
    args.backend,
    args.local_rank,
    total.item(),
    args.hparams,
)
dist.destroy_process_group()
