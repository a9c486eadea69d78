"""Floating-point operations of a language model, and the most that a chip can do: model FLOPs
utilization. (pure)"""

from __future__ import annotations

import re

PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Words of a GPU's name -> its most operations per second in bf16 with dense matrices, by NVIDIA's
data sheets (half of what they give "with sparsity"). H100 and H200 without another word are those
with SXM."""


def peak_flops(device: str) -> float | None:
    """The most operations per second of the GPU with this name, as torch.cuda.get_device_name says
    it; None: unknown.

    A part of a GPU (MIG) has no peak of its own here.
    """
    words = set(re.split(r"[\s-]+", device))
    fits = (peak for name, peak in PEAKS.items() if set(name.split()) <= words)
    return None if "MIG" in words else next(fits, None)


def flops_per_token(parameters: int, layers: int, width: int, context: int) -> int:
    """Operations of the forward and backward pass for one token: 6 N + 12 L H Q T (Chowdhery et al.
    2022, arXiv:2204.02311, appendix B).

    - `parameters`: N, those that are multiplied with; an embedding is not, unless it is the last
      layer too.
    - `width`: H x Q, heads times the size of each.
    - `context`: T. As in the source, attention counts whole, though half of it is masked.
    """
    return 6 * parameters + 12 * layers * width * context


def utilization(tokens_per_s: float, per_token: int, device: str, devices: int) -> float | None:
    """Model FLOPs utilization, 0 to 1, of `devices` GPUs of this name; None if their peak is
    unknown."""
    peak = peak_flops(device)
    return None if peak is None else tokens_per_s * per_token / (peak * devices)
