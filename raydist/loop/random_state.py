"""Everything random in a rank: seeded, captured into one tensor, put back. (rank side)"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

WORDS = 624
"""Words of a Mersenne twister's state; Python's and numpy's have the same (Matsumoto and Nishimura 1998)."""
PYTHON = struct.Struct(f"={WORDS + 1}I?d")
NUMPY = struct.Struct("=I?d")


def derive(*numbers: int) -> int:
    """A seed of 63 bits from several numbers: neighbours (epoch 1, 2, …) get unrelated streams."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_everything(seed: int, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch; with `deterministic`, torch raises where it has no deterministic algorithm."""
    if deterministic:
        # cuBLAS reads it when it is first used: NVIDIA's cuBLAS guide, "Results Reproducibility".
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)  # imports torch._inductor: a second in each rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture(device: torch.device) -> torch.Tensor:
    """The state of Python's, numpy's, torch's generators and the GPU's: uint8, of one size on every rank."""
    _, words, spare = random.getstate()
    python = PYTHON.pack(*words, spare is not None, spare or 0.0)
    _, keys, position, has_spare, cached = np.random.get_state(legacy=True)
    numpy = np.asarray(keys, np.uint32).tobytes() + NUMPY.pack(position, bool(has_spare), cached)
    parts = [torch.frombuffer(bytearray(python + numpy), dtype=torch.uint8), torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def restore(state: torch.Tensor, device: torch.device) -> None:
    """Put back what `capture` took. A state from a GPU fits a CPU too, and the other way round."""
    on_cpu = torch.get_rng_state().numel()
    raw = state.numpy().tobytes()
    *words, has_spare, spare = PYTHON.unpack_from(raw)
    random.setstate((3, tuple(words), spare if has_spare else None))
    keys = np.frombuffer(raw, np.uint32, WORDS, PYTHON.size)
    begin = PYTHON.size + keys.nbytes
    position, has_spare, spare = NUMPY.unpack_from(raw, begin)
    np.random.set_state(("MT19937", keys, position, int(has_spare), spare))
    begin += NUMPY.size
    torch.set_rng_state(state[begin : begin + on_cpu].clone())
    gpu = state[begin + on_cpu :]
    if device.type == "cuda" and gpu.numel():
        torch.cuda.set_rng_state(gpu.clone(), device)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The CPU's generators seeded inside, as they were outside."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
