"""Horovod through the whole of raydist: without Ray, on Ray; how it ends, and what it leaves
behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.shared.errors import ConfigError, RunFailed
from tests.horovod_ranks import requires_horovod
from tests.programs import Program
from tests.records import read_events

pytestmark = requires_horovod
WORDS = ("backend=horovod", "group=inline", "watch.progress=none")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_up() -> tuple[int, int, float]:
    import horovod.torch as hvd
    import torch

    return hvd.rank(), hvd.size(), float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()), op=hvd.Sum))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_function_finds_horovod_joined(ranks: int) -> None:
    total = ranks * (ranks + 1) / 2
    done = raydist.run(add_up, *WORDS, f"scale=1x{ranks}")
    assert done.values == tuple((rank, ranks, total) for rank in range(ranks))


def test_ranks_can_be_spawned_too() -> None:
    assert raydist.run(add_up, *WORDS, "scale=1x2", "start=spawn").values == (
        (0, 2, 3.0),
        (1, 2, 3.0),
    )


def test_the_rendezvous_is_on_the_training_address_alone_and_its_secret_in_no_file(
    own_folder: Path,
) -> None:
    def look() -> tuple[str, list[Any]]:
        import psutil

        door = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        listening = [
            c.laddr
            for c in psutil.net_connections()
            if c.status == "LISTEN" and c.laddr.port == port
        ]
        return door, [tuple(where) for where in listening]

    (one, other) = raydist.run(look, *WORDS, "scale=1x2").values
    assert one is not None
    door, listening = one
    assert one == other
    address, _, secret = door.partition("/")
    assert listening == [("127.0.0.1", int(address.partition(":")[2]))]
    written = [
        path
        for path in own_folder.rglob("*")
        if path.is_file() and secret in path.read_text(errors="replace")
    ]
    assert len(secret) >= 32
    assert [path for path in written if not path.name.endswith(".value")] == []


def test_a_killed_rank_is_the_culprit_and_the_others_are_its_victims() -> None:
    def die() -> None:
        import horovod.torch as hvd
        import torch

        for step in range(1000):
            if hvd.rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(10), name="step")
            raydist.report(step=step, loss=1.0)

    with pytest.raises(RunFailed) as failed:
        raydist.run(die, *WORDS, "scale=1x3")
    cause = failed.value.result.cause
    assert (cause.rank, cause.how, cause.signal) == (1, "killed", signal.SIGKILL)
    assert "rank 1" in str(failed.value).splitlines()[0]


def test_a_rank_that_raises_is_told_with_its_own_words() -> None:
    def fail() -> None:
        import horovod.torch as hvd
        import torch

        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 2:
            raise ValueError("the third bolt is loose")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(RunFailed, match="the third bolt is loose") as failed:
        raydist.run(fail, *WORDS, "scale=1x3")
    assert failed.value.result.cause.rank == 2
    assert isinstance(failed.value.exceptions[2], ValueError)


def test_a_stall_ends_the_run_and_the_log_names_who_was_missing() -> None:
    def stall() -> None:
        import horovod.torch as hvd
        import torch

        if hvd.rank() == 1:
            time.sleep(60)
        hvd.allreduce(torch.ones(1), name="everybody")

    short = ("backend.horovod.stall_warn_s=1", "backend.horovod.stall_fail_s=2")
    with pytest.raises(RunFailed) as failed:
        raydist.run(stall, *WORDS, "scale=1x3", *short)
    assert failed.value.result.cause.type == "HorovodInternalError"
    assert "still running, perhaps waited for: rank 1" in str(failed.value)
    log = (failed.value.result.dir / "logs" / "rank-0.log").read_text()
    assert "Missing ranks" in log
    assert "1!: [allreduce.everybody]" in log


def test_process_sets_out_of_range_are_refused_before_a_rank_is_there(own_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[0, 2\] has rank 2.* 0 to 1"):
        raydist.run(add_up, *WORDS, "scale=1x2", "backend.horovod.process_sets=[[0,2]]")
    (stream,) = own_folder.glob("runs/*/*/events.jsonl")
    assert not [happened for happened in read_events(stream) if happened["kind"] == "began"]


def test_init_methods_of_torch_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="init_method=tcp: Horovod has its own rendezvous; set init_method=env"
    ):
        raydist.run(add_up, *WORDS, "init_method=tcp")


@pytest.mark.ray
@pytest.mark.timeout(600)  # 12 epochs on a busy machine
def test_digits_are_learned_and_nothing_is_left(ray_address: str, own_folder: Path) -> None:
    """That the curve is that of ddp is shown by tests/scenarios/test_horovod.py."""
    program = Program(own_folder, "backend=horovod", "watch.progress=none", address=ray_address)
    assert program.wait(500) == 0, program.screen
    assert program.result()["metrics"]["accuracy"] >= 0.97
    assert program.leftovers() == []


@pytest.mark.ray
def test_a_killed_rank_of_a_job_on_ray_ends_it_all(ray_address: str, own_folder: Path) -> None:
    words = (
        "backend=horovod",
        "scale=1x3",
        "train.epochs=100000",
        "data.global_batch=96",
        "watch.progress=none",
    )
    program = Program(own_folder, *words, "restart=none", address=ray_address)
    program.wait_for_step(5)
    pid = next(e["pid"] for e in program.events("began") if e["rank"] == 2)
    os.kill(pid, signal.SIGKILL)
    assert program.wait() == 1, program.screen
    assert program.result()["cause"]["rank"] == 2
    assert "killed by SIGKILL" in program.screen
    assert program.leftovers() == []
