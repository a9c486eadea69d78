"""The words of a program that somebody has already: braces, files, modules, variables from a
file."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from raydist.launch import preload
from raydist.settings import compose, env_file
from raydist.settings.config import Job
from raydist.settings.overrides import as_list
from raydist.shared import arguments
from raydist.shared.errors import ConfigError

ENV = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "77",
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import json\nimport pytest\nimport beside\nimport no_such_thing\n")
    Path("beside.py").write_text("import yaml\nimport train\n")


def job(*words: str) -> Job:
    return compose.compose(["script=train.py", *words])


@pytest.mark.parametrize(
    ("arg", "becomes"),
    [
        ("{rank}", "3"),
        ("--r={rank}/{world_size}", "--r=3/8"),
        ("{local_rank}{node_rank}", "11"),
        ("{master_addr}:{master_port}", "10.0.0.1:77"),
        ("{backend}", "gloo"),
        ("{init_method}", "tcp://10.0.0.1:77"),
        ("{{rank}}", "{rank}"),
        ('{"rank":{rank}}', '{"rank":3}'),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
        ("{}{2}", "{}{2}"),
    ],
)
def test_words_in_braces(arg: str, becomes: str) -> None:
    arguments.check_arguments([arg], "tcp", "gloo")
    assert arguments.fill([arg], ENV, "tcp", "gloo") == [becomes]


def test_each_way_to_meet_in_the_words_of_init_process_group() -> None:
    assert arguments.meeting_url(ENV, "env") == "env://"
    assert arguments.meeting_url({**ENV, "MASTER_ADDR": "fd00::1"}, "tcp") == "tcp://[fd00::1]:77"
    assert (
        arguments.meeting_url({"RAYDIST_RENDEZVOUS_FILE": "/shared/x"}, "file")
        == "file:///shared/x"
    )


def test_backend_script_is_for_a_script() -> None:
    from raydist.worker import backends

    backends.check_installed("script", "train.py")
    with pytest.raises(
        ConfigError, match=r"backend=script: no script is set; set script=train\.py"
    ):
        backends.check_installed("script")


def test_a_job_and_a_script_are_not_run_together() -> None:
    with pytest.raises(
        ConfigError, match=r"script=train\.py: the job is .*print already; leave this setting out"
    ):
        compose.compose(["script=train.py"], function=print)


def test_a_script_is_settled_and_gives_the_run_its_name() -> None:
    done = job("args=--a 1 'b c'")
    assert (done.script, done.name, done.args) == (
        str(Path("train.py").absolute()),
        "train",
        ["--a", "1", "b c"],
    )
    assert job("watch.output=0,3").watch.output == "0,3"
    assert (done.watch.output, compose.compose([]).watch.output) == ("all", "none")
    assert compose.compose(["script=-m train"]).script == "-m train"
    assert compose.compose(["script=hostname"]).script == "hostname"


@pytest.mark.parametrize(
    ("args", "means"),
    [
        ("", "[]"),
        ("--a 1 'b c'", "['--a','1','b c']"),
        ("[--a,1,'b, c',\"d\"]", "['--a','1','b, c','d']"),
        ("[]", "[]"),
        ("[{rank},--x={rank}]", "['{rank}','--x={rank}']"),
    ],
)
def test_arguments_as_in_a_shell_or_as_a_list(args: str, means: str) -> None:
    assert as_list("args", args) == means


def test_packages_with_their_versions() -> None:
    assert job("pip=[einops==0.8.0,timm>=1.0]").pip == ["einops==0.8.0", "timm>=1.0"]


def test_a_file_of_variables_as_docker_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "some.env"
    file.write_text('# a comment\n\nA=1\nB="quoted" # kept\nC=\n  D = x=y\nHOME_THERE\nNOT_THERE\n')
    with pytest.raises(ConfigError, match=r"some\.env, line 6: 'D ' is not a variable's name"):
        env_file.read_env_file(str(file), {})
    file.write_text(
        '# a comment\n\nA=1\nB="quoted" # kept\nC=\nD=x=y\nE=${not.ours}\nHOME_THERE\nNOT_THERE\n'
    )
    read = env_file.read_env_file(str(file), {"HOME_THERE": "/root"})
    assert read == {
        "A": "1",
        "B": '"quoted" # kept',
        "C": "",
        "D": "x=y",
        "E": "${not.ours}",
        "HOME_THERE": "/root",
    }
    del read["HOME_THERE"]
    assert job(f"env_file={file}", "env.A=2").env == {**read, "A": "2"}


def test_secrets_of_a_file_are_in_no_saved_config(tmp_path: Path) -> None:
    Path("some.env").write_text("API_TOKEN=hush\nPLAIN=${x}\n")
    composed = job("env_file=some.env")
    assert composed.env == {"API_TOKEN": "hush", "PLAIN": "${x}"}
    compose.save_settings(composed, tmp_path / "saved.yaml")
    assert "hush" not in (tmp_path / "saved.yaml").read_text()
    with compose.hydra_set_up():
        shown = OmegaConf.to_yaml(compose.Loader().load(["script=train.py", "env_file=some.env"]))
    assert "hush" not in shown


def test_what_a_server_imports_is_what_is_installed_however_it_is_reached() -> None:
    # json and pytest by the script, yaml by a file beside it; its own files are left to the ranks
    assert preload.modules("", "gloo", str(Path("train.py").absolute())) == [
        "json",
        "pytest",
        "yaml",
    ]
    assert preload.modules("", "gloo", "-m train") == ["json", "pytest", "yaml"]
    assert preload.modules("", "gloo", "hostname") == []
    Path("optimizes.py").write_text("import torch\noptimizer = torch.optim.SGD\n")
    assert preload.modules("", "gloo", "optimizes.py") == ["torch", "torch._dynamo"]
    Path("broken.py").write_text("def :\n")
    assert preload.modules("", "gloo", "broken.py") == []
