"""The command line: what a person types, what is then on the screen, in the folder, and the exit code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

import raydist
from raydist import train
from raydist.config import Job
from raydist.errors import ConfigError, LaunchError, RunFailed, Stopped
from raydist.words import manual
from raydist.words.translate import SETTINGS

ROOT = Path(raydist.__file__).parents[1]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a job and files in conf/ that are wrong in one way each."""
    for name in ("RAYDIST_RUNS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    optim = tmp_path / "conf" / "optim"
    optim.mkdir(parents=True)
    (optim / "broken.yaml").write_text("name: [sgd\nlr: 1\n")
    (optim / "unknown.yaml").write_text("nam: sgd\n")
    (optim / "listed.yaml").write_text("- sgd\n")
    (optim / "text.yaml").write_text("sgd\n")
    (optim / "binary.yaml").write_bytes(b"name: \xff\xfe\n")
    (optim / "nested.yaml").write_text("defaults: [missing]\n")
    (optim / "mistyped.yaml").write_text("lr: abc\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.py").write_text("def job(config, hidden=3): ...\n")
    return tmp_path


@dataclass
class Ran:
    """Stands where raydist.run would: notes the jobs, does what it is told."""

    jobs: list[Job] = field(default_factory=list)
    does: Callable[[Job], Any] = lambda job: None

    def __call__(self, job: Job, call: object = None) -> None:
        self.jobs.append(job)
        self.does(job)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    ran = Ran()
    module = ModuleType("raydist.run")
    module.run_job = ran  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "raydist.run", module)
    return ran


REFUSED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "unknown key": (["optm.lr=0.1"], ["optm.lr", "did you mean optim.lr=0.1?"]),
    "key one level off": (["lr=0.1"], ["lr=0.1", "did you mean optim.lr=0.1?"]),
    "key of another part": (["optim.epochs=3"], ["optim.epochs", "did you mean train.epochs=3?"]),
    "misspelt key": (["optim.lrr=1"], ["optim.lrr", "did you mean optim.lr=1?"]),
    "text for a whole number": (["train.epochs=abc"], ["train.epochs=abc", "whole number", "say train.epochs=10"]),
    "half a whole number": (["train.epochs=1.5"], ["train.epochs=1.5", "whole number"]),
    "text for a number": (["optim.lr=fast"], ["optim.lr=fast", "a number", "say optim.lr=0.05"]),
    "no truth value": (["data.shuffle=maybe"], ["data.shuffle=maybe", "say data.shuffle=true"]),
    "null where a number is needed": (["optim.lr=null"], ["optim.lr=null", "a number", "say optim.lr=0.05"]),
    "a dictionary for a number": (["optim.lr={a:1}"], ["optim.lr={a:1}", "a number"]),
    "a number for a dictionary": (["env=5"], ["env=5", "say env.NAME=VALUE"]),
    "a number for a part": (["train=3"], ["train=3", "train.epochs"]),
    "unknown word": (["train.precision=fp8"], ["train.precision=fp8", "train.precision=fp32", "bf16"]),
    "unknown word of Ray's": (["scale.placement=PACKED"], ["PACKED", "did you mean scale.placement=PACK?"]),
    "wrong optimizer": (["optim.name=adm"], ["optim.name=adm", "did you mean optim.name=adam?"]),
    "wrong init_method": (["init_method=tpc"], ["init_method=tpc", "did you mean init_method=tcp?"]),
    "unknown choice": (["backend=ncl"], ["backend=ncl", "did you mean backend=nccl?"]),
    "a number as choice": (["backend=1"], ["backend=1", "gloo"]),
    "no choice": (["backend="], ["backend=", "gloo"]),
    "null as choice": (["backend=null"], ["backend=null", "nccl"]),
    "two choices at once": (["job=[digits,mnist]"], ["job=[digits,mnist]", "say job=CHOICE"]),
    "a choice without its group": (["nccl"], ["nccl", "say backend=nccl"]),
    "a size without its group": (["2x8"], ["2x8", "say scale=2x8"]),
    "a file without its group": (["jobs/mine.py"], ["jobs/mine.py", "say job=jobs/mine.py"]),
    "a key without a value": (["optim.lr"], ["optim.lr", "say optim.lr=VALUE"]),
    "a value without a key": (["=3"], ["=3", "key=value"]),
    "unknown model": (["model=resnet81"], ["model=resnet81", "did you mean model=resnet18?"]),
    "broken yaml": (["optim=broken"], ["conf/optim/broken.yaml, line 2"]),
    "unknown key in a file": (["optim=unknown"], ["conf/optim/unknown.yaml", "did you mean optim.name?"]),
    "wrong type in a file": (["optim=mistyped"], ["conf/optim/mistyped.yaml", "'abc'"]),
    "negative rate": (["optim.lr=-1"], ["optim.lr=-1", "say optim.lr=0.05"]),
    "no batch": (["data.batch_size=0"], ["data.batch_size=0", "say data.batch_size=1"]),
    "negative seed": (["seed=-1"], ["seed=-1", "say seed=0"]),
    "negative GPUs": (["scale.gpus=-1"], ["scale.gpus=-1", "say scale.gpus=0"]),
    "batch that can't be split": (
        ["data.global_batch=10", "train.accumulate=4"],
        ["data.global_batch=10", "say data.global_batch=8"],
    ),
    "job file missing": (["job=nope.py"], ["job=nope.py", "there is no file"]),
    "job file misspelt": (["job=jobs/mien.py"], ["jobs/mien.py", "did you mean job=jobs/mine.py?"]),
    "job misspelt": (["job=digit"], ["job=digit", "did you mean job=digits?"]),
    "function missing": (["job=jobs/mine.py:jbo"], ["jbo", "did you mean job=jobs/mine.py:job?"]),
    "module missing": (["job=jsn.tool:main"], ["jsn", "did you mean job=json.tool:main?"]),
    "wrong argument": (["job=mine", "job.args.hiden=1"], ["job.args.hiden", "did you mean job.args.hidden?"]),
    "no nodes": (["scale=0x2"], ["scale=0x2", "say scale=1x2"]),
    "half a size": (["scale=2x"], ["scale=2x", "did you mean scale=1x2?"]),
    "no size": (["scale=axb"], ["scale=axb", "scale=2x8"]),
    "ranks alone": (["scale=4"], ["scale=4", "did you mean scale=1x4?"]),
    "capital size": (["scale=2X8"], ["scale=2X8", "did you mean scale=2x8?"]),
    "group chosen twice": (["scale=2x8", "scale=1x2"], ["scale=2x8 scale=1x2", "say it once"]),
    "list without --multirun": (["optim.lr=0.1,0.2"], ["optim.lr=0.1,0.2", "add --multirun"]),
    "open bracket": (["optim.lr=[1"], ["optim.lr=[1", "optim.lr='[1'"]),
    "two equal signs": (["name=a=b"], ["name=a=b", "name='a=b'"]),
    "a plus too many": (["+optim.lr=1"], ["+optim.lr=1", "say optim.lr=1 (without the +)"]),
    "a plus before a group": (["+backend=gloo"], ["+backend=gloo", "say backend=gloo"]),
    "a plus before nonsense": (["+optm.lr=1"], ["+optm.lr=1", "did you mean optim.lr=1?"]),
    "taking a setting away": (["~optim.lr"], ["~optim.lr", "say optim.lr=VALUE"]),
    "taking another choice away": (["~backend=nccl"], ["backend=nccl"]),
    "missing interpolation": (["name=${nme}"], ["name:", "nme", "did you mean ${name}?"]),
    "missing variable": (["name=${oc.env:NO_SUCH}"], ["name:", "NO_SUCH"]),
    "missing interpolation in the folder": (["hydra.run.dir=${nope}"], ["hydra.run.dir", "nope"]),
    "wrong key of Hydra's": (["hydra.run.dirr=x"], ["hydra.run.dirr"]),
    "unknown launcher": (["hydra/launcher=joblib"], ["hydra/launcher=joblib", "basic"]),
    "the folder by the wrong key": (["dir=x"], ["dir=x", "say hydra.run.dir=x"]),
    "best without max or min": (["checkpoint.best=accuracy"], ["checkpoint.best=accuracy", "max:accuracy"]),
    "nothing to go on from": (["resume=/nope/x"], ["resume=/nope/x", "resume=auto"]),
    "unknown flag": (["--multrun"], ["--multrun", "did you mean --multirun?"]),
    "unknown short flag": (["-z"], ["-z", "--help"]),
    "wrong word after --cfg": (["--cfg", "jobb"], ["--cfg jobb", "did you mean --cfg job?"]),
    "wrong word after --info": (["--info", "serchpath"], ["serchpath", "did you mean --info searchpath?"]),
    "two flags": (["--multirun", "--cfg", "job"], ["--multirun --cfg", "only one"]),
    "--resolve alone": (["--resolve"], ["--resolve", "--cfg job --resolve"]),
    "no such config": (["--config-name", "nope"], ["--config-name nope"]),
    "no such folder": (["--config-dir", "cnf"], ["--config-dir cnf", "did you mean conf?"]),
    "one of many runs": (["--multirun", "optim.lr=0.1,abc"], ["optim.lr=abc", "a number"]),
    "ranks alone, many": (["--multirun", "scale=1x1,2"], ["scale=2", "did you mean scale=1x2?"]),
    "a folder below a file": (["hydra.run.dir=jobs/mine.py/x"], ["jobs/mine.py/x", "Not a directory"]),
    "a file for a folder": (["hydra.run.dir=jobs/mine.py"], ["jobs/mine.py", "that is a file"]),
    "a list as a file": (["optim=listed"], ["optim"]),
    "text as a file": (["optim=text"], ["optim"]),
    "not even text": (["optim=binary"], ["conf/", "utf-8"]),
    "a default that is not there": (["optim=nested"], ["conf/optim/nested.yaml", "optim/missing"]),
    "one of many sizes": (["--multirun", "scale=1x1,0x1"], ["scale=0x1", "say scale=1x1"]),
    "wrong word shown": (["--cfg", "job", "lr=1"], ["lr=1", "did you mean optim.lr=1?"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    typed, parts = REFUSED[kind]
    before = sorted(here.rglob("*"))
    assert train.main(typed) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ")
    assert all(part in shown.err for part in parts), shown.err
    assert "Traceback" not in shown.err
    assert "hydra.cc" not in shown.err
    assert shown.out == ""
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
    assert capfd.readouterr() == ("", "")


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
    assert capfd.readouterr().err == ""


def test_multirun_over_jobs_stays_in_one_folder(here: Path, ran: Ran) -> None:
    assert train.main(["-m", "job=digits,mine,jobs/mine.py:job"]) == 0
    assert [job.name for job in ran.jobs] == ["digits", "mine", "mine"]
    assert len({Path(job.dir).parent for job in ran.jobs}) == 1


def ends(error: BaseException) -> Callable[[Job], None]:
    def end(job: Job) -> None:
        raise error

    return end


@pytest.mark.parametrize(
    ("error", "code", "shown"),
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
    error: BaseException, code: int, shown: str, here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]
) -> None:
    ran.does = ends(error)
    assert train.main([]) == code
    assert capfd.readouterr().err == shown


def test_a_fault_of_raydist_keeps_its_traceback(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    ran.does = ends(ZeroDivisionError("oh"))
    assert train.main([]) == 1
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert "ZeroDivisionError: oh" in shown


@pytest.mark.parametrize(
    ("error", "code"), [(RunFailed("died", result=None, exceptions={}), 1), (ValueError("oh"), 1), (Stopped(15), 143)]
)
def test_a_failed_run_ends_the_sweep(error: BaseException, code: int, here: Path, ran: Ran) -> None:
    ran.does = ends(error)
    assert train.main(["--multirun", "seed=1,2,3"]) == code
    assert [job.seed for job in ran.jobs] == [1]


def test_help_tells_all(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in SETTINGS)
    assert all(manual.doc(name) for name in SETTINGS)
    flat = " ".join(shown.split())
    assert "(float = 0.05) Learning rate at batch `scaling_batch`" in flat
    assert "train.precision (fp32|bf16|fp16 = fp32)" in flat
    assert "backend= auto, gloo" in flat
    assert "mine, own_loop" in flat or "any file in ./jobs" in flat
    assert "--multirun, -m" in flat


def test_cfg_shows_and_starts_nothing(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--cfg", "job", "scale=2x8", "env.HF_TOKEN=s3cret"]) == 0
    shown = capfd.readouterr().out
    config = OmegaConf.create(shown)
    assert (config.scale.nodes, config.scale.per_node, config.name) == (2, 8, "digits")
    assert "s3cret" not in shown
    assert train.main(["--cfg", "job", "--package", "optim", "optim=adam"]) == 0
    assert "name: adam" in capfd.readouterr().out
    assert ran.jobs == []
    assert not (here / "runs").exists()


def test_info_tells_where_settings_come_from(here: Path, ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    with quiet_logging():
        assert train.main(["--info", "searchpath"]) == 0
    shown = capfd.readouterr().out
    assert shown.index(str(here / "conf")) < shown.index("raydist://")


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
    line: str, offered: list[str], here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    shown = capfd.readouterr().out
    assert "raydist" in shown.rstrip().splitlines()[-1]
    assert "train.py" not in shown


def python(*typed: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m raydist.train`, as a person would."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "raydist.train", *typed], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", ["key one level off", "broken yaml", "job file misspelt", "unknown flag"])
def test_refused_as_a_program(kind: str, here: Path) -> None:
    typed, parts = REFUSED[kind]
    done = python(*typed, cwd=here)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert all(part in done.stderr for part in parts)
    assert len(done.stderr.splitlines()) == 1
    assert not (here / "runs").exists()


def test_help_needs_neither_ray_nor_torch(here: Path) -> None:
    code = "import sys; from raydist.train import main; main(['--help']); print('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not {"ray", "torch"} & {*done.stdout.rpartition("LOADED")[2].split()}


def test_help_into_a_pipe_that_closes(here: Path) -> None:
    command = f"{sys.executable} -m raydist.train --help | head -1"
    done = subprocess.run(
        command, shell=True, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.startswith("raydist runs")
    assert done.stderr == ""


def test_conf_and_jobs_travel_inside_the_wheel(here: Path) -> None:
    site = here / "site"
    shutil.copytree(ROOT / "raydist", site / "raydist", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("conf", "jobs"):
        assert f'"{folder}" = "raydist/{folder}"' in (ROOT / "pyproject.toml").read_text()
        shutil.copytree(ROOT / folder, site / "raydist" / folder)
    code = "import sys; from raydist.train import main; sys.exit(main(['--cfg', 'job', 'scale=cluster']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"target: {site}/raydist/jobs/digits.py:job" in done.stdout


def test_the_command_is_the_module() -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    assert 'raydist = "raydist.train:main"' in scripts
    assert python("--version", cwd=ROOT).stdout == f"raydist {raydist.__version__}\n"
