"""`python -m raydist.train` as a person runs it: the main job, their own file, signals, and nothing
left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.leftovers import alive, processes_of
from tests.programs import Program
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
LONG = ("train.epochs=100000", "train.evaluate_every=0", "checkpoint.every=100000")


def test_the_main_job_with_no_arguments_starts_ray_trains_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path, alone=True)
    assert program.wait() == 0, program.screen
    result = program.result()
    assert result["status"] == "finished"
    assert result["world_size"] == 2
    assert result["metrics"]["accuracy"] >= 0.97
    assert set(result["launch"]) == {
        "connect",
        "place",
        "actors",
        "warm-up",
        "rendezvous",
        "first step",
    }
    assert 0 < result["goodput"] < 1
    assert result["throughput"] > 0
    screen = program.screen
    for words in ("started here", "rank  host", "epoch 1/", "samples/s", "accuracy", "goodput"):
        assert words in screen
    assert str(program.run_dir) in screen
    assert "\x1b" not in screen  # no terminal: plain lines
    assert {path.name for path in program.run_dir.iterdir()} >= {
        ".hydra",
        "events.jsonl",
        "logs",
        "checkpoints",
        "result.json",
    }
    assert program.leftovers() == []


def assert_stopped_in_order(program: Program, number: signal.Signals) -> None:
    assert program.wait() == 128 + number
    assert program.result()["status"] == "stopped"
    assert program.result()["signal"] == number
    assert number.name in program.screen
    assert "Traceback" not in program.screen
    assert {end["how"] for end in program.events("ended")} == {"stopped"}
    assert program.leftovers() == []


def test_a_ctrl_c_ends_the_run_in_order(tmp_path: Path, ray_address: str) -> None:
    program = Program(tmp_path, *LONG, address=ray_address)
    program.wait_for_step(20)
    program.signal(signal.SIGINT)
    assert_stopped_in_order(program, signal.SIGINT)


def test_a_sigterm_for_the_whole_group_ends_the_run_in_order_too(tmp_path: Path) -> None:
    """As `timeout` sends it, and batch systems do: a Ray of the run's own must outlive it by a
    moment."""
    program = Program(tmp_path, *LONG, group=True, alone=True)
    program.wait_for_step(20)
    started = processes_of(str(program.tmp))
    assert any("gcs_server" in each for each in started)
    assert not [
        each for each in started if "monitor.py" in each or "dashboard.py" in each
    ]  # it needs none of them
    os.killpg(program.process.pid, signal.SIGTERM)
    assert_stopped_in_order(program, signal.SIGTERM)


def test_a_sigterm_before_any_rank_leaves_nothing(tmp_path: Path, ray_address: str) -> None:
    program = Program(tmp_path, *LONG, address=ray_address)
    wait_until(lambda: list(tmp_path.glob("runs/*/*/events.jsonl")), "a run folder")
    program.signal(signal.SIGTERM)
    assert program.wait() == 143
    assert program.leftovers() == []


@pytest.mark.parametrize("local", [True, False], ids=["own Ray", "cluster"])
def test_a_driver_killed_with_sigkill_leaves_no_process_behind(
    tmp_path: Path, ray_address: str, local: bool
) -> None:
    program = Program(tmp_path, *LONG, address=None if local else ray_address, alone=local)
    program.wait_for_step(20)
    pids = [happened["pid"] for happened in program.events("began")]
    program.signal(signal.SIGKILL)
    program.wait()
    wait_until(lambda: not any(map(alive, pids)), "all ranks have ended")
    if local:
        assert program.leftovers() == []


def test_what_a_killed_driver_had_not_heard_is_recalled_from_the_checkpoint(
    tmp_path: Path, ray_address: str
) -> None:
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        import time
        from pathlib import Path
        import raydist

        def job(folder):
            if raydist.checkpoint.latest() is not None:
                return
            raydist.report(step=1, loss=2.0)
            while not Path(folder, "stopped").exists():
                time.sleep(0.05)
            raydist.report(step=2, loss=1.0)
            raydist.checkpoint.save(2, {})
            time.sleep(100)
        """)
    )
    words = ("job=mine.py", "scale=1x1", f"job.args.folder={tmp_path}")
    first = Program(tmp_path, *words, address=ray_address)
    first.wait_for_step(1)
    first.signal(signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    first.wait_until(
        lambda: bool(list(first.run_dir.glob("checkpoints/step-*/meta.json"))), "the checkpoint"
    )
    first.signal(signal.SIGKILL)
    first.wait()
    assert {event["step"] for event in first.events("report")} == {1}
    again = Program(
        tmp_path, *words, f"hydra.run.dir={first.run_dir}", "resume=auto", address=ray_address
    )
    assert again.wait() == 0, again.screen
    assert again.result()["metrics"] == {"loss": 1.0}


def test_a_failing_job_exits_1_and_its_page_names_the_culprit(
    tmp_path: Path, ray_address: str
) -> None:
    (tmp_path / "bad.py").write_text(
        "import raydist\ndef job():\n    raydist.report(step=7)\n    if raydist.rank().rank == 1:\n"
        "        raise KeyError('no such column')\n    import time; time.sleep(100)\n"
    )
    program = Program(tmp_path, "job=bad.py", address=ray_address)
    assert program.wait() == 1
    assert "rank 1 on" in program.screen
    assert "step 7" in program.screen
    assert "KeyError: 'no such column'" in program.screen
    assert "bad.py" in program.screen
    assert program.result()["cause"]["rank"] == 1
    assert "no such column" in (program.run_dir / "logs" / "rank-1.log").read_text()


def test_stopped_and_resumed_gives_the_same_losses_as_unbroken(
    tmp_path: Path, ray_address: str
) -> None:
    # a cosine would be another one for a run that is to stop after 30 steps
    words = (
        "watch.progress=none",
        "train.evaluate_every=0",
        "checkpoint.every=10",
        "optim.schedule=constant",
    )

    def losses(program: Program) -> dict[int, float]:
        assert program.wait() == 0, program.screen
        return {
            e["step"]: e["values"]["loss"]
            for e in program.events("report")
            if e["rank"] == 0 and "lr" in e["values"]
        }

    whole = losses(Program(tmp_path, "train.epochs=2", "name=whole", *words, address=ray_address))
    first = Program(
        tmp_path, "train.epochs=2", "train.steps=30", "name=parts", *words, address=ray_address
    )
    assert first.wait() == 0, first.screen
    before = f"resume={first.run_dir}"
    rest = Program(tmp_path, "train.epochs=2", "name=parts", before, *words, address=ray_address)
    resumed = losses(rest)
    assert min(resumed) == 31
    assert resumed == {step: loss for step, loss in whole.items() if step > 30}
    other = Program(tmp_path, "name=parts", before, "optim=rmsprop", *words, address=ray_address)
    assert other.wait() == 1, other.screen
    for text in (before, "of another optimizer", "resume=none"):
        assert text in other.screen


def test_multirun_runs_every_combination(tmp_path: Path, ray_address: str) -> None:
    program = Program(
        tmp_path,
        "--multirun",
        "scale=1x1,1x2",
        "seed=1",
        "train.steps=2",
        "watch.progress=none",
        address=ray_address,
    )
    assert program.wait() == 0, program.screen
    results = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/*/*/result.json"))
    ]
    assert [result["world_size"] for result in results] == [1, 2]


def test_the_wheel_carries_conf_jobs_and_the_page_and_runs_from_any_folder(
    tmp_path: Path, ray_address: str
) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": str(site), "RAY_ADDRESS": ray_address}
    code = (
        "import raydist, sys; print(raydist.__file__); from raydist.train import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "train.steps=2", "job=digits"],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert str(site) in ended.stdout
    assert (elsewhere / "runs" / "digits").is_dir()
    export = [sys.executable, "-m", "raydist.tools.watch", "newest", "--export", "page.html"]
    subprocess.run(export, cwd=elsewhere, env=env, check=True, capture_output=True)
    page = (
        elsewhere / "page.html"
    ).read_text()  # the page's files are in the wheel, with the licence of one
    assert "uPlot" in page
    assert "test_loss" in page
    assert (site / "raydist/watch/web/static/uPlot.LICENSE").exists()
