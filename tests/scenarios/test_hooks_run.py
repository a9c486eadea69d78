"""Hooks and a stream as test data in a training that loses a rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs import Program
from tests.scripts.hooked import KILLED, STEPS

WORDS = (
    f"job={ROOT}/tests/scripts/hooked.py",
    "scale=1x2",
    "group=inline",
    "backend=gloo",
    "seed=5",
    "watch.progress=none",
    "data.global_batch=8",
    "snapshot.every=3",
    "optim=sgd",
    "optim.lr=0.1",
    f"train.steps={STEPS}",
    "train.grad_norm=true",
    "train.evaluate_steps=2",
)


def calls(folder: Path, name: str, rank: int) -> list[list[str]]:
    """Return the lines that a hook has written: in the whole training, and in the broken one."""
    files = [folder / f"{name}-{strike}-{rank}.txt" for strike in (False, True)]
    return [file.read_text().splitlines() for file in files]


@pytest.mark.slow
def test_hooks_are_called_again_for_the_steps_that_are_repeated(tmp_path: Path) -> None:
    program = Program(tmp_path, *WORDS, "parallel=fsdp")
    assert program.wait(300) == 0, program.screen
    for rank in range(2):
        whole, broken = calls(program.run_dir, "step", rank)
        assert [int(line.split()[0]) for line in whole] == [*range(1, STEPS + 1)]
        if rank == 1:
            # The state of step 3 was kept, and the rank killed before the next one was.
            assert broken == whole[:KILLED] + whole[3:]
        assert broken[3 - STEPS :] == whole[3:]
        whole, broken = calls(program.run_dir, "evaluation", rank)
        # The end of a training that has finished is not measured once more.
        assert [int(line.split()[0]) for line in whole] == [2, 4, 6, 8]
        assert broken == whole[:2] + whole[1:]
