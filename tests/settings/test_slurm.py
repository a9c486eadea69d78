"""Where in a Slurm allocation a run may be started; tests/scenarios/test_slurm_rig.py asks Slurm."""

from __future__ import annotations

import threading

import pytest

from raydist.launch import warm_server
from raydist.settings import slurm
from raydist.shared.errors import ConfigError

SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
BATCH = {**SHELL, "SLURM_PROCID": "0"}
STEP = {**BATCH, "SLURM_STEP_NUM_TASKS": "3"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {**STEP, "RAY_ADDRESS": "10.0.0.1:6379"},  # `ray symmetric-run -- raydist train`
        {**SHELL, "RAY_ADDRESS": "10.0.0.1:6379"},
        {**STEP, "RANK": "2"},  # `srun torchrun jobs/digits.py`
    ],
)
def test_one_run_is_started(environ: dict[str, str]) -> None:
    slurm.check_task(environ)


@pytest.mark.parametrize(
    ("environ", "cause"), [(SHELL, "this shell of salloc"), (STEP, "each of srun's 3 tasks")]
)
def test_any_other_is_refused_with_what_to_type(environ: dict[str, str], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as refused:
        slurm.check_task(environ)
    assert refused.value.suggestion == "sbatch --nodes=3 deploy/slurm/train.sbatch"


def test_only_the_first_task_prints_it() -> None:
    with pytest.raises(SystemExit) as ended:
        slurm.check_task({**STEP, "SLURM_PROCID": "2"})
    assert ended.value.code == 2


@pytest.mark.parametrize(("environ", "begun"), [({}, 1), (STEP, 0), (SHELL, 0), (BATCH, 0)])
def test_no_server_is_started_before_it_is_checked(
    environ: dict[str, str], begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RANK", *STEP):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    started: list[int] = []
    monkeypatch.setattr(warm_server, "_begin", lambda: started.append(1))
    warm_server.begin(["seed=1"])
    for thread in threading.enumerate():
        if thread.name == "raydist-warm":
            thread.join()
    assert len(started) == begun
