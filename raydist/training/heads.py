"""The attention heads of a model, which the ranks of a tp group must be able to share. (rank
side)"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from raydist.shared.errors import ConfigError

NAMES = {
    "heads": ("heads", "num_attention_heads"),
    "heads of keys and values": ("kv_heads", "num_key_value_heads"),
}
"""By what they are, their names in `model.shape` of model=gpt and in `model.config` of Hugging
Face's models."""


def check_heads(model: nn.Module, tp: int) -> None:
    """Raise ConfigError if tp does not divide the heads of a model: each rank computes with whole
    heads.

    A plan that the job itself has given the model may leave its attention whole, so that is not
    looked at.
    """
    if tp == 1 or "tp_plan" in vars(model):
        return
    heads = _heads(model)
    for what, count in heads.items():
        if count % tp:
            cause = f"{type(model).__name__} has {count} {what}, which it does not divide"
            raise ConfigError.of(
                "parallel.tp", tp, cause, f"parallel.tp={math.gcd(tp, *heads.values())}"
            )


def _heads(model: nn.Module) -> dict[str, int]:
    """By what they are the heads of a model, as far as it names them."""
    shape: Any = getattr(model, "shape", None) or getattr(model, "config", None)
    found: dict[str, int] = {}
    for what, names in NAMES.items():
        for name in names:
            if isinstance(count := getattr(shape, name, None), int):
                found[what] = count
    return found
