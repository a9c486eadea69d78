"""An agent is lost with what it had not told the driver yet."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.leftovers import ray_workers
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

JOB = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config):
    def before_the_end(step, values):
        Path(f"at-{step}").touch()
        while step == 6 and not Path("go").exists():
            time.sleep(0.01)

    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    raydist.fit(config, model=nn.Linear(4, 1), train=data, loss=nn.functional.mse_loss, on_step=before_the_end)
"""


def test_the_last_checkpoint_is_known_although_its_report_was_lost(
    tmp_path: Path, ray_address: str
) -> None:
    (tmp_path / "last.py").write_text(JOB)
    words = ("job=last.py", "scale=1x2", "train.steps=6", "data.batch_size=8")
    run = Program(tmp_path, *words, address=ray_address)
    run.wait_until(lambda: (tmp_path / "at-6").exists(), "step 6")
    (agent,) = ray_workers("NodeActor")
    run.signal(signal.SIGSTOP)  # it asks the agent for nothing meanwhile
    (tmp_path / "go").touch()
    saved = run.run_dir / "checkpoints" / "step-00000006"
    wait_until(saved.exists, "the last checkpoint")
    os.kill(agent, signal.SIGKILL)
    run.signal(signal.SIGCONT)
    assert run.wait() == 0, run.screen
    assert len(run.events("restart")) == 1
    assert run.result()["checkpoint"] == str(saved)
    # That of the first epoch, after step 4, may have been reported before.
    assert [event["step"] for event in run.events("saved")][-1] == 6
