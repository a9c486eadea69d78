"""Ranks killed from outside at random moments, with restart.in_place; `python -m bench storm` kills
hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import storm
from raydist.worker.torch_private import connects_anew
from tests.checkpoints import differences

pytestmark = pytest.mark.skipif(not connects_anew(), reason="this torch cannot connect ranks anew")
KILLS = 5
NAMES = ("ddp, data.workers=1", "pp")
"""What differs most in how ranks begin anew; test_in_place_run and test_recoverable_run have others."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_killed_at_random_moments_change_no_bit(name: str, tmp_path: Path) -> None:
    done = storm.division(tmp_path, storm.DIVISIONS[name], KILLS, seed=1, steps=60)
    assert not done.failed
    assert done.killed == KILLS
    assert any(done.kept)


@pytest.mark.slow
def test_a_run_that_ends_otherwise_is_found(tmp_path: Path) -> None:
    """With another seed each loss, weight and generator is another."""
    alone = storm.left_alone(tmp_path / "alone", ("train.steps=20",))
    other = storm.Stream(tmp_path / "other" / "run" / "events.jsonl")
    storm.storm(other, ("train.steps=20", "seed=1"), 0, 0)
    with pytest.raises(storm.Storm, match="differences: loss of step 1, "):
        storm.check(other, alone)
    odd = differences(storm.state_of(tmp_path / "other"), alone.state)
    for part in (
        ".0.figures.loss",
        ".3.random",
        ".2.model.last.weight",
        ".optimizer.state.0.exp_avg",
    ):
        assert any(part in each for each in odd), (part, odd)


def test_one_bit_is_a_difference() -> None:
    zero = {"a": [torch.zeros(2), 1.0], "b": {"c": torch.arange(3)}}
    assert not differences(zero, {"a": [torch.zeros(2), 1.0], "b": {"c": torch.arange(3)}})
    other = {"a": [torch.tensor([0.0, -0.0]), 1.0], "b": {"c": torch.arange(3).double(), "d": 1}}
    assert differences(zero, other) == [".a[0]", ".b.d", ".b.c"]
