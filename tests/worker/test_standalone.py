"""A job's file run as a program: settings, run folder, output, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import raydist
from raydist.settings.config import Backend, Job
from raydist.shared.errors import RunFailed
from raydist.worker import backends, checkpoint, context, standalone
from tests.ranks import run_ranks
from tests.records import event


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's variables, an empty folder, no words."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "RAYDIST_RUN_DIR",
        "RAYDIST_RESUME",
        "RAYDIST_RUNS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["job.py"])
    yield
    assert not dist.is_initialized()


def facts(config: Job, size: int = 3) -> dict[str, Any]:
    return {
        "size": size,
        "seed": config.seed,
        "target": config.job.target,
        "backend": dist.get_backend(),
        "folder": raydist.rank().run_dir,
        "resume": os.environ["RAYDIST_RESUME"],
    }


def test_the_function_is_called_with_the_settings_and_its_value_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py", "seed=4", "job.args.size=5"])
    value = raydist.main(facts)
    assert (value["size"], value["seed"], value["resume"]) == (5, 4, "")
    assert value["target"] == f"{__file__}:facts"
    assert value["backend"] == ("nccl" if torch.cuda.is_available() else "gloo")
    assert value["folder"].is_relative_to(tmp_path / "runs")
    assert "RAYDIST_RESUME" not in os.environ
    assert context.current().comm is None


def mark(config: Job) -> tuple[str | None, str, str]:
    return os.environ.get("MARK"), config.backend.name, str(raydist.rank().device)


def test_variables_of_the_settings_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py", "env.MARK=x"])
    assert raydist.main(mark)[0] == "x"
    assert "MARK" not in os.environ


def test_without_gpus_the_job_is_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["job.py", "scale.gpus=0"])
    assert raydist.main(mark)[1:] == ("gloo", "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def save_a_tensor(config: Job) -> Any:
    path = checkpoint.save(1, {}, metrics={"acc": torch.tensor(0.5)})  # type: ignore[dict-item]
    return json.loads((Path(str(path)) / "meta.json").read_text())["metrics"]


def test_a_metric_may_be_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py"])
    assert raydist.main(save_a_tensor) == {"acc": 0.5}


def test_a_run_folder_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYDIST_RUN_DIR", str(tmp_path / "here"))
    assert raydist.main(facts)["folder"] == tmp_path / "here"


def test_all_ranks_have_the_run_folder_of_rank_0(tmp_path: Path) -> None:
    def folder(job: Job) -> Path:
        from dataclasses import replace

        os.environ.pop("RAYDIST_RUN_DIR", None)
        mine = replace(job, dir=f"/runs/gefüllt/of rank {raydist.rank().rank}")
        return standalone.rank0_folder(mine, context.current().comm)

    results = run_ranks(2, Job(backend=Backend(name="gloo")), folder, tmp_path)
    assert [one.value for one in results] == [Path("/runs/gefüllt/of rank 0")] * 2, results[0].error


def save_one(config: Job) -> int:
    latest = checkpoint.latest()
    step = 1 if latest is None else latest.step + 1
    checkpoint.save(step, {"step": step})
    return step


def test_resume_auto_goes_on_from_the_run_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert raydist.main(save_one) == 1
    assert raydist.main(save_one) == 1
    monkeypatch.setattr(sys, "argv", ["job.py", "resume=auto"])
    assert raydist.main(save_one) == 2
    assert raydist.main(save_one) == 3


def test_resume_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py", f"resume={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        raydist.main(save_one)
    assert ended.value.code == 2
    assert f"error: resume={tmp_path}: no complete checkpoint is there" in capsys.readouterr().err


def test_a_wrong_setting_ends_with_2_and_names_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["job.py", "train.epoch=2"])
    with pytest.raises(SystemExit) as ended:
        raydist.main(facts)
    assert ended.value.code == 2
    assert "train.epochs" in capsys.readouterr().err


def fails_by_name() -> None:
    raise RunFailed("as it must")


def fails() -> None:
    raise KeyError("as it must")


def test_a_named_failure_ends_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        raydist.main(fails_by_name)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: as it must\n"


def test_any_other_exception_keeps_its_traceback() -> None:
    with pytest.raises(KeyError):
        raydist.main(fails)
    assert context.current().comm is None


def test_steps_are_printed_at_a_sane_rate_and_all_else_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show = standalone.printer(every_s=1000.0)
    for step in range(1, 6):
        show(event("report", rank=0, step=step, values={"steps": 5, "loss": 0.5}))
        show(event("report", rank=1, step=step, values={"steps": 5, "loss": 9.0}))
    show(event("report", rank=0, step=5, values={"accuracy": 0.25}))
    show(event("warning", rank=0, text="mind the gap"))
    show(event("begin", rank=0, steps=5))
    assert capsys.readouterr().out.splitlines() == [
        "step 1 · steps 5 · loss 0.5",
        "step 5 · steps 5 · loss 0.5",
        "step 5 · accuracy 0.25",
        "text mind the gap",
    ]


def test_a_small_every_prints_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    show = standalone.printer(every_s=0.0)
    for step in (1, 2, 3):
        show(event("report", rank=0, step=step, values={"steps": 5}))
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_seeds_are_set_before_the_job_begins() -> None:
    drawn = []
    for seed in (1, 1, 2):
        with backends.join("gloo", Job(backend=Backend(name="gloo"), seed=seed), {}):
            drawn.append(float(torch.rand(())))
    context.enter(None)
    assert drawn[0] == drawn[1] != drawn[2]


def test_deterministic_is_on_in_the_job() -> None:
    job = Job(backend=Backend(name="gloo"), deterministic=True)
    with backends.join("gloo", job, {}):
        assert torch.are_deterministic_algorithms_enabled()
    with backends.join("gloo", Job(backend=Backend(name="gloo")), {}):
        assert not torch.are_deterministic_algorithms_enabled()
    context.enter(None)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


TRAINING = """
import glob, torch, raydist
from torch import nn
from torch.utils.data import TensorDataset


def job(config):
    samples = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    return raydist.fit(config, model=nn.Linear(4, 2), train=samples, loss=nn.functional.cross_entropy)


if __name__ == "__main__":
    raydist.main(job)
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    print(f"left: {[name for name in names if 'gloo' in name]}")  # as one piece: both ranks write to one pipe
"""


def test_gloos_threads_end_with_the_process_group(tmp_path: Path) -> None:
    """One that lives while its process exits may abort it; torchrun then calls the run a
    failure."""
    (tmp_path / "train.py").write_text(TRAINING)
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
        "train.steps=2",
    ]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left: []") == 2, done.stdout
