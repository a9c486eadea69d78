"""Everything random: seeded, captured, put back."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from raydist.worker import random_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float, float]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    )


def test_the_seed_decides_everything() -> None:
    random_state.seed_everything(7)
    first = draw()
    random_state.seed_everything(7)
    assert draw() == first
    random_state.seed_everything(8)
    assert not set(draw()) & set(first)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_what_was_captured_comes_back(draws: int) -> None:
    # An odd number of Gaussian draws leaves a spare one in Python's and numpy's generators.
    random_state.seed_everything(1)
    for _ in range(draws):
        draw()
    state = random_state.capture(CPU)
    after = [draw() for _ in range(3)]
    random_state.restore(state, CPU)
    assert [draw() for _ in range(3)] == after


def test_a_state_is_one_tensor_of_one_size() -> None:
    random_state.seed_everything(1)
    fresh = random_state.capture(CPU)
    draw()
    assert fresh.dtype == torch.uint8
    assert fresh.dim() == 1
    assert random_state.capture(CPU).shape == fresh.shape


def test_a_state_with_a_gpus_part_fits_a_cpu() -> None:
    random_state.seed_everything(1)
    state = torch.cat([random_state.capture(CPU), torch.zeros(16, dtype=torch.uint8)])
    after = draw()
    random_state.restore(state, CPU)
    assert draw() == after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_the_gpus_generator_comes_back() -> None:
    device = torch.device("cuda", 0)
    state = random_state.capture(device)
    after = torch.rand(4, device=device)
    random_state.restore(state, device)
    assert torch.equal(torch.rand(4, device=device), after)


def test_seeded_is_the_seed_inside_and_nothing_outside() -> None:
    random_state.seed_everything(3)
    without = draw()
    random_state.seed_everything(3)
    with random_state.seeded(9):
        first = draw()
    assert draw() == without
    with random_state.seeded(9):
        assert draw() == first


def test_seeded_puts_back_after_an_error() -> None:
    random_state.seed_everything(3)
    without = draw()
    random_state.seed_everything(3)
    with pytest.raises(KeyError), random_state.seeded(9):
        raise KeyError
    assert draw() == without


def test_derived_seeds_differ_and_stay() -> None:
    seeds = {random_state.derive(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Orders of samples are made from these: another number here is another order for every
    # checkpoint in the world.
    assert random_state.derive(0, 0) == 7896617691693857887
    assert random_state.derive(5, 1, 7) == 5564180176904846203


def test_deterministic_refuses_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        random_state.seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        random_state.seed_everything(0)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_process_draws_the_same() -> None:
    source = (
        "from raydist.worker.random_state import *; seed_everything(4); "
        "print(random.random(), np.random.rand(), torch.rand(()).item())"
    )
    output = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.split()
    random_state.seed_everything(4)
    assert [float(word) for word in output] == [
        random.random(),
        np.random.rand(),
        torch.rand(()).item(),
    ]
