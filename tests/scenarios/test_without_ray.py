"""A program on one machine where no Ray runs: it needs none, and every promise is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.leftovers import alive, marked, poll_until_empty
from tests.programs import Program
from tests.rig import requires_root
from tests.terminals import Terminal

STEPS = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    import raydist

    dist.init_process_group("gloo")
    for step in range(1, 20 if "--short" in sys.argv else 400):
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            print("step", step, flush=True)
        if "--report" in sys.argv:
            raydist.report(step=step)
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if "--fail" in sys.argv and first and dist.get_rank() == 1 and step == 5:
            raise ValueError("it is broken")
        time.sleep(0.05)
    dist.destroy_process_group()
"""


FAILS_FOUR_TIMES = """
    import os

    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 4:
        raise ValueError("not yet")
"""


KILLED_THRICE = """
    import os, signal
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import raydist

    KILLS = ((1, 8), (2, 3), (2, 6))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def end(*at):
        if raydist.rank().rank == 1 and attempt < 3 and at == KILLS[attempt]:
            os.kill(os.getpid(), signal.SIGKILL)

    def two_fits(config):
        for number in (1, 2):
            data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
            raydist.fit(
                config, model=nn.Linear(4, 2), train=data, loss=nn.functional.cross_entropy,
                on_step=lambda step, _: end(number, step),
            )

    def no_report():
        for at in KILLS:
            torch.distributed.barrier()
            end(*at)
"""


SAVES = """
    import sys
    import torch
    import torch.distributed as dist
    import raydist

    dist.init_process_group("gloo")
    save = raydist.sharded.save if sys.argv[1] == "shards" else raydist.checkpoint.save
    for step in range(1, 7):
        save(step, {"x": torch.full((2,), float(step))}, {"score": 1.0 / step})
        dist.barrier()
    dist.destroy_process_group()
"""


SLOW_FIRST_STEP = """
    import time
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import raydist

    class Compiled(nn.Module):
        compiled = False

        def forward(self, x):
            if not self.compiled:
                time.sleep(1.0)
            self.compiled = True
            return x

    def job(config):
        model = nn.Sequential(nn.Linear(4, 4), Compiled(), nn.Linear(4, 2))
        data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
        return raydist.fit(config, model=model, train=data, loss=nn.functional.cross_entropy)
"""


def launch(folder: Path, *words: str, address: str | None = None) -> Program:
    (folder / "steps.py").write_text(textwrap.dedent(STEPS))
    return Program(folder, *words, address=address, module="raydist.tools.launch")


def began(program: Program) -> bool:
    return "step 10" in program.screen


def assert_nothing_left(program: Program) -> None:
    assert program.leftovers() == []


def test_no_ray_is_started(tmp_path: Path) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "--time", "steps.py", "--short")
    assert program.wait() == 0, program.screen
    (cluster,) = program.events("cluster")
    assert (cluster["address"], cluster["requested"]) == ("", "auto")
    assert "ray   none (for a program on one node; group=ray starts one)" in program.screen
    assert "[0] step 19" in program.screen
    assert not (program.tmp / "ray").exists()
    shown = re.findall(r"^time  (.*) = ([\d.]+) s$", program.screen, re.MULTILINE)
    names = re.findall(r"([a-z]+) [\d.]+", shown[0][0])
    assert names == ["python", "settings", "launch", "ranks", "records", "exit"]
    assert_nothing_left(program)


def test_a_first_step_that_compiles_is_launch_and_no_step_that_counts(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(SLOW_FIRST_STEP))
    program = Program(
        tmp_path, "job=job.py", "scale=1x1", "group=inline", "optim=adamw", "train.steps=10"
    )
    assert program.wait() == 0, program.screen
    result = program.result()
    assert result["launch"]["first step"] > 1.0
    assert sum(result["spent"].values()) == pytest.approx(result["wall_s"])
    (done,) = program.events("done")
    first, *_ = program.events("report")
    assert result["spent"]["steps"] < done["t"] - first["t"]
    assert done["samples"] == result["metrics"]["samples"] * 9 / 10


@pytest.mark.ray
def test_a_ray_that_runs_is_used(tmp_path: Path, ray_address: str) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "steps.py", "--short", address=ray_address)
    assert program.wait() == 0, program.screen
    (cluster,) = program.events("cluster")
    assert cluster["address"]
    assert "step 19" in program.screen


def test_a_failure_is_blamed_and_restarted(tmp_path: Path) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "steps.py", "--fail", "--short")
    assert program.wait() == 1
    assert "rank 1" in program.result()["failure"]
    assert "it is broken" in program.screen
    assert (program.run_dir / "blame-1.txt").exists()
    again = launch(
        tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "steps.py", "--fail", "--short"
    )
    assert again.wait() == 0, again.screen
    assert [event["number"] for event in again.events("restart")] == [1]
    assert_nothing_left(again)


def test_a_program_without_reports_fails_as_often_as_it_may(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(FAILS_FOUR_TIMES))
    words = ("--nproc-per-node", "2", "--max-restarts", "5", "train.py")
    program = Program(tmp_path, *words, module="raydist.tools.launch")
    assert program.wait() == 0, program.screen
    assert [event["number"] for event in program.events("restart")] == [1, 2, 3, 4]
    assert program.events("restarted")[-1]["number"] == 4
    assert re.search(r"restart 4: .*not yet; runs again after [\d.]+ s \(blame-4", program.screen)
    page = (program.run_dir / "blame-4.txt").read_text()
    assert re.search(r"[\d.]+ s until the program ran again\n", page)


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_a_program_keeps_as_many_checkpoints_as_were_asked_for(tmp_path: Path, kind: str) -> None:
    """It kept three, whatever checkpoint.keep was; shards could not be saved."""
    (tmp_path / "save.py").write_text(textwrap.dedent(SAVES))
    words = ("script=save.py", f"args=[{kind}]", "scale=1x2")
    program = Program(tmp_path, *words, "checkpoint.keep=4", "checkpoint.best=max:score")
    assert program.wait() == 0, program.screen
    kept = sorted(path.name for path in program.run_dir.glob("checkpoints/step-*"))
    assert kept == [f"step-{step:08d}" for step in (1, 3, 4, 5, 6)]


@pytest.mark.parametrize("function", ["two_fits", "no_report"])
def test_three_failures_end_only_a_job_that_makes_no_step(tmp_path: Path, function: str) -> None:
    """Each fit has its own steps; without reports nobody knows of any."""
    (tmp_path / "job.py").write_text(textwrap.dedent(KILLED_THRICE))
    words = (f"job=job.py:{function}", "scale=1x2", "group=inline", "snapshot.every=1")
    training = ("train.steps=10", "data.batch_size=4", "optim=sgd")
    program = Program(tmp_path, *words, *training)
    assert program.wait() == 0, program.screen
    assert [event["number"] for event in program.events("restart")] == [1, 2, 3]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "steps.py")
    program.wait_until(lambda: began(program), "step 10")
    program.signal(number)
    assert program.wait() == 128 + number
    assert program.result()["status"] == "stopped"
    assert_nothing_left(program)


def test_a_closed_terminal_ends_it_in_order(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, the shell another one, and nothing can be printed any more."""
    (tmp_path / "steps.py").write_text(textwrap.dedent(STEPS))
    words = ["-m", "raydist.tools.launch", "--nproc-per-node", "2", "steps.py"]
    with (
        tempfile.TemporaryDirectory(prefix="p-") as tmp,
        Terminal([sys.executable, *words], cwd=tmp_path, env={**os.environ, "TMPDIR": tmp}) as it,
    ):
        it.wait_for("step 10")
        it.close()
        it.process.send_signal(signal.SIGHUP)
        assert it.wait() == 128 + signal.SIGHUP
        assert poll_until_empty(lambda: [*marked(tmp).values()], 120) == []
    (path,) = tmp_path.glob("runs/*/*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["signal"]) == ("stopped", signal.SIGHUP)


def test_nothing_outlives_a_killed_driver(tmp_path: Path) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "steps.py")
    program.wait_until(lambda: began(program), "step 10")
    ranks = [event["pid"] for event in program.events("joined")]
    program.signal(signal.SIGKILL)
    program.wait()
    assert_nothing_left(program)
    assert not [pid for pid in ranks if pid and alive(pid)]


def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    program = launch(tmp_path, "--nproc-per-node", "2", "hang.after_s=1", "steps.py", "--report")
    program.wait_until(
        lambda: "step 60" in program.screen, "step 60"
    )  # its pace is known: who has none is given a minute
    (stopped,) = [event["pid"] for event in program.events("joined") if event["rank"] == 1]
    os.kill(stopped, signal.SIGSTOP)
    assert program.wait() == 1
    assert "rank 1" in program.result()["failure"]
    assert program.result()["cause"]["how"] == "hung"
    assert_nothing_left(program)


KNOWN_TO_NOBODY = [
    "unshare",
    "--user",
    "--map-user=54321",
    "--map-group=54321",
    "env",
    "-u",
    "HOME",
]
"""Runs a command under a uid that is in no password database, without HOME, as `docker run -u
54321` may."""
in_user_namespace = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*KNOWN_TO_NOBODY, "true"], capture_output=True).returncode != 0,
    reason="no unshare, or this user may make no user namespace",
)


@in_user_namespace
def test_a_uid_without_a_password_entry_and_a_home_trains(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(textwrap.dedent(STEPS))
    words = ["-m", "raydist.tools.launch", "--nproc-per-node", "2", "steps.py", "--short"]
    done = subprocess.run(
        [*KNOWN_TO_NOBODY, sys.executable, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] step 19" in done.stdout


CLEANED = """
import os
import pathlib

import raydist
import torch.distributed as dist

def job():
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    here = pathlib.Path(os.environ["RAYDIST_SCRATCH"])
    if first and dist.get_rank() == 0:
        for path in here.iterdir():
            if not path.is_socket():  # a cleaner of /tmp leaves those that somebody listens at
                path.unlink()
    dist.barrier()
    if first:
        raise RuntimeError("it is broken")
    return dist.get_rank()

done = raydist.run(job, "group=inline", "scale=1x2")
print(done.values, len(done.restarts), flush=True)
"""


def test_a_restart_needs_no_file_of_the_temporary_folder(tmp_path: Path) -> None:
    """systemd-tmpfiles removes what has been in /tmp for ten days, such as the function of a run of
    weeks."""
    code = [sys.executable, "-c", CLEANED]
    done = subprocess.run(
        code, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(0, 1) 1" in done.stdout


FULL = """
import os
import pathlib

import torch.distributed as dist

def job():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if dist.get_rank() == 0:
        with open(pathlib.Path(os.environ["TMPDIR"], "full"), "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    dist.barrier()
    raise RuntimeError("the disk is full")
"""


@pytest.mark.root
@requires_root
def test_a_full_temporary_folder_kills_nothing_at_a_restart(tmp_path: Path) -> None:
    """A page of a file that the disk has no room for raises SIGBUS: in a rank, and on a tmpfs in
    the driver."""
    (tmp_path / "full.py").write_text(FULL)
    with tempfile.TemporaryDirectory(prefix="f-") as disk:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
        try:
            program = Program(
                tmp_path, "job=full.py:job", "group=inline", "scale=1x2", tmp=Path(disk)
            )
            assert program.wait() == 0, program.screen
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
    assert len(program.result()["restarts"]) == 1
