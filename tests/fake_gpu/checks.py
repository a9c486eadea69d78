"""What a program sees of two fake GPUs: `python -m tests.fake_gpu.checks NAME…` prints, as JSON, what
failed in each function."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from raydist.state.device import CudaDevice
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import blank_page

alive: list[SnapshotBuffer] = []
"""Their first pages stay page-locked: others must not get the same addresses."""


def hold(on: bool, name: str = "hold-copies") -> None:
    path = Path(os.environ["FAKE_GPU"], name)
    path.touch() if on else path.unlink()


def devices() -> None:
    """Importing torch has not used CUDA; devices, properties, memory, copies between all places."""
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    found = [torch.cuda.get_device_properties(number) for number in range(2)]
    assert [str(each.uuid)[-1] for each in found] == ["0", "1"]
    assert torch.cuda.mem_get_info(1)[1] == 81559 << 20
    values = torch.arange(10.0).reshape(2, 5)
    there = values.cuda(1)
    assert (there.device, there.data_ptr() == values.data_ptr()) == (torch.device("cuda", 1), False)
    assert there.t().cuda(0).cpu().tolist() == values.t().tolist()
    assert torch.cuda.memory_allocated(1) == 512
    try:
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda:0")
    except torch.cuda.OutOfMemoryError:
        return
    raise AssertionError("there were 100 GiB")


def queues() -> None:
    """Copies to page-locked memory end later than the call, copies to other memory do not; events
    and other streams wait for them."""
    pinned, there = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    hold(True)
    pinned.copy_(there, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    other: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    event.record()
    other.wait_event(event)
    assert not event.query()
    assert not other.query()
    assert pinned.tolist() == [0] * 4
    hold(False)
    other.synchronize()
    assert event.query()
    assert pinned.tolist() == [1] * 4
    assert there.cpu().tolist() == [1] * 4


def snapshots() -> None:
    """A snapshot is complete when the GPU's copies are, not before; memory can be page-locked and
    released."""
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    weight = torch.ones(1 << 16, device="cuda:1")
    memory = SnapshotBuffer(descriptor, CudaDevice(torch.device("cuda", 1)))
    seen = SnapshotBuffer(descriptor)
    for step in (1, 2, 3, 4):  # each slot is page-locked once it has been written
        memory.write(step, {"model": weight.fill_(step)})
    torch.cuda.synchronize(1)
    hold(True)
    memory.write(5, {"model": weight.fill_(5)})
    assert max(seen.steps) == 4
    hold(False)
    torch.cuda.synchronize(1)
    assert max(seen.steps) == 5
    assert seen.read(seen.steps[5])["model"].unique().tolist() == [5]
    memory.drop()
    alive.append(memory)
    os.close(descriptor)


def snapshots_alongside() -> None:
    """A snapshot is copied alongside the next step until that changes the state; it is complete
    when the copies of all GPUs are; memory that is freed meanwhile is not reused before."""
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    here = torch.device("cuda", 1)
    weight, far = torch.ones(1 << 16, device=here), torch.ones(1 << 16, device="cuda:0")
    memory = SnapshotBuffer(descriptor, CudaDevice(here))
    seen, stream = SnapshotBuffer(descriptor), torch.cuda.current_stream(here)
    for step in (1, 2, 3):  # page-locks the slots
        memory.write(step, {"model": weight.fill_(step), "far": far.fill_(step)})
    torch.cuda.synchronize(here)
    hold(True)
    passing = torch.full((1 << 16,), 4.0, device=here)
    memory.write(
        4, {"model": weight.fill_(4), "far": far.fill_(4), "passing": passing}, alongside=True
    )
    address = passing.data_ptr()
    del passing
    assert torch.full((1 << 16,), 9.0, device=here).data_ptr() != address
    weight + 1  # in the forward pass: a kernel of the fake GPU waits for its stream
    assert stream.query()
    memory.catch_up()
    assert not stream.query(), "what changes the state waits"
    threading.Timer(0.3, hold, [False]).start()
    weight.fill_(5)
    far.fill_(5)
    torch.cuda.synchronize(here)
    kept = seen.read(seen.steps[4])
    assert [kept[name].unique().tolist() for name in ("model", "far", "passing")] == [[4]] * 3
    assert {*weight.tolist(), *far.tolist()} == {5}
    hold(True, "slow-copies")
    memory.write(5, {"model": weight[:1], "far": far}, alongside=True)  # only `far` is slow
    while 5 not in seen.steps:
        time.sleep(0.001)
    assert seen.read(seen.steps[5])["far"].unique().tolist() == [5]
    hold(False, "slow-copies")
    memory.drop()
    alive.append(memory)
    os.close(descriptor)


def train(device: str) -> list[list[float]]:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 16), nn.Dropout(0.1), nn.LayerNorm(16), nn.Linear(16, 16),
    )  # fmt: skip
    parts = nn.ModuleList([model, attention]).to(device)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for _ in range(3):
        images, labels = torch.randn(8, 1, 8, 8).to(device), torch.randint(0, 10, (8,)).to(device)
        hidden = model(images)[None]
        loss = F.cross_entropy(attention(hidden, hidden, hidden)[0][0], labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().flatten().tolist() for parameter in parts.parameters()]


def kernels() -> None:
    """A training on the device has the bits of one on the CPU."""
    assert train("cuda:1") == train("cpu")


def fork() -> None:
    """A process whose parent has used CUDA has none."""
    torch.zeros(1, device="cuda")
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            os._exit(0 if "forked subprocess" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def collectives(backend: str) -> None:
    """The collectives that raydist and torch's DDP make have right results on two ranks, which are
    forked before this process has used CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                try:
                    be_rank(rank, backend, f"{folder}/store")
                    os._exit(0)
                finally:
                    traceback.print_exc()
                    os._exit(1)
        assert [os.waitpid(each, 0)[1] for each in ranks] == [0, 0]


def be_rank(rank: int, backend: str, file: str) -> None:
    here = torch.device("cuda", rank)
    torch.cuda.set_device(here)
    limit = timedelta(seconds=120)
    store = dist.FileStore(file, 2)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=2, timeout=limit, device_id=here
    )
    own = torch.full((3,), float(rank + 1), device=here)

    def changed(collective: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
        collective(tensor, *args)
        return tensor.tolist()

    assert changed(dist.all_reduce, own.clone()) == [3] * 3
    assert changed(dist.all_reduce, own.clone(), dist.ReduceOp.MAX) == [2] * 3
    assert changed(dist.all_reduce, own.bfloat16(), dist.ReduceOp.AVG) == [1.5] * 3
    assert changed(dist.broadcast, own.clone(), 1) == [2] * 3
    empty = torch.empty(2, 3, device=here)
    assert changed(dist.all_gather_into_tensor, empty, own) == [[1] * 3, [2] * 3]
    parts = torch.arange(4.0, device=here)
    half = torch.empty(2, device=here)
    assert changed(dist.reduce_scatter_tensor, half, parts) == [4 * rank, 4 * rank + 2]
    exchanged = changed(dist.all_to_all_single, torch.empty(4, device=here), parts + 10 * rank)
    assert exchanged == [2 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    received = torch.empty(3, device=here)
    swap = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    assert received.tolist() == [2 - rank] * 3
    group: Any = dist.new_group([0, 1])
    dist.all_reduce(own, group=group)
    assert own.tolist() == [3] * 3
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2).to(here), device_ids=[here])
    model(torch.randn(4, 3, device=here)).sum().backward()
    gradient = model.module.weight.grad
    both = gradient.clone()
    dist.all_reduce(both)
    assert torch.equal(both, 2 * gradient)
    dist.destroy_process_group()


if __name__ == "__main__":
    outcomes = {}
    for name in sys.argv[1:]:
        function, _, argument = name.partition(":")
        try:
            globals()[function](*filter(None, [argument]))
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))
