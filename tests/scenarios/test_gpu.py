"""On all GPUs of this machine, one is enough: the job, the doctor and the bandwidth tool with the real NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from raydist.network import nccl_log
from raydist.tools import bandwidth, doctor
from tests.programs import Program

GPUS = torch.cuda.device_count()
WORDS = ("backend=nccl", f"scale=1x{max(GPUS, 1)}", "group=inline")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


def test_the_main_job_trains_and_nccls_own_log_names_the_network(tmp_path: Path) -> None:
    program = Program(tmp_path, "job=digits", *WORDS, "train.epochs=1", "fabric.debug=true", "watch.progress=none")
    assert program.wait(300) == 0, program.screen
    assert program.result()["status"] == "finished"
    for rank in range(GPUS):
        said = (program.run_dir / "logs" / f"rank-{rank}.nccl").read_text()
        log = nccl_log.parse_nccl_log(said)
        assert log.network, said
        assert bool(log.channels) == (GPUS > 1)
        own = program.run_dir / "logs" / f"rank-{rank}.log"
        assert not own.exists() or "NCCL INFO" not in own.read_text()


def test_the_doctor_asks_nccl_for_its_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    doctor.main(["--json", *WORDS])
    told = json.loads(capsys.readouterr().out)
    assert {"nccl", "gpudirect", "rdma libraries"} <= set(told["checks"])
    assert [one for one in told["findings"] if one["check"] == "nccl"] == []


def test_bandwidth_on_gpus_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--json", "--ops", "all_reduce,all_gather,broadcast", "--min", "1M", "--max", "4M", "--iters", "3"]
    assert bandwidth.main([*words, *WORDS]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["op"] for row in rows} == {"all_reduce", "all_gather", "broadcast"}
    assert all(row["wrong"] == 0 and row["seconds"] > 0 for row in rows)
