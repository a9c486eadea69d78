"""A state on `cuda` without a GPU, by torch's fake tensors: what a snapshot of it is, and that it
waits for the GPU."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raydist.state.device import CudaDevice, device_of
from raydist.state.snapshot import layout_of, take_apart


def state_on(device: str) -> list[torch.Tensor]:
    """Return the tensors of a model in channels_last and of its optimizer's moments, as take_apart
    finds them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    # not made on the device: torch 2.8 asks the GPU for its random numbers
    weights = {
        name: torch.empty(each.shape, dtype=each.dtype, device=device)
        for name, each in model.state_dict().items()
    }
    weights["0.weight"] = weights["0.weight"].to(memory_format=torch.channels_last)
    moments = [torch.zeros(each.shape, device=device) for each in model.parameters()]
    tensors: list[torch.Tensor] = []
    take_apart({"model": weights, "optimizer": {"moments": moments}, "step": 7}, tensors)
    return tensors


def test_a_snapshot_of_a_gpus_state_is_laid_out_like_one_of_the_cpu() -> None:
    on_cpu = state_on("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = state_on("cuda")
        laid_out = layout_of(on_gpu)
    assert {tensor.device.type for tensor in on_gpu} == {"cuda"}
    assert laid_out == layout_of(on_cpu)
    assert laid_out[0][0].stride == on_cpu[0].stride() != torch.empty(8, 3, 3, 3).stride()


def test_each_tensor_of_a_gpu_lags_and_none_of_the_cpu() -> None:
    port = device_of(torch.device("cuda", 0))
    assert isinstance(port, CudaDevice)
    with FakeTensorMode():
        assert all(port.lags(tensor) for tensor in state_on("cuda"))
    assert not any(port.lags(tensor) for tensor in state_on("cpu"))
