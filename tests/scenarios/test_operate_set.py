"""`raydist set`, as a person types it beside runs that go on, that ranks are killed in, and that
are resumed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.programs import Program

LATE = """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import raydist
    from raydist.worker import context

    def job(config, kills=()):
        torch.manual_seed(0)
        rank, attempt = raydist.rank().rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

        def loss(output, target):
            step = context.current().step
            if step == 5 and not Path("go").exists():
                Path(f"here-{rank}").touch()
                while not Path("go").exists():
                    time.sleep(0.01)
            if [rank, step, attempt] in [list(each) for each in kills]:
                os.kill(os.getpid(), signal.SIGKILL)
            return nn.functional.cross_entropy(output, target)

        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.2), nn.Linear(16, 2))
        data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
        return raydist.fit(config, model=model, train=data, loss=loss)
"""
"""Its ranks make step 6 only when the file `go` is there: what is set before changes step 7."""
WORDS = (
    "job=late.py",
    "scale=1x2",
    "group=inline",
    "data.batch_size=4",
    "train.steps=16",
    "optim=adamw",
    "optim.lr=0.02",
    "optim.schedule=cosine",
    "checkpoint.every=8",
    "snapshot.every=4",
    "restart.in_place=auto",
)


pytestmark = pytest.mark.timeout(900)
LIMIT_S = 300
"""Limit on the wait for a program on a busy machine."""


def begin(folder: Path, *words: str) -> Program:
    folder.mkdir()
    (folder / "late.py").write_text(textwrap.dedent(LATE))
    return Program(folder, *WORDS, *words)


def set_in(program: Program) -> str:
    """Type `raydist set` while the ranks wait in step 6; return what it says in the end."""
    here = [program.folder / f"here-{rank}" for rank in range(2)]
    program.wait_until(lambda: all(file.exists() for file in here), "step 6", LIMIT_S)
    with subprocess.Popen(
        [sys.executable, "-m", "raydist.cli", "set", "optim.lr=0.005", "train.clip=0.1"],
        cwd=program.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "the ranks change it after step 6\n"
        (program.folder / "go").touch()
        said = command.stdout.read()
    assert command.returncode == 0
    return said


def steps(program: Program) -> dict[int, Any]:
    """The reported values of each step on rank 0; those of a repeated step must agree."""
    found: dict[int, Any] = {}
    for event in program.events("report"):
        if event["rank"] == 0 and "lr" in event["values"]:
            assert found.setdefault(event["step"], event["values"]) == event["values"]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A run in which settings are changed, and nothing else happens; it has ended."""
    program = begin(tmp_path_factory.mktemp("set") / "undisturbed")
    said = set_in(program)
    assert said == "set optim.lr 0.02 -> 0.005, train.clip null -> 0.1 after step 6\n"
    assert program.wait(LIMIT_S) == 0, program.screen
    return program


def test_all_ranks_go_on_with_the_new_values(undisturbed: Program) -> None:
    (changed,) = undisturbed.events("changed")
    assert (changed["step"], changed["before"], changed["after"]) == (
        6,
        {"optim.lr": 0.02, "train.clip": None},
        {"optim.lr": 0.005, "train.clip": 0.1},
    )
    (operated,) = undisturbed.events("operated")
    assert operated["command"] == "set"
    assert "optim.lr 0.02 -> 0.005" in operated["text"]
    found = steps(undisturbed)
    cosine = {step: 0.5 * (1 + math.cos(math.pi * (step - 1) / 16)) for step in found}
    rates = {step: values["lr"] / cosine[step] for step, values in found.items()}
    assert rates == pytest.approx({step: 0.02 if step <= 6 else 0.005 for step in range(1, 17)})
    assert [step for step, values in found.items() if "grad_norm" in values] == [*range(7, 17)]
    typed = (undisturbed.run_dir / ".hydra/config.yaml").read_text()
    assert "lr: 0.02" in typed


def test_who_sets_is_told_although_the_run_ends_with_the_next_step(tmp_path: Path) -> None:
    program = begin(tmp_path / "end", "train.steps=7")
    said = set_in(program)
    assert said == "set optim.lr 0.02 -> 0.005, train.clip null -> 0.1 after step 6\n"
    assert program.wait(LIMIT_S) == 0, program.screen


def test_killed_ranks_change_nothing(undisturbed: Program, tmp_path: Path) -> None:
    """Once a restart goes back to a state before the change, once to one after it; a rank that
    keeps its process is in both."""
    program = begin(tmp_path / "struck", "+job.args.kills=[[1,7,0],[0,10,1]]")
    set_in(program)
    assert program.wait(LIMIT_S) == 0, program.screen
    assert [each["repeated"] for each in program.events("restarted")] == [3, 2]
    assert steps(program) == steps(undisturbed)


def test_a_resume_goes_on_with_the_new_values_unless_others_are_typed(
    undisturbed: Program, tmp_path: Path
) -> None:
    checkpoint = next(undisturbed.run_dir.glob("checkpoints/step-00000008"))
    resumed = begin(tmp_path / "resumed", f"resume={checkpoint}")
    assert resumed.wait(LIMIT_S) == 0, resumed.screen
    typed = begin(tmp_path / "typed", f"resume={checkpoint}", "optim.lr=0.1")
    assert typed.wait(LIMIT_S) == 0, typed.screen
    later = {step: values for step, values in steps(undisturbed).items() if step > 8}
    assert steps(resumed) == later
    rates = {step: values["lr"] / later[step]["lr"] for step, values in steps(typed).items()}
    assert rates == pytest.approx(dict.fromkeys(range(9, 17), 20.0))
    assert all("grad_norm" in values for values in steps(typed).values())
