"""On all GPUs of this machine, one is enough: jobs, restarts, the doctor and the bandwidth tool
with the real NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist
from raydist.network import nccl_log
from raydist.reporting.result import Result
from raydist.state.device import CudaDevice
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import blank_page
from raydist.tools import bandwidth, doctor
from tests import faults
from tests.faults import Fault, kill
from tests.programs import Program, python_with
from tests.records import read_events

GPUS = torch.cuda.device_count()
WORDS = ("backend=nccl", f"scale=1x{max(GPUS, 1)}", "group=inline")
MIG = "MIG" in subprocess.getoutput("nvidia-smi -L")
ON_RAY = ("backend=nccl", "group=ray", "scale.cpus=0.1", "watch.progress=none")
# With 8 GPUs the training has 8 steps, and the cluster of the tests 4 CPUs.
TRAINING = ("train.epochs=2", "data.batch_size=8", "snapshot.every=1", "seed=5")
STRUCK = 4
several = pytest.mark.skipif(GPUS < 2, reason=f"two GPUs are needed, here are {GPUS}")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]


def test_the_main_job_trains_and_nccls_own_log_names_the_network(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        "job=digits",
        *WORDS,
        "train.epochs=1",
        "fabric.debug=true",
        "watch.progress=none",
        alone=True,
    )
    assert program.wait(300) == 0, program.screen
    assert program.result()["status"] == "finished"
    for rank in range(GPUS):
        text = (program.run_dir / "logs" / f"rank-{rank}.nccl").read_text()
        log = nccl_log.parse_nccl_log(text)
        assert log.network, text
        assert bool(log.channels) == (GPUS > 1)
        own = program.run_dir / "logs" / f"rank-{rank}.log"
        assert not own.exists() or "NCCL INFO" not in own.read_text()


def test_the_doctor_asks_nccl_for_its_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    doctor.main(["--json", *WORDS])
    report = json.loads(capsys.readouterr().out)
    assert {"nccl", "gpudirect", "rdma libraries"} <= set(report["checks"])
    assert [one for one in report["findings"] if one["check"] == "nccl"] == []


def test_bandwidth_on_gpus_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--json",
        "--ops",
        "all_reduce,all_gather,broadcast",
        "--min",
        "1M",
        "--max",
        "4M",
        "--iters",
        "3",
    ]
    assert bandwidth.main([*words, *WORDS]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["op"] for row in rows} == {"all_reduce", "all_gather", "broadcast"}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)


def words_of_training(*words: str, gpus: int = GPUS, optim: str = "sgd") -> tuple[str, ...]:
    """Return the settings of a training on so many GPUs, unless `words` have a `scale=`."""
    size = () if any(word.startswith("scale=") for word in words) else (f"scale=1x{max(gpus, 1)}",)
    return (*ON_RAY, *TRAINING, f"optim={optim}", *size, *words)


def train(*words: str, struck: tuple[Fault, ...] = (), optim: str = "sgd") -> Result[Any]:
    return raydist.run(faults.training, *words_of_training(*words, optim=optim), struck=struck)


def kinds(done: Result[Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(done.dir / "events.jsonl") if event["kind"] == kind]


def test_copies_to_page_locked_memory_are_whole_and_end_when_the_gpu_says_so() -> None:
    """The GPU itself marks a slot as complete; memory that is left is no longer page-locked."""
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    device = torch.device("cuda", 0)
    memory, weight = (
        SnapshotBuffer(descriptor, CudaDevice(device)),
        torch.zeros(1 << 22, device=device),
    )
    for step in range(1, 9):
        weight.fill_(step)
        memory.write(step, {"model": weight})
    torch.cuda.synchronize()
    seen = SnapshotBuffer(descriptor)  # as another process: it asks no GPU
    assert max(seen.steps) == 8
    for step, slot in seen.steps.items():
        assert seen.read(slot)["model"].unique().tolist() == [step]
    memory.drop()
    again = SnapshotBuffer(descriptor, CudaDevice(device))
    again.write(9, {"model": weight})
    again.settle()
    assert again.read(again.steps[9])["model"].unique().tolist() == [8]
    os.close(descriptor)


@pytest.mark.parametrize("optim", ["sgd", "adamw"])  # Adam keeps its `step` on the host
def test_a_killed_rank_goes_on_from_memory_and_loses_one_step_at_most(
    on_ray: Path, optim: str
) -> None:
    whole, done = train(optim=optim), train(optim=optim, struck=(kill(0, STRUCK),))
    (back,) = kinds(done, "restarted")
    assert back["repeated"] <= 1
    steps = [
        event["step"]
        for event in kinds(done, "report")
        if event["rank"] == 0 and "loss" in event["values"]
    ]
    assert {*steps} == {*range(1, max(steps) + 1)}
    assert done.values[0] is not None
    assert whole.values[0] is not None
    assert done.values[0]["figures"] == pytest.approx(whole.values[0]["figures"], rel=1e-3)


def test_a_model_in_shards_goes_on_from_memory(on_ray: Path) -> None:
    done = train("parallel=fsdp", struck=(kill(0, STRUCK),))
    (back,) = kinds(done, "restarted")
    assert back["repeated"] <= 2  # the copy of the newest step may not be complete


@several
def test_fewer_ranks_go_on_from_the_checkpoint_of_all(on_ray: Path) -> None:
    first = train()
    more = train("scale=1x1", "train.epochs=3", f"resume={first.checkpoint}")
    assert kinds(more, "report")[0]["step"] == int(str(first.checkpoint)[-8:]) + 1


def own_gpu() -> tuple[str, int, str]:
    """On a rank: its GPU or MIG instance by uuid, how many GPUs torch sees, the device of its
    work."""
    here = torch.cuda.current_device()
    torch.distributed.all_reduce(torch.ones(1, device=here))
    return (
        str(torch.cuda.get_device_properties(here).uuid),
        torch.cuda.device_count(),
        str(raydist.rank().device),
    )


def test_each_rank_has_a_gpu_or_a_mig_instance_of_its_own(on_ray: Path) -> None:
    gpus = [value for value in raydist.run(own_gpu, *ON_RAY, f"scale=1x{GPUS}").values if value]
    assert len({uuid for uuid, _, _ in gpus}) == GPUS
    assert all(device.startswith("cuda") for _, _, device in gpus)
    if MIG:
        assert {count for _, count, _ in gpus} == {1}, (
            "CUDA uses the first MIG instance of a list only"
        )


def test_a_job_that_imports_a_package_which_uses_cuda_trains_on_gpus_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of a process that has used CUDA have none: the ranks are new processes then, and a line
    says so."""
    python = python_with(
        tmp_path / "venv", "touches", "import torch; torch.zeros(1, device='cuda')"
    )
    monkeypatch.setattr(sys, "executable", python)
    (tmp_path / "early.py").write_text(
        "import torch\nimport raydist\nimport touches\n\n\ndef job(config):\n"
        "    raydist.report(step=1, loss=float(torch.ones(1, "
        "device=raydist.rank().device).sum()))\n"
        "    assert raydist.rank().device.type == 'cuda'\n"
    )
    program = Program(
        tmp_path,
        "job=early.py",
        *WORDS,
        "group=ray",
        "scale.cpus=0.1",
        "watch.progress=lines",
        alone=True,
    )
    assert program.wait(300) == 0, program.screen
    assert any("CUDA" in event["text"] for event in program.events("warning")), program.screen
