"""Seeds, captures and restores all random generators of a rank. (rank side)"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

WORDS = 624
"""Words in the state of a Mersenne Twister, that of Python and numpy (Matsumoto and Nishimura
1998)."""
PYTHON = struct.Struct(f"={WORDS + 1}I?d")
NUMPY = struct.Struct("=I?d")


def derive(*numbers: int) -> int:
    """Derive a seed of 63 bits from several numbers.

    Similar numbers (epochs 1, 2, …) give independent streams.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch.

    With `deterministic`, torch raises an error where it has no deterministic algorithm.
    """
    if deterministic:
        # cuBLAS reads it at its first use (NVIDIA's cuBLAS guide, "Results Reproducibility").
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        # Imports torch._inductor: a second in each rank.
        torch.use_deterministic_algorithms(deterministic)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture(device: torch.device) -> torch.Tensor:
    """Return the states of the generators of Python, numpy, torch and the GPU.

    They are uint8 of shape [n], with the same n on all ranks.
    """
    _, words, spare = random.getstate()
    python = PYTHON.pack(*words, spare is not None, spare or 0.0)
    _, keys, position, has_spare, cached = np.random.get_state(legacy=True)
    numpy = np.asarray(keys, np.uint32).tobytes() + NUMPY.pack(position, bool(has_spare), cached)
    parts = [torch.frombuffer(bytearray(python + numpy), dtype=torch.uint8), torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def restore(state: torch.Tensor, device: torch.device) -> None:
    """Restore a state of `capture`, also one from a GPU on a CPU or one from a CPU on a GPU."""
    cpu_bytes = torch.get_rng_state().numel()
    raw = state.numpy().tobytes()
    *words, has_spare, spare = PYTHON.unpack_from(raw)
    random.setstate((3, tuple(words), spare if has_spare else None))
    keys = np.frombuffer(raw, np.uint32, WORDS, PYTHON.size)
    begin = PYTHON.size + keys.nbytes
    position, has_spare, spare = NUMPY.unpack_from(raw, begin)
    np.random.set_state(("MT19937", keys, position, int(has_spare), spare))
    begin += NUMPY.size
    torch.set_rng_state(state[begin : begin + cpu_bytes].clone())
    gpu = state[begin + cpu_bytes :]
    if device.type == "cuda" and gpu.numel():
        torch.cuda.set_rng_state(gpu.clone(), device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generators inside the block; restore their states after it."""
    python = random.getstate()
    numpy = np.random.get_state()
    torch_cpu = torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
