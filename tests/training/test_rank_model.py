"""Whether nothing but the optimizer changes the state of a model, so that it may be copied late; and
what becomes of a batch on its way to the device."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from raydist.training.gpt import GPT
from raydist.training.rank_model import BatchCopier, StateWatch


class Bounded(nn.Linear):
    """Bounds its weights in the forward pass, from the second one on."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes > 1:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
        return super().forward(x)


class Counting(nn.Linear):
    """Has a state beside its parameters."""

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: Any) -> None: ...


class Counted(nn.Linear):
    """Counts its passes in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def followed() -> nn.Module:
    """Return a model with a copy that follows it, without gradients."""
    teacher = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), teacher.requires_grad_(False))


def watched(model: nn.Module, *inputs: torch.Tensor, device: str = "cuda") -> list[bool]:
    """Return what is known before and after each of two passes."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    watch = StateWatch(model, optimizer, torch.device(device))
    known = [watch.changed_by_steps_only]
    for _ in range(3):
        with watch.watching():
            model(*inputs).sum().backward()
        optimizer.step()
        known.append(watch.changed_by_steps_only)
    return known


FOUR = torch.ones(3, 4)
TOKENS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("model", "given", "known"),
    [
        (nn.Linear(4, 4), FOUR, [False, True, True, True]),
        (GPT(layers=1, width=8, heads=2, kv_heads=1, hidden=8), TOKENS, [False, True, True, True]),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), FOUR, [False] * 4),
        (followed(), FOUR, [False] * 4),
        (Counting(4, 4), FOUR, [False] * 4),
        (Counted(), FOUR, [False] * 4),
        (nn.Embedding(4, 4, max_norm=0.1), TOKENS, [False] * 4),
        (Bounded(4, 4), FOUR, [False, True, False, False]),
    ],
    ids=["linear", "tied", "buffers", "frozen", "extra", "unsaved", "max_norm", "bounded"],
)
def test_a_state_that_more_than_the_optimizer_changes_is_not_copied_late(
    model: nn.Module, given: torch.Tensor, known: list[bool]
) -> None:
    assert watched(model, given) == known
    assert watched(nn.Linear(4, 4), FOUR, device="cpu") == [False] * 4


class Pair(NamedTuple):
    """A batch whose parts have names."""

    image: torch.Tensor
    label: torch.Tensor


class Encoding(UserDict[str, torch.Tensor]):
    """A batch whose columns are attributes, as those of transformers."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.data[name]


class Edges(NamedTuple):
    """A batch with a part whose name is that of a method of tensors."""

    frm: torch.Tensor
    to: torch.Tensor


class Output(OrderedDict[str, torch.Tensor]):
    """A batch that takes no items, as ModelOutput of transformers."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no update")


class OnOneDevice(dict[str, torch.Tensor]):
    """A batch that moves what is put into it to its own device, as a tensordict."""

    device = "cpu"

    def to(self, device: torch.device) -> OnOneDevice:
        self.device = str(device)
        return self


class Graph:
    """A batch that moves itself, in place."""

    def __init__(self) -> None:
        self.nodes = torch.ones(2, 3)

    def to(self, device: torch.device) -> Graph:
        self.nodes = self.nodes.to(device, torch.float64)
        return self


def test_a_batch_keeps_its_type_on_the_way_to_the_device() -> None:
    copied = BatchCopier(torch.device("cpu"), torch.channels_last).copy
    image, label, graph = torch.ones(2, 3, 4, 4), torch.zeros(2), Graph()
    pair = copied(Pair(image, label))
    assert type(pair) is Pair
    assert pair.image.is_contiguous(memory_format=torch.channels_last)
    encoding = copied(Encoding({"pixels": image}))
    assert type(encoding) is Encoding
    assert encoding.pixels.is_contiguous(memory_format=torch.channels_last)
    assert image.is_contiguous()
    assert isinstance(copied(pack_sequence([torch.ones(3), torch.ones(2)])), PackedSequence)
    moved = copied([graph])[0]
    assert moved.nodes.dtype is torch.float64
    assert graph.nodes.dtype is torch.float32
    assert type(copied({"x": (image, label)})["x"]) is list
    edges = copied(Edges(image, label))
    assert type(edges) is Edges
    assert edges.frm.is_contiguous(memory_format=torch.channels_last)
    assert copied(Output(x=image))["x"].is_contiguous(memory_format=torch.channels_last)
    moved = BatchCopier(torch.device("meta"), torch.preserve_format).copy(OnOneDevice(x=image))
    assert (type(moved), moved.device) == (OnOneDevice, "meta")
