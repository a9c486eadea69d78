"""Words -> Job, with the real conf/ and with other folders."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from raydist.settings import choices, targets
from raydist.settings import compose as composing
from raydist.settings.compose import SweepConfig, compose, fresh, make_folder, runs
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError

MINE = """
import no_such_module

def job(config, hidden: int = 3, *, lr=0.1): ...
def other(**anything): ...
def needs(config, width): ...
@no_such_module.decorated
def wrapped(): ...
class Trainer: ...
made = no_such_module.make()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a job file."""
    for name in ("RAYDIST_RUNS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine.py").write_text(MINE)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def refusal(*words: str, target: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(words, target)
    return str(caught.value)


def test_no_words_are_the_main_job(here: Path) -> None:
    job = compose()
    assert job.name == "digits"
    assert job.job.target == f"{targets.shipped('jobs') / 'digits.py'}:job"
    assert job.backend.name == "auto"
    assert job.scale.nodes == 1
    assert job.model["_target_"].startswith("raydist.models.")
    assert Path(job.dir).parent == here / "runs" / "digits"
    assert not (here / "runs").exists()


def test_values_have_the_types_of_the_settings(here: Path) -> None:
    job = compose(
        [
            "optim.lr=1",
            "env.N=1",
            "model=resnet18",
            "model.num_classes=10",
            "data.global_batch=null",
        ]
    )
    assert isinstance(job.optim.lr, float)
    assert job.env == {"N": "1"}
    assert job.model == {
        "_target_": "torchvision.models.resnet18",
        "weights": None,
        "num_classes": 10,
    }
    assert type(job.model) is dict
    assert job.data.global_batch is None


@pytest.mark.parametrize(
    ("word", "nodes", "per_node"),
    [
        ("scale=local", 1, None),
        ("scale=cluster", None, None),
        ("scale=2x8", 2, 8),
        ("scale=16x1", 16, 1),
    ],
)
def test_scale(here: Path, word: str, nodes: int | None, per_node: int | None) -> None:
    scale = compose([word]).scale
    assert (scale.nodes, scale.per_node) == (nodes, per_node)


def test_labels_and_resources_with_odd_names(here: Path) -> None:
    job = compose(
        [
            "scale.labels.ray.io/market-type=!spot",
            "scale.labels.zone=in(a,b)",
            "scale.resources.a:H100=2",
        ]
    )
    assert job.scale.labels == {"ray.io/market-type": "!spot", "zone": "in(a,b)"}
    assert job.scale.resources == {"a:H100": 2.0}


def test_words_win_over_the_job_which_wins_over_the_defaults(here: Path) -> None:
    write(
        here / "conf" / "job" / "mine.yaml",
        "# @package _global_\ndefaults: [override /optim: adam]\njob: {target: mine}\ntrain: "
        "{epochs: 7, steps: 5}\n",
    )
    job = compose(["job=mine", "train.epochs=9"])
    assert (job.optim.name, job.train.epochs, job.train.steps) == ("adam", 9, 5)
    assert compose(["job=mine", "optim=adamw"]).optim.name == "adamw"


def test_conf_here_comes_before_the_packaged_one(here: Path) -> None:
    write(here / "conf" / "optim" / "sgd.yaml", "name: sgd\nlr: 0.123\n")
    assert compose(["job=mine"]).optim.lr == 0.123
    write(here / "more" / "optim" / "sgd.yaml", "name: sgd\nlr: 0.456\n")
    with composing.hydra_set_up():
        config = composing.Loader(config_dir="more").load(["job=mine"])
    assert config.optim.lr == 0.456


def test_the_config_of_another_program_is_refused(here: Path) -> None:
    write(here / "conf" / "config.yaml", "db: mysql\n")
    text = refusal()
    assert str(here / "conf" / "config.yaml") in text
    assert "- schema" in text


@pytest.mark.parametrize(
    ("word", "target", "name"),
    [
        ("job=mine", "{here}/jobs/mine.py:job", "mine"),
        ("job=jobs/mine.py", "{here}/jobs/mine.py:job", "mine"),
        ("job=./jobs/mine.py:other", "{here}/jobs/mine.py:other", "mine"),
        ("job={here}/jobs/mine.py", "{here}/jobs/mine.py:job", "mine"),
        ("job=../{base}/jobs/mine.py", "{here}/jobs/mine.py:job", "mine"),
        ("job=jobs/mine.py:wrapped", "{here}/jobs/mine.py:wrapped", "mine"),
        ("job=jobs/mine.py:Trainer", "{here}/jobs/mine.py:Trainer", "mine"),
        ("job=jobs/mine.py:made", "{here}/jobs/mine.py:made", "mine"),
        ("job=jobs.mine:other", "jobs.mine:other", "mine"),
        ("job=json.tool:main", "json.tool:main", "tool"),
    ],
)
def test_targets(here: Path, word: str, target: str, name: str) -> None:
    job = compose([word.format(here=here, base=here.name)])
    assert job.job.target == target.format(here=here)
    assert job.name == name
    assert "no_such_module" not in sys.modules


def test_home_is_known(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    assert compose(["job=~/jobs/mine.py"]).job.target == f"{here}/jobs/mine.py:job"


def test_a_package_is_not_imported_to_find_its_module(here: Path) -> None:
    write(here / "pack" / "__init__.py", "raise RuntimeError('imported')")
    write(here / "pack" / "part.py", "def go(): ...")
    assert compose(["job=pack.part:go"]).job.target == "pack.part:go"
    with pytest.raises(ConfigError) as refused:
        compose(["job=pack.prt:go"])
    assert refused.value.suggestion == "job=pack.part:go"


def test_arguments_that_fit(here: Path) -> None:
    assert compose(["job=mine", "job.args.hidden=5", "job.args.lr=1"]).job.args == {
        "hidden": 5,
        "lr": 1,
    }
    assert compose(["job=jobs/mine.py:other", "job.args.x=1"]).job.args == {"x": 1}
    assert compose(["job=jobs/mine.py:needs", "job.args.width=1"]).job.args == {"width": 1}
    assert compose(["job=jobs/mine.py:wrapped", "job.args.x=1"]).job.args == {"x": 1}


def test_a_file_that_is_not_python(here: Path) -> None:
    write(here / "jobs" / "bad.py", "x = 1\ndef job(:\n")
    assert "bad.py, line 2 is not Python" in refusal("job=bad")


def test_a_fixed_target_brings_the_settings_of_its_name(here: Path) -> None:
    write(
        here / "conf" / "job" / "mine.yaml",
        "# @package _global_\njob: {target: mine}\ntrain: {epochs: 7}\n",
    )
    job = compose(["optim.lr=2"], target=f"{here}/jobs/mine.py:other")
    assert (job.job.target, job.train.epochs, job.optim.lr) == (
        f"{here}/jobs/mine.py:other",
        7,
        2.0,
    )


def test_a_fixed_target_without_settings_has_none_of_digits(here: Path) -> None:
    job = compose(target=f"{here}/jobs/mine.py")
    assert (job.name, job.model, job.optim.name) == ("mine", {}, "sgd")
    assert "leave this setting out" in refusal("job=digits", target=f"{here}/jobs/mine.py")


def test_a_function_is_a_job(here: Path) -> None:
    def train() -> None: ...

    job = compose(["scale=1x3"], function=train)
    assert (job.name, job.scale.per_node, job.model) == ("train", 3, {})
    assert job.job.target == f"{__name__}:{train.__qualname__}"
    assert compose(function=lambda: None).name == "lambda"


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "mobilenet_v3_small", "swin_v2_t"])
def test_models_of_torchvision(here: Path, name: str) -> None:
    assert compose([f"model={name}"]).model["_target_"] == f"torchvision.models.{name}"


def test_the_names_are_those_that_torchvision_tells() -> None:
    code = "import torchvision.models as m; print(*m.list_models(module=m))"
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert [*choices.torchvision_models()] == sorted(listed)


def test_what_is_made_up_is_listed(here: Path) -> None:
    with composing.hydra_set_up():
        loader = composing.Loader()
        assert {"resnet50", "small_cnn"} <= {*loader.get_group_options("model")}
        assert {"mine", "digits"} <= {*loader.get_group_options("job")}
        assert {"scale", "job", "model", "backend", "optim"} <= loader.groups


def test_secrets_stay_out_of_what_is_shown(here: Path) -> None:
    write(
        here / "conf" / "backend" / "site.yaml",
        "# @package _global_\nenv: {SITE_TOKEN: from-a-file}\n",
    )
    words = ["env.HF_TOKEN=typed", "env.NCCL_DEBUG=INFO", "backend=site"]
    assert compose(words).env == {
        "HF_TOKEN": "typed",
        "NCCL_DEBUG": "INFO",
        "SITE_TOKEN": "from-a-file",
    }
    with composing.hydra_set_up():
        config = composing.Loader().load(words)
        shown = OmegaConf.to_yaml(config)
        composing.save_settings(composing.to_job(config), here / "saved.yaml")
    saved = (here / "saved.yaml").read_text()
    for text in (shown, saved):
        assert "typed" not in text
        assert "from-a-file" not in text
        assert "INFO" in text
    assert "HF_TOKEN: '***'" in saved


def test_what_is_saved_is_resolved(here: Path) -> None:
    with composing.hydra_set_up():
        config = composing.Loader().load(["optim.warmup=7", "train.epochs=${optim.warmup}"])
        composing.save_settings(composing.to_job(config), here / "saved.yaml")
    saved = OmegaConf.load(here / "saved.yaml")
    assert saved.train.epochs == 7
    assert "${" not in (here / "saved.yaml").read_text()


def test_where_runs_go(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs({}) == str(here / "runs")
    assert runs({"RAYDIST_RUNS": str(here / "other")}) == str(here / "other")
    submitted = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    monkeypatch.setenv("HOME", "/home/someone")
    assert runs(submitted) == "/home/someone/raydist/runs"
    assert runs({**submitted, "RAYDIST_RUNS": "~/x"}) == "/home/someone/x"
    monkeypatch.setenv("RAYDIST_RUNS", str(here / "all"))
    assert Path(compose().dir).parent == here / "all" / "digits"


def test_a_submitted_job_without_a_home_has_to_name_the_folder_of_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)  # in no password database
    with pytest.raises(ConfigError, match="set RAYDIST_RUNS=/a/folder"):
        runs({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})


def test_ray_gives_a_submitted_job_the_variable_that_is_looked_for() -> None:
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    assert runs({RAY_JOB_CONFIG_JSON_ENV_VAR: "{}"}).endswith("raydist/runs")


def test_a_name_of_ones_own(here: Path) -> None:
    job = compose(["name=my run/1"])
    assert job.name == "my_run1"
    assert Path(job.dir).parent.name == "my_run1"


def test_a_job_is_composed_and_validated_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        real = getattr(composing, name)

        def call(job: Job) -> object:
            calls.append(name)
            return real(job)

        monkeypatch.setattr(composing, name, call)

    counted("validate")
    counted("check_files")
    compose(["scale=1x2"])
    assert calls == ["validate", "check_files"]
    with composing.hydra_set_up():
        composing.run_once(composing.Loader(), "config", [], lambda job: calls.append(job.name))
    assert calls[2:] == ["validate", "check_files", "digits"]


def test_fresh_counts_up(here: Path) -> None:
    assert fresh("a") == "a"
    (here / "a").mkdir()
    (here / "a-2").mkdir()
    assert fresh("a") == "a-3"


def test_runs_of_one_second_have_folders_of_their_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_second(monkeypatch)
    folders = [compose(claim=True).dir for _ in range(3)]
    assert folders == [f"{here}/runs/digits/noon{suffix}" for suffix in ("", "-2", "-3")]
    assert all(Path(folder).is_dir() for folder in folders)


def test_the_loser_of_a_race_takes_the_next_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_second(monkeypatch)
    with composing.hydra_set_up():
        loader = composing.Loader()
        configs = [loader.load([]) for _ in range(4)]
        for config in configs:  # all have looked before one has taken it
            assert composing.select_value(config, "hydra.run.dir") == f"{here}/runs/digits/noon"
        folders = [make_folder(config, "hydra.run.dir") for config in configs]
    assert len({*folders}) == 4


def test_the_folder_of_a_sweep_that_was_refused_is_free(here: Path) -> None:
    """The corrected command was refused: a sweep is in it already."""
    (here / "out").mkdir()
    (here / "out/sweep.json").write_text('{"state": "failed", "trials": []}')
    config = SweepConfig(["job=digits", "seed=0,1", "hydra.sweep.dir=out"])
    assert config.make_folder() == str(here / "out")


@pytest.mark.parametrize("left", ["sweep.json", "0/trial.json"])
def test_no_second_sweep_in_the_typed_folder_of_a_first(here: Path, left: str) -> None:
    record = here / "out" / left
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    config = SweepConfig(["job=digits", "seed=0,1", "hydra.sweep.dir=out"])
    with pytest.raises(ConfigError, match=r"a sweep is in it already; set .*sweep.dir=out-2") as no:
        config.make_folder()
    assert ("sweep.resume=out" in str(no.value)) == (left == "sweep.json")
    assert not (here / "out/multirun.yaml").exists()


def same_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.utils import setup_globals

    def stopped_clock() -> None:
        setup_globals()
        OmegaConf.register_new_resolver("now", lambda pattern: "noon", use_cache=True, replace=True)

    monkeypatch.setattr("raydist.settings.compose.setup_globals", stopped_clock)


def test_a_folder_that_was_typed_is_used_as_it_is(here: Path) -> None:
    (here / "mine").mkdir()
    job = compose(["hydra.run.dir=mine"], claim=True)
    assert job.dir == str(here / "mine")
    (here / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        compose(["hydra.run.dir=file"], claim=True)
    assert refused.value.suggestion == "hydra.run.dir=file-2"


def test_another_use_of_hydra_is_left_alone(here: Path) -> None:
    write(here / "theirs" / "app.yaml", "a: 1\n")
    with initialize_config_dir(str(here / "theirs"), version_base="1.2"):
        before = version.getbase(), HydraConfig.instance().cfg
        compose(["scale=2x8"])
        refusal("lr=1")
        assert GlobalHydra.instance().is_initialized()
        assert (version.getbase(), HydraConfig.instance().cfg) == before
        assert hydra_compose("app") == {"a": 1}
    compose()
    assert not GlobalHydra.instance().is_initialized()


def test_composing_imports_neither_ray_nor_torch(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(composing.__file__).parents[1]))
    code = (
        "import sys; from raydist.settings.compose import compose; "
        "compose(['model=resnet18']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"ray", "torch", "torchvision"} & {*done.stdout.split()}


@pytest.mark.parametrize(
    "action", [lambda job: setattr(job, "name", "x"), lambda job: setattr(job.optim, "lr", 1)]
)
def test_a_job_is_frozen(here: Path, action: Callable[[Job], None]) -> None:
    with pytest.raises(AttributeError):
        action(compose())


def test_threads_compose_one_at_a_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.core.utils import setup_globals

    inside, seeds = [0, 0], dict[int, int | None]()

    def slow() -> None:
        inside[0] += 1
        inside[1] = max(inside)
        time.sleep(0.05)  # long enough for all to come in, if they may
        setup_globals()
        inside[0] -= 1

    monkeypatch.setattr("raydist.settings.compose.setup_globals", slow)

    def one(count: int) -> None:
        seeds[count] = compose([f"scale={count}x1"]).scale.nodes

    threads = [threading.Thread(target=one, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seeds == {1: 1, 2: 2, 3: 3}
    assert inside == [0, 1]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="root reads every folder: another user is needed")
def test_a_folder_that_the_user_cannot_read_has_no_conf(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home of an image's user, for another user of that image."""
    here.chmod(0o700)
    composing.search_path()  # imports what the other user may not read, and so:
    monkeypatch.setattr(targets, "shipped", lambda _: Path("/"))
    os.seteuid(65534)
    try:
        assert "raydist://" in str(composing.search_path())
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("typed", ["mlx5_0,mlx5_1", "[mlx5_0,mlx5_1]", "mlx5_0 mlx5_1"])
def test_hcas_are_typed_as_nccl_has_them(typed: str) -> None:
    """The refusal advised what was refused, too."""
    assert compose([f"fabric.hca={typed}"]).fabric.hca == ["mlx5_0", "mlx5_1"]


def test_the_language_model_takes_any_optimizer() -> None:
    """Its arguments for AdamW stayed, and the ranks refused them."""
    assert compose(["job=gpt"]).optim.args == {"betas": [0.9, 0.95], "weight_decay": 0.1}
    assert compose(["job=gpt", "optim=sgd"]).optim.args == compose(["optim=sgd"]).optim.args
