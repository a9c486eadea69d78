"""What checkpoints hold, and where they differ to the bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from raydist.training.reshard import from_bytes


def state_on_disk(path: Path) -> dict[str, Any]:
    """Return a checkpoint without the settings, of which the folder is one."""
    if (path / "state.pt").exists():
        state = torch.load(path / "state.pt", weights_only=True)
    else:
        with tempfile.NamedTemporaryFile() as file:
            dcp_to_torch_save(path, file.name)
            state = torch.load(file.name, weights_only=False)
        state["training"] = from_bytes(state["training"])
        state["training"].pop("config")
    state.pop("config", None)
    return dict(state)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two states differ, to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        pair = [each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other)]
        return [] if same and torch.equal(*pair) else [where]
    if isinstance(one, dict) and isinstance(other, dict):
        odd = [f"{where}.{key}" for key in one.keys() ^ other.keys()]
        both = [key for key in one if key in other]
        return odd + [
            found for key in both for found in differences(one[key], other[key], f"{where}.{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for at, pair in pairs for found in differences(*pair, f"{where}[{at}]")]
    return [] if type(one) is type(other) and one == other else [where]
