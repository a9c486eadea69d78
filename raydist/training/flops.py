"""Model FLOPs utilization: a language model's operations and the peaks of GPUs. (pure)"""

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
"""Words of a GPU's name -> its peak operations per second in bf16 with dense matrices, by NVIDIA's
data sheets (half of the figures "with sparsity"). H100 and H200 without another word are those
with SXM."""


def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a GPU; None: unknown.

    `device`: its name, as from torch.cuda.get_device_name. A part of a GPU (MIG) has no peak here.
    """
    words = set(re.split(r"[\s-]+", device))
    fits = (peak for name, peak in PEAKS.items() if set(name.split()) <= words)
    return None if "MIG" in words else next(fits, None)


def flops_per_token(parameters: int, layers: int, width: int, context: int) -> int:
    """Return the operations of the forward and backward pass for one token.

    6 N + 12 L H Q T (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

    - `parameters`: N, the parameters used in matrix products; an embedding is not, unless it is the
      last layer too.
    - `width`: H x Q, heads times the size of each.
    - `context`: T. As in the source, attention counts in full, though half of it is masked.
    """
    return 6 * parameters + 12 * layers * width * context


def utilization(tokens_per_s: float, per_token: int, device: str, devices: int) -> float | None:
    """Return the model FLOPs utilization, 0 to 1, of `devices` GPUs of this name.

    None: their peak is unknown.
    """
    peak = peak_flops(device)
    return None if peak is None else tokens_per_s * per_token / (peak * devices)
