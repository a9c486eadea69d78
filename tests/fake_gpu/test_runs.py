"""Runs of raydist on fake GPUs, with torch's own process groups for NCCL."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.fake_gpu import FakeGpus, Gpu, requires_fake_gpus
from tests.fake_gpu.conftest import Machine
from tests.programs import Program, python_with

pytestmark = [requires_fake_gpus, pytest.mark.slow, pytest.mark.timeout(1800)]
LIMIT_S = 900
"""Limit on a program: the kernels are those of one CPU for all GPUs."""
JOBS = Path(__file__).with_name("trainings.py")
LEGACY = "env.TORCH_DIST_USE_NCCL2=0"
"""torch 2.15 then has the process group of earlier versions."""
ADAMW = ("scale=1x2", "train.steps=12", "data.batch_size=4", "optim=adamw", "optim.lr=0.01")


def program(folder: Path, *words: str) -> Program:
    return Program(folder, *words, "backend=nccl", "group=inline", "watch.progress=none")


def finished(folder: Path, *words: str) -> Program:
    """Return a program that has finished."""
    run = program(folder, *words)
    assert run.wait(LIMIT_S) == 0, run.screen
    return run


def certain_hang(run: Program) -> EventJson:
    """Return the only hang that is certain; on a busy machine ranks may seem to hang before."""
    (hang,) = (each for each in run.events("hang") if each["certain"])
    return hang


@pytest.mark.parametrize(
    ("more", "old"), [((), False), ((LEGACY,), True)], ids=["nccl-json", "nccl-legacy-text"]
)
def test_ranks_in_different_collectives_are_named_by_the_flight_recorder_and_ras(
    four: FakeGpus, tmp_path: Path, more: tuple[str, ...], old: bool
) -> None:
    """`old`: NCCL's RAS answers in text, as before it knew JSON."""
    if old:
        four.ask("ras-text")
    run = program(
        tmp_path, f"job={JOBS}:collectives", "job.args.other=1", "scale=1x2", "hang.after_s=2",
        "restart=none", *more,
    )  # fmt: skip
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "waits in all_reduce of [[3]], number 20" in run.screen
    assert "rank 1" in run.screen
    assert "waits in broadcast of [[4]], number 20" in run.screen
    hang = certain_hang(run)
    assert hang["ranks"] == [1]
    pids = {each["rank"]: each["pid"] for each in run.events("joined")}
    said = {
        False: (
            "communicator of ranks 0-1: Broadcast: rank 1 launched 1, rank 0 launched 0",
            "communicator of ranks 0-1: AllReduce: rank 0 launched 20, rank 1 launched 19",
        ),
        True: (
            "Communicator ranks have different AllReduce operation counts",
            f"Rank 1 has launched up to operation 19 -- GPU 1 managed by process {pids[1]} on node "
            "127.0.0.1",
        ),
    }
    page = (run.run_dir / "blame-1.txt").read_text()
    for line in said[old]:
        assert f"NCCL's RAS: {line}" in hang["notes"]
        assert f"also: NCCL's RAS: {line}" in page
    whole = (run.run_dir / "logs/nccl-ras.txt").read_text()
    assert whole.startswith("NCCL version" if old else "{")


def test_a_run_whose_ras_is_turned_off_hangs_as_any(four: FakeGpus, tmp_path: Path) -> None:
    run = program(
        tmp_path, f"job={JOBS}:collectives", "job.args.other=1", "scale=1x2", "hang.after_s=2",
        "restart=none", "env.NCCL_RAS_ENABLE=0",
    )  # fmt: skip
    assert run.wait(LIMIT_S) == 1, run.screen
    hang = certain_hang(run)
    assert (hang["ranks"], list(hang["notes"])) == ([1], [])
    assert not (run.run_dir / "logs/nccl-ras.txt").exists()


def test_a_communicator_that_hangs_is_ended(four: FakeGpus, tmp_path: Path) -> None:
    """All ranks are in the same collective, and it does not end: NCCL's watchdog aborts it."""
    run = program(
        tmp_path, f"job={JOBS}:collectives", "scale=1x2", "backend.timeout_s=10",
        "hang.after_s=600", "restart=none", f"env.HOME={tmp_path}",  # for the watchdog's records
    )  # fmt: skip
    run.wait_for_step(3, LIMIT_S)
    four.ask("hold-nccl", rank=1)
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "due to timeout" in run.screen


@pytest.mark.parametrize("more", [(), (LEGACY,)], ids=["nccl", "nccl-legacy"])
def test_a_broken_gpu_is_the_cause_that_the_page_names(
    four: FakeGpus, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The newer process group aborts its rank after a quarter of a minute for "an error", or raises
    that an operation has failed: only the log has more."""
    run = program(
        tmp_path, f"job={JOBS}:collectives", "scale=1x2", "restart=none", *more,
        f"env.HOME={tmp_path}",  # for the watchdog's records
    )  # fmt: skip
    run.wait_for_step(3, LIMIT_S)
    four.change(1, replace(four.gpus[1], state="ecc"))
    assert run.wait(LIMIT_S) == 1, run.screen
    assert "rank 1" in run.screen
    assert "uncorrectable ECC error encountered" in run.screen
    (failure,) = run.events("failure")
    assert failure["cause"]["rank"] == 1
    assert "the rank that failed first is not known" not in failure["reason"]


def test_a_gpu_that_falls_off_the_bus_is_the_cause_that_the_page_names(
    four: FakeGpus, tmp_path: Path
) -> None:
    """CUDA only says that its error is unknown."""
    run = program(
        tmp_path, f"job={JOBS}:collectives", "scale=1x2", "restart=none", f"env.HOME={tmp_path}"
    )
    run.wait_for_step(3, LIMIT_S)
    four.change(1, replace(four.gpus[1], state="lost"))
    assert run.wait(LIMIT_S) == 1, run.screen
    page = (run.run_dir / "blame-1.txt").read_text()
    assert "NVML reports that GPU 1 is lost: it has fallen off the bus" in page
    assert "dmesg for the Xid" in page
    (failure,) = run.events("failure")
    assert failure["cause"]["rank"] == 1
    assert "the rank that failed first is not known" not in failure["reason"]


def test_an_xid_is_a_warning_and_one_that_is_the_gpus_fault_is_the_cause(
    four: FakeGpus, tmp_path: Path
) -> None:
    """It fails with an error of NCCL, as ranks do that lose a peer: without the Xid nobody knows
    which one began."""
    run = program(
        tmp_path, f"job={JOBS}:collectives", "scale=1x2", "restart=none", "hang.after_s=600",
        f"env.HOME={tmp_path}",
    )  # fmt: skip
    run.wait_for_step(3, LIMIT_S)
    four.report_xid(3, 79)  # of no rank
    memory_fault = "NVML reported Xid 31 of GPU 0 (memory page fault: an access to an invalid"
    ecc_error = "NVML reported Xid 48 of GPU 1 (double-bit ECC error): a fault of the GPU"

    def warnings() -> list[tuple[int, str]]:
        found = run.events("warning")
        return sorted((each["rank"], each["text"]) for each in found if "Xid" in each["text"])

    def warned() -> bool:
        four.report_xid(0, 31)  # again and again, as drivers do
        four.report_xid(1, 48)
        return len(warnings()) >= 2

    run.wait_until(warned, "warnings", LIMIT_S)
    four.ask("nccl-error", rank=1)
    assert run.wait(LIMIT_S) == 1, run.screen
    (failure,) = run.events("failure")
    assert failure["cause"]["rank"] == 1
    assert ecc_error in failure["cause"]["message"]
    assert "the rank that failed first is not known" not in failure["reason"]
    page = (run.run_dir / "blame-1.txt").read_text()
    assert ecc_error in page
    assert "nvidia-smi -q -d ECC" in page
    (first, second) = warnings()
    assert first[0] == 0
    assert first[1].startswith(memory_fault)
    assert second[0] == 1
    assert second[1].startswith(ecc_error)


def test_memory_errors_that_only_nvml_knows_are_named_with_the_hang(
    four: FakeGpus, tmp_path: Path
) -> None:
    run = program(
        tmp_path, f"job={JOBS}:collectives", "job.args.asleep=1", "scale=1x2", "restart=none",
        "hang.after_s=2", "hang.limit_s=30",
    )  # fmt: skip
    run.wait_for_step(19, LIMIT_S)
    # on a busy machine ranks may seem to hang before rank 1 is asleep
    run.wait_until(
        lambda: any("number 20" in each["text"] for each in run.events("hang")), "hang", LIMIT_S
    )
    four.change(1, replace(four.gpus[1], state="ecc"))
    assert run.wait(LIMIT_S) == 1, run.screen
    page = (run.run_dir / "blame-1.txt").read_text()
    assert "rank 1" in page
    assert "NVML has counted 1 uncorrectable ECC error of GPU 1" in page
    assert "nvidia-smi -q -d ECC" in page


def test_ranks_of_a_job_that_imports_a_package_which_uses_cuda_are_new_processes(
    four: FakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server imports it, and forks of a process that has used CUDA have none."""
    python = python_with(
        tmp_path / "venv", "touches", "import torch; torch.zeros(1, device='cuda')"
    )
    monkeypatch.setattr(sys, "executable", python)
    (tmp_path / "early.py").write_text(
        "import torch\nimport raydist\nimport touches\n\n\ndef job(config):\n"
        "    raydist.report(step=1, sum=float(torch.ones(3, device=raydist.rank().device).sum()))\n"
    )
    run = finished(tmp_path, "job=early.py", "scale=1x2")
    assert run.result()["metrics"]["sum"] == 3
    assert any("initialised CUDA" in event["text"] for event in run.events("warning")), run.screen


def test_three_stages_whose_ends_share_weights_train(four: FakeGpus, tmp_path: Path) -> None:
    """All ranks split the group of the tied weights off the default one; else NCCL would wait for
    the stage between."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "song.txt").write_text("".join(f"{n} green bottles\n" for n in range(3000)))
    finished(
        tmp_path, "job=gpt", "parallel=pp", "scale=1x3", "train.steps=4", "data.global_batch=12",
        "model.layers=3", "model.width=32", "model.kv_heads=2", "model.hidden=64",
        "job.args.context=16", "job.args.held_out=8", "job.args.sample=4", f"data.root={text}",
        "hang.after_s=60", "restart=none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), {"fused": (True, "adamw: the default on GPUs"), "tf32": (False, "train.tf32=true"),
              "search": (False, "train.cudnn_search=true")}),
        (("optim.fused=false", "train.tf32=true", "train.cudnn_search=true"),
         {"fused": (False, "adamw: optim.fused=false"), "tf32": (True, "train.tf32=true"),
          "search": (True, "train.cudnn_search=true")}),
        (("scale.gpus=0", "train.tf32=true", "train.cudnn_search=true"),
         {"fused": (False, "adamw: it rounds"), "tf32": (False, "no GPU"),
          "search": (False, "no GPU")}),
    ],
    ids=["default", "chosen", "cpu"],
)  # fmt: skip
def test_the_ranks_have_the_levers_that_the_plan_lists(
    four: FakeGpus, tmp_path: Path, words: tuple[str, ...], wanted: dict[str, tuple[bool, str]]
) -> None:
    words = (f"job={JOBS}:levers", *ADAMW, "group=inline", *words)
    planned = Program(tmp_path, *words, module="raydist.tools.plan")
    assert planned.wait(LIMIT_S) == 0, planned.screen
    names = {"fused": "fused optimizer", "tf32": "TF32", "search": "cuDNN search"}
    for name, (on, why) in wanted.items():
        (line,) = (each for each in planned.screen.splitlines() if f"  {names[name]} " in each)
        assert line.split(names[name])[1].split()[0] == ("on" if on else "off")
        assert why in line
    run = Program(tmp_path, *words, "watch.progress=none")
    assert run.wait(LIMIT_S) == 0, run.screen
    metrics = run.result()["metrics"]
    assert {name: metrics[name] for name in wanted} == {
        name: on for name, (on, _) in wanted.items()
    }


def test_adams_step_is_that_of_each_rank_after_a_restart_from_memory(
    four: FakeGpus, tmp_path: Path
) -> None:
    """torch leaves it on the host, unless the optimizer is fused, and the state of a snapshot is
    memory that ranks share: they would count it up together, and their weights drift apart.

    Snapshots cost a hundred steps each here. Their cost on the GPU is known after four of them, so
    there is no fifth.
    """
    words = (f"job={JOBS}:replicas", *ADAMW, "optim.fused=false")
    (whole, broken) = (tmp_path / "whole", tmp_path / "broken")
    whole.mkdir()
    broken.mkdir()
    weights = finished(whole, *words).result()["metrics"]["weights"]
    four.ask("slow-copies")
    run = finished(broken, *words, "job.args.struck=7")
    (back,) = run.events("restarted")
    assert (back["step"], back["repeated"]) == (5, 3)
    assert run.result()["metrics"]["weights"] == weights


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_states_copied_alongside_the_next_step_are_those_of_their_step(
    parallel: str, four: FakeGpus, tmp_path: Path
) -> None:
    """Those of steps 4 and 6 are still copied in the forward pass of the next step. That of step 2
    is not: a rank whose only state it is relies on it."""
    words = (f"job={JOBS}:replicas", *ADAMW, "snapshot.every=2", f"parallel={parallel}")
    (whole, broken) = (tmp_path / "whole", tmp_path / "broken")
    whole.mkdir()
    broken.mkdir()
    weights = finished(whole, *words).result()["metrics"]["weights"]
    four.ask("slow-copies")
    run = finished(broken, *words, "job.args.struck=8", "job.args.alongside=[4,6]")
    (back,) = run.events("restarted")
    assert back["step"] in (7, 9)
    assert run.result()["metrics"]["weights"] == weights


def test_a_fault_happens_though_its_step_was_reported_together_with_later_ones(
    four: FakeGpus, tmp_path: Path
) -> None:
    run = finished(
        tmp_path, f"job={JOBS}:reported_late", f"job.args.folder={tmp_path}", "scale=1x2",
        "train.steps=30", "data.batch_size=4", "snapshot.every=1",
    )  # fmt: skip
    assert len(run.events("restarted")) == 2


def test_the_bench_reads_its_clock_when_the_gpu_has_done_a_block(
    four: FakeGpus, tmp_path: Path
) -> None:
    four.ask("slow-copies")
    run = finished(tmp_path, f"job={JOBS}:blocks", "scale=1x1")
    assert run.result()["metrics"]["done"]


def test_a_rank_holds_its_part_of_the_gradients_between_passes(
    four: FakeGpus, tmp_path: Path
) -> None:
    run = finished(
        tmp_path, f"job={JOBS}:accumulated", "scale=1x4", "parallel=fsdp", "train.accumulate=4",
        "train.steps=2", "data.batch_size=2",
    )  # fmt: skip
    assert run.result()["metrics"]["held"] == pytest.approx(1 / 4, rel=0.05)


def test_a_model_in_shards_goes_on_without_states_of_some_parameters(
    four: FakeGpus, tmp_path: Path
) -> None:
    """SGD without momentum has none, Adam none of a parameter that gets no gradient."""
    run = finished(
        tmp_path, f"job={JOBS}:without_states", "job.args.struck=4", "scale=1x2", "parallel=fsdp",
        "train.steps=6", "data.batch_size=4", "snapshot.every=1",
    )  # fmt: skip
    assert [back["repeated"] < 3 for back in run.events("restarted")] == [True, True]


def test_ranks_have_mig_instances_of_one_gpu_which_nccl_takes(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process one instance only; NCCL refuses two ranks on a GPU unless it is told."""
    made = machine(1, Gpu(mig=2))
    instances = [made.uuid(0, each) for each in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(instances))
    words = (f"job={JOBS}:own_gpus", "group=inline", "scale=1x2", "watch.progress=none")
    run = Program(tmp_path, *words)
    assert run.wait(LIMIT_S) == 0, run.screen
    assert run.events("plan")[0]["backend"] == "nccl"
    assert run.result()["metrics"]["gpus"] == 2
