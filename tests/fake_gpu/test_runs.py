"""Runs of raydist on fake GPUs, with torch's own process groups for NCCL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_gpu import requires_fake_gpus
from tests.fake_gpu.conftest import Machine
from tests.programs import Program

pytestmark = [requires_fake_gpus, pytest.mark.slow, pytest.mark.timeout(1800)]
LIMIT_S = 900
"""Limit on a program: the kernels are those of one CPU for all GPUs."""
COLLECTIVES = """
import raydist, torch, torch.distributed as dist


def job(config):
    here = raydist.rank().device
    for step in range(1, 100_000):
        if step == 20 and dist.get_rank() == {other}:
            dist.broadcast(torch.ones(4, device=here), 0)
        ones = torch.ones(3, device=here)
        dist.all_reduce(ones)
        assert ones.sum().item() == 3 * dist.get_world_size()
        raydist.report(step=step)
"""
LEGACY = "env.TORCH_DIST_USE_NCCL2=0"
"""torch 2.15 then has the process group of earlier versions."""


def program(folder: Path, *words: str) -> Program:
    return Program(
        folder, *words, "backend=nccl", "group=inline", "watch.progress=none", alone=True
    )


@pytest.mark.parametrize("more", [(), (LEGACY,)], ids=["nccl", "nccl-legacy"])
def test_ranks_in_different_collectives_are_named_by_the_flight_recorder(
    machine: Machine, tmp_path: Path, more: tuple[str, ...]
) -> None:
    machine(2)
    (tmp_path / "job.py").write_text(COLLECTIVES.format(other=1))
    run = program(tmp_path, "job=job.py", "scale=1x2", "hang.after_s=2", "restart=none", *more)
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "waits in all_reduce of [[3]], number 20" in run.screen
    assert "rank 1" in run.screen
    assert "waits in broadcast of [[4]], number 20" in run.screen
    (hang,) = run.events("hang")
    assert (hang["ranks"], hang["certain"]) == ([1], True)


def test_a_communicator_that_hangs_is_ended(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are in the same collective, and it does not end: NCCL's watchdog aborts it."""
    monkeypatch.setenv("HOME", str(tmp_path))  # the watchdog writes its records below it
    here = machine(2)
    (tmp_path / "job.py").write_text(COLLECTIVES.format(other=None))
    run = program(
        tmp_path, "job=job.py", "scale=1x2", "backend.timeout_s=20", "hang.after_s=600",
        "restart=none",
    )  # fmt: skip
    run.wait_for_step(3, LIMIT_S)
    here.ask("hold-nccl", rank=1)
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "20" in run.screen


def test_a_broken_gpu_is_the_cause_that_the_page_names(machine: Machine, tmp_path: Path) -> None:
    here = machine(2)
    (tmp_path / "job.py").write_text(COLLECTIVES.format(other=None))
    run = program(tmp_path, "job=job.py", "scale=1x2", "restart=none", LEGACY)
    run.wait_for_step(3, LIMIT_S)
    here.change(1, replace(here.gpus[1], state="ecc"))
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "rank 1" in run.screen
    assert "uncorrectable ECC error encountered" in run.screen


def test_three_stages_whose_ends_share_weights_train(machine: Machine, tmp_path: Path) -> None:
    """All ranks split the group of the tied weights off the default one; else NCCL would wait for
    the stage between."""
    machine(3)
    text = tmp_path / "text"
    text.mkdir()
    (text / "song.txt").write_text("".join(f"{n} green bottles\n" for n in range(3000)))
    run = program(
        tmp_path, "job=gpt", "parallel=pp", "scale=1x3", "train.steps=4", "data.global_batch=12",
        "model.layers=3", "model.width=32", "model.kv_heads=2", "model.hidden=64",
        "job.args.context=16", "job.args.held_out=8", "job.args.sample=4", f"data.root={text}",
        "hang.after_s=60", "restart=none",
    )  # fmt: skip
    assert run.wait(LIMIT_S) == 0, run.screen
    assert run.result()["status"] == "finished"
