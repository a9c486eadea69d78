"""The command line: what a person types, what is then on the screen, in the folder, and the exit
code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

import raydist
from raydist import train
from raydist.settings import help
from raydist.settings.config import Job
from raydist.settings.overrides import SETTINGS
from raydist.shared.errors import ConfigError, LaunchError, RunFailed, Stopped
from tests.settings.test_refusals import REFUSED, write_wrong_files

ROOT = Path(raydist.__file__).parents[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a job and files in conf/ that are wrong in one way each."""
    for name in ("RAYDIST_RUNS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_wrong_files(tmp_path)
    return tmp_path


@dataclass
class Ran:
    """Stands where raydist.run would: notes the jobs, does what it is told."""

    jobs: list[Job] = field(default_factory=list)
    does: Callable[[Job], Any] = lambda job: None

    def __call__(self, job: Job, call: object = None, many: object = None) -> None:
        self.jobs.append(job)
        self.does(job)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()
    module = ModuleType("raydist.flow")
    module.run_job = ran  # type: ignore[attr-defined]
    from raydist.cluster import connect
    from raydist.sweeps import conduct, room

    monkeypatch.setitem(sys.modules, "raydist.flow", module)
    monkeypatch.setattr(conduct, "run_job", ran)
    monkeypatch.setattr(connect, "connect", lambda job, events: contextlib.nullcontext())
    monkeypatch.setattr(room, "check_can_ever_fit", lambda job: None)
    monkeypatch.setattr(room, "find_room", lambda job, gangs, alone: job if alone else None)
    return ran


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    overrides, _, _, suggestion = REFUSED[kind]
    before = sorted(here.rglob("*"))
    assert train.main(overrides) == 2
    output = capfd.readouterr()
    warned = kind in ("password in a URL", "no URL")
    assert [line.partition(":")[0] for line in output.err.splitlines()][: 1 + warned] == [
        "warning"
    ] * warned + ["error"]
    assert suggestion in output.err
    assert "Traceback" not in output.err
    assert "hydra.cc" not in output.err
    assert output.out == ""
    assert ran.jobs == []
    assert sorted(here.rglob("*")) == before


def test_a_run(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(["scale=1x3", "env.HF_TOKEN=s3cret", "model.width=7"]) == 0
    [job] = ran.jobs
    assert (job.scale.per_node, job.env, job.model["width"]) == (3, {"HF_TOKEN": "s3cret"}, 7)
    folder = Path(job.dir)
    assert folder.parent == here / "runs" / "digits"
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert (saved.scale.per_node, saved.job.target, saved.dir) == (3, job.job.target, job.dir)
    overrides = (folder / ".hydra" / "overrides.yaml").read_text()
    assert "scale=1x3" in overrides
    assert "HF_TOKEN" in overrides
    assert all("s3cret" not in file.read_text() for file in (folder / ".hydra").iterdir())
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("warning: env.HF_TOKEN: ")
    assert err.count("\n") == 1


def test_two_runs_at_once_have_two_folders(here: Path, ran: Ran) -> None:
    train.main([])
    train.main([])
    assert len({job.dir for job in ran.jobs}) == 2


def test_flags_may_stand_between_words(here: Path, ran: Ran) -> None:
    assert train.main(["optim.lr=1", "--multirun", "scale=1x1,1x2"]) == 0
    assert [(job.optim.lr, job.scale.per_node) for job in ran.jobs] == [(1.0, 1), (1.0, 2)]


def test_multirun(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--multirun", "scale=1x1,1x2", "model.width=5,6", "env.API_KEY=s3cret", "name=sweep"]
    assert train.main(words) == 0
    combinations = [(job.scale.per_node, job.model["width"]) for job in ran.jobs]
    assert combinations == [(1, 5), (1, 6), (2, 5), (2, 6)]
    assert all(job.env == {"API_KEY": "s3cret"} for job in ran.jobs)
    [sweep] = (here / "runs" / "sweep").iterdir()
    assert [Path(job.dir) for job in ran.jobs] == [sweep / str(number) for number in range(4)]
    assert (sweep / "multirun.yaml").is_file()
    assert all("s3cret" not in file.read_text() for file in (here / "runs").rglob("*.yaml"))
    assert OmegaConf.load(sweep / "1" / ".hydra" / "config.yaml").model.width == 6
    assert capfd.readouterr().err.count("\n") == 1  # the warning of a typed secret, once for all


def test_multirun_over_jobs_stays_in_one_folder(here: Path, ran: Ran) -> None:
    assert train.main(["-m", "job=digits,mine,jobs/mine.py:job"]) == 0
    assert [job.name for job in ran.jobs] == ["digits", "mine", "mine"]
    assert len({Path(job.dir).parent for job in ran.jobs}) == 1


def ends(error: BaseException) -> Callable[[Job], None]:
    def end(job: Job) -> None:
        raise error

    return end


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (ConfigError("no GPU here"), 2, "error: no GPU here\n"),
        (LaunchError("no cluster"), 1, "error: no cluster\n"),
        (RunFailed("rank 1 died", result=None, exceptions={}), 1, ""),
        (Stopped(signal.SIGTERM), 143, ""),
        (Stopped(signal.SIGINT), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(7), 7, ""),
        (SystemExit("enough"), 1, "enough\n"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    output: str,
    here: Path,
    ran: Ran,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ran.does = ends(error)
    assert train.main([]) == code
    assert capfd.readouterr().err == output


def test_a_fault_of_raydist_keeps_its_traceback(
    here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    ran.does = ends(ZeroDivisionError("oh"))
    assert train.main([]) == 1
    output = capfd.readouterr().err
    assert "Traceback" in output
    assert "ZeroDivisionError: oh" in output


@pytest.mark.parametrize(
    ("error", "code"),
    [(RunFailed("died", result=None, exceptions={}), 1), (ValueError("oh"), 1), (Stopped(15), 143)],
)
def test_a_failed_run_ends_the_sweep(error: BaseException, code: int, here: Path, ran: Ran) -> None:
    ran.does = ends(error)
    assert train.main(["--multirun", "seed=1,2,3"]) == code
    assert [job.seed for job in ran.jobs] == [1]


def test_a_sweep_of_which_no_run_has_finished_has_failed(here: Path, ran: Ran) -> None:
    ran.does = ends(RunFailed("died", result=None, exceptions={}))
    assert train.main(["--multirun", "sweep.on_failure=skip", "seed=1,2,3"]) == 1
    assert [job.seed for job in ran.jobs] == [1, 2, 3]


def test_help_tells_all(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    output = capfd.readouterr().out
    assert all(name in output for name in SETTINGS)
    assert all(help.texts()[name] for name in SETTINGS)
    flat = " ".join(output.split())
    assert "(float = 0.05) Learning rate for a global batch of `scaling_batch`" in flat
    assert "train.precision (fp32|bf16|fp16 = fp32)" in flat
    assert "backend= auto, gloo" in flat
    assert "mine, own_loop" in flat or "any file in ./jobs" in flat
    assert "--multirun, -m" in flat


def test_cfg_shows_and_starts_nothing(
    here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--cfg", "job", "scale=2x8", "env.HF_TOKEN=s3cret"]) == 0
    output = capfd.readouterr().out
    config = OmegaConf.create(output)
    assert (config.scale.nodes, config.scale.per_node, config.name) == (2, 8, "digits")
    assert "s3cret" not in output
    assert train.main(["--cfg", "job", "--package", "optim", "optim=adam"]) == 0
    assert "name: adam" in capfd.readouterr().out
    assert ran.jobs == []
    assert not (here / "runs").exists()


def test_info_tells_where_settings_come_from(
    here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    with quiet_logging():
        assert train.main(["--info", "searchpath"]) == 0
    output = capfd.readouterr().out
    assert output.index(str(here / "conf")) < output.index("raydist://")


@contextlib.contextmanager
def quiet_logging() -> Any:
    """--info sets the root logger up; tests after it want it back."""
    import logging

    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("raydist scale=", ["scale=cluster", "scale=local"]),
        ("raydist model=resnet1", ["model=resnet101", "model=resnet152", "model=resnet18"]),
        ("raydist job=mi", ["job=mine"]),
        ("raydist scale=2x8 optim.l", ["optim.lr="]),
    ],
)
def test_completion(
    line: str,
    offered: list[str],
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["raydist"])
    assert train.main(["-sc", "query=bash"]) == 0
    assert capfd.readouterr().out.split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_the_command(
    shell: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/raydist/train.py"])
    assert train.main(["-sc", f"install={shell}"]) == 0
    output = capfd.readouterr().out
    assert "raydist" in output.rstrip().splitlines()[-1]
    assert "train.py" not in output


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m raydist.train`, as a person would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "raydist.train", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "kind", ["key one level off", "broken yaml", "job file misspelt", "unknown flag"]
)
def test_refused_as_a_program(kind: str, here: Path) -> None:
    overrides, _, _, suggestion = REFUSED[kind]
    done = python(*overrides, cwd=here)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert suggestion in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (here / "runs").exists()


def test_help_needs_neither_ray_nor_torch(here: Path) -> None:
    code = (
        "import sys; from raydist.train import main; main(['--help']); print('LOADED', "
        "*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {"ray", "torch"} & {*done.stdout.rpartition("LOADED")[2].split()}


def test_a_division_that_does_not_fit_is_refused_without_ray_and_torch(here: Path) -> None:
    words = (
        ["parallel.shard=3"],
        ["parallel=fsdp", "backend=horovod"],
        ["parallel=fsdp", "data.global_batch=10"],
    )
    code = (
        "import sys; from raydist.train import main; print([main(words) for words in %r], "
        "*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code % [["job=gpt", "scale=1x4", *each] for each in words]], cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("[2, 2, 2] "), done.stdout
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        "parallel.shard=3", "parallel=fsdp", "data.global_batch=10"
    ]  # fmt: skip
    assert not {"ray", "torch"} & {*done.stdout.split()}


def test_help_into_a_pipe_that_closes(here: Path) -> None:
    command = f"{sys.executable} -m raydist.train --help | head -1"
    done = subprocess.run(
        command,
        shell=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("raydist runs")
    assert done.stderr == ""


def test_conf_and_jobs_travel_inside_the_wheel(here: Path) -> None:
    site = here / "site"
    shutil.copytree(
        ROOT / "raydist", site / "raydist", ignore=shutil.ignore_patterns("__pycache__")
    )
    for folder in ("conf", "jobs"):
        assert f'"{folder}" = "raydist/{folder}"' in (ROOT / "pyproject.toml").read_text()
        shutil.copytree(ROOT / folder, site / "raydist" / folder)
    code = (
        "import sys; from raydist.train import main; sys.exit(main(['--cfg', 'job', "
        "'scale=cluster']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"target: {site}/raydist/jobs/digits.py:job" in done.stdout


def test_the_version() -> None:
    assert python("--version", cwd=ROOT).stdout == f"raydist {raydist.__version__}\n"
