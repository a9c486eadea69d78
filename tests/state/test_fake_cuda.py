"""A state on `cuda` without a GPU, by torch's fake tensors: what a snapshot of it is, and that it
waits for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raydist.state.device import CudaDevice, device_of
from raydist.state.snapshot import layout_of, take_apart


def state_on(device: str) -> list[torch.Tensor]:
    """Return the tensors of a model in channels_last and of its optimizer's moments, as take_apart
    finds them."""
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2))
    weights = model.state_dict()
    weights["0.weight"] = weights["0.weight"].to(memory_format=torch.channels_last)
    moments = [torch.zeros_like(each) for each in model.parameters()]
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


class Stream:
    """The queue of one GPU, as far as CudaDevice.write needs it."""

    def __init__(self, device: torch.device, waited: list[tuple[str, str]]) -> None:
        self.device, self.waited = device, waited

    def record_event(self) -> Stream:
        return self

    def wait_event(self, other: Stream) -> None:
        self.waited.append((str(self.device), str(other.device)))


def test_a_state_on_several_gpus_is_complete_when_the_last_of_them_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mark was only in the queue of the rank's own GPU."""
    waited: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: Stream(torch.device(device), waited)
    )
    with FakeTensorMode():
        tensors = [torch.empty(3, device=f"cuda:{number}") for number in (0, 1, 2)] + [
            torch.empty(3)
        ]
        CudaDevice(torch.device("cuda", 0)).write(torch.zeros(1, dtype=torch.int64), 7, tensors)
    assert sorted(waited) == [("cuda:0", "cuda:1"), ("cuda:0", "cuda:2")]
