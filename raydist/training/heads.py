"""The attention heads of a model, which the ranks of a tp group must divide evenly. (rank side)"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from raydist.shared.errors import ConfigError

NAMES = {
    "heads": ("heads", "num_attention_heads"),
    "heads of keys and values": ("kv_heads", "num_key_value_heads"),
}
"""The kinds of heads, and their names in `model.shape` of model=gpt and in `model.config` of
Hugging Face's models."""


def check_heads(model: nn.Module, tp: int) -> None:
    """Raise ConfigError if tp does not divide the heads: each rank computes with whole heads.

    A model whose tp plan comes from the job is not checked: that plan may leave its attention
    whole.
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
    """Return the numbers of heads of a model by kind, as far as it names them."""
    shape: Any = getattr(model, "shape", None) or getattr(model, "config", None)
    found: dict[str, int] = {}
    for what, names in NAMES.items():
        for name in names:
            if isinstance(count := getattr(shape, name, None), int):
                found[what] = count
    return found
