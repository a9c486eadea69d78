"""torchrun's command line in raydist's words: held against torchrun's own parser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.recovery import policy
from raydist.settings import compose, config, torchrun
from raydist.shared import arguments
from raydist.shared.errors import ConfigError
from raydist.shared.outcome import Attempt, End
from raydist.tools import launch
from tests.conftest import ROOT

TORCHRUN = """
from torch.distributed.run import get_args_parser
print(*[flag for action in get_args_parser()._actions for flag in action.option_strings])
"""


def words(*argv: str, **env: str) -> dict[str, str]:
    """Return the translated settings by key."""
    translated = torchrun.translate_torchrun(argv, env)
    return dict(word.split("=", 1) for word in translated.overrides)


def test_every_flag_of_torchrun_is_known_in_every_spelling() -> None:
    theirs = set(
        subprocess.run(
            [sys.executable, "-c", TORCHRUN], check=True, capture_output=True, text=True
        ).stdout.split()
    )
    ours = {
        flag for action in torchrun.torchrun_parser({})._actions for flag in action.option_strings
    }
    assert theirs - ours <= {
        "--print-completion",
        "--print_completion",
    }  # of torchrun itself, for a shell


def test_without_flags_it_is_what_torchrun_means() -> None:
    assert words("train.py") == {
        "backend": "script", "scale.nodes": "1", "scale.per_node": "1", "watch.output": "all",
        "restart.max": "0", "restart.window_s": "null", "script": "train.py", "args": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--nnodes 2 --nproc-per-node 8", {"scale.nodes": "2", "scale.per_node": "8"}),
        (
            "--nnodes=2:4 --nproc_per_node=3",
            {"scale.nodes": "2", "scale.max_nodes": "4", "scale.per_node": "3"},
        ),
        ("--nnodes=3:3", {"scale.nodes": "3"}),
        ("--nproc-per-node cpu", {"scale.gpus": "0"}),
        ("--nproc-per-node gpu", {"scale.gpus": "1"}),
        ("--max-restarts 2", {"restart.max": "2"}),
        (
            "--role trainer --rdzv-id 77",
            {"env.ROLE_NAME": "trainer", "env.TORCHELASTIC_RUN_ID": "77"},
        ),
        ("--numa-binding core-complex", {"scale.numa": "core-complex"}),
        ("-r 3", {"watch.output": "none"}),
        ("--tee 3 -r 3", {"watch.output": "all"}),
        ("--nproc-per-node 3 -r 1:3,2:0", {"watch.output": "0,2"}),
        ("--nnodes 2 --nproc-per-node 3 --local-ranks-filter 0,2", {"watch.output": "0,2,3,5"}),
        ("--nnodes 2:4 --nproc-per-node 2 --local-ranks-filter 0", {"watch.output": "0,2,4,6"}),
        ("--nproc-per-node 2 -r 3 -t 1:3", {"watch.output": "1"}),
        ("scale.per_node=4 scale.cpus=2", {"scale.per_node": "4", "scale.cpus": "2"}),
    ],
)
def test_flags_become_words(line: str, says: dict[str, str]) -> None:
    assert says.items() <= words(*line.split(), "train.py").items()


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("scale=2x8", "0,8"),
        ("--nnodes 3 --nproc-per-node 5 scale=2x8", "0,8"),
        ("--nproc-per-node 2 scale=2x8 scale.nodes=3", "0,8,16"),
        ("--nproc-per-node gpu scale.per_node=4 scale.max_nodes=2", "0,4"),
        ("--nnodes 2 scale.per_node=4", "0,4"),
        ("--nproc-per-node 2 scale=1..3", "0,2,4"),
        ("scale=1..2x8", "0,8"),
    ],
)
def test_ranks_whose_output_is_shown_are_those_of_the_typed_size(typed: str, shown: str) -> None:
    """They were counted by the flags: of other nodes nothing was shown, or of other ranks."""
    translated = words("--local-ranks-filter", "0", *typed.split(), "train.py")
    assert translated["watch.output"] == shown


@pytest.mark.parametrize(
    ("typed", "dropped", "kept"),
    [
        ("scale=2x8", {"scale.nodes", "scale.per_node"}, {}),
        ("--nnodes 2:4 scale=2x8", {"scale.nodes", "scale.max_nodes", "scale.per_node"}, {}),
        ("--nproc-per-node 4 scale=cluster", {"scale.nodes"}, {"scale.per_node": "4"}),
        ("++scale.nodes=3", {"scale.nodes"}, {"++scale.nodes": "3"}),
    ],
)
def test_a_typed_size_wins_over_that_of_the_flags(
    typed: str, dropped: set[str], kept: dict[str, str]
) -> None:
    translated = words(*typed.split(), "train.py")
    assert not dropped & translated.keys()
    assert kept.items() <= translated.items()


def test_a_size_in_a_file_of_ones_own_wins_over_that_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of --nproc-per-node, 1, won over it."""
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "conf/scale").mkdir(parents=True)
    (folder / "mine.yaml").write_text("nodes: 2\nper_node: 8\ncpus: 3\n")
    (folder / "open.yaml").write_text("cpus: 3\n")
    (folder / "broken.yaml").write_text("per_node: [")
    (tmp_path / "train.py").touch()
    for typed, ranks in (
        (["scale=mine"], 8),
        (["--nnodes", "3", "--nproc-per-node", "4", "scale=mine"], 8),
        (["scale=mine", "scale.per_node=2"], 2),
        (["scale=open"], 1),
        (["--nproc-per-node", "4", "scale=open"], 4),
    ):
        overrides = torchrun.translate_torchrun([*typed, "train.py"], {}).overrides
        scale = compose.compose(overrides).scale
        assert (scale.per_node, scale.cpus) == (ranks, 3)
        assert scale.nodes == 2 or "open" in typed[-1]
    shown = words("--local-ranks-filter", "0", "scale=mine", "train.py")["watch.output"]
    assert shown == "0,8"
    assert words("scale=broken", "train.py")["scale.per_node"] == "1"


def test_a_flag_after_a_setting_is_no_script() -> None:
    with pytest.raises(ConfigError, match="--nnodes: torchrun's flags come before") as refused:
        words("scale.cpus=4", "--nnodes", "2", "train.py")
    assert refused.value.suggestion == "raydist launch --nnodes … scale.cpus=4 train.py"


def test_defaults_come_from_torchruns_variables() -> None:
    translated = words("train.py", PET_NNODES="3", PET_NPROC_PER_NODE="2", PET_MODULE="1")
    assert (translated["scale.nodes"], translated["scale.per_node"], translated["script"]) == (
        "3",
        "2",
        "-m train.py",
    )


@pytest.mark.parametrize(
    ("argv", "runs", "args"),
    [
        (["train.py", "--lr", "0.1"], "train.py", "--lr 0.1"),
        (["-m", "pkg.train", "-m", "x"], "-m pkg.train", "-m x"),
        (["--no-python", "./a.out", "1"], "./a.out", "1"),
        (["--no-python", "run.py"], "/usr/bin/env", "./run.py"),
        (["train", "--lr", "1"], sys.executable, "-u train --lr 1"),
        (["--", "train.py", "--", "1"], "train.py", "-- 1"),
        (["train.py", "--nnodes", "7", "a=b"], "train.py", "--nnodes 7 a=b"),
        (["/data/lr=0.1/train.py"], "'/data/lr=0.1/train.py'", ""),
        (["exp (1), Müller's/train.py"], "'exp (1), Müller\\'s/train.py'", ""),
    ],
)
def test_the_script_and_what_is_its_own(argv: list[str], runs: str, args: str) -> None:
    translated = words(*argv)
    assert (translated["script"], translated["args"]) == (runs, args)


@pytest.mark.parametrize(
    "arg",
    [
        "",
        "a b",
        "'",
        '"x"',
        "{rank}",
        "{{rank}}",
        '{"a": {"b": [1, 2]}}',
        "[1,2]",
        "a\\b'",
        "--x={y}}",
        "é=ü",
        "$x",
        # interpolations of the program's own
        "out=${data.root}/x",
        "${name}",
        "${now:%Y}-${oc.env:HOME}",
        "\\${name}",
        "a\\\\${data.root}\\",
    ],
)
def test_arguments_arrive_as_they_stand(
    arg: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    translated = torchrun.translate_torchrun(["train.py", "first", arg], {})
    job = compose.compose(translated.overrides)
    arguments.check_arguments(job.args, "env", "gloo")
    kept = config.from_dict(json.loads(json.dumps(config.as_dict(job)))).args  # as a rank gets it
    assert arguments.fill(kept, {}, "env", "gloo") == ["first", arg]


@pytest.mark.parametrize(
    ("line", "key", "value", "suggestion"),
    [
        ("", "script", None, "raydist launch [flags] train.py [its arguments]"),
        ("--nodes 2 train.py", "--nodes", None, "--nnodes"),
        ("--nnodes two train.py", "--nnodes", "two", "--nnodes 2"),
        ("--nproc-per-node all train.py", "--nproc-per-node", "all", "--nproc-per-node auto"),
        ("--node-rank 1 train.py", "--node-rank", "1", "--nnodes N"),
        ("--virtual-local-rank train.py", "--virtual-local-rank", None, ""),
        ("--logs-specs default train.py", "--logs-specs", "default", ""),
        ("--max-restarts x train.py", "--max-restarts", "x", "--max-restarts 3"),
        ("-r 7 train.py", "--redirects", "7", "--redirects 3"),
        (
            "--nproc-per-node gpu --local-ranks-filter 0 train.py",
            "--nproc-per-node",
            "gpu",
            "--nproc-per-node 8",
        ),
        (
            "--nproc-per-node 2 --local-ranks-filter 0 scale=cluster train.py",
            "scale",
            "cluster",
            "scale=2x2",
        ),
        ("-m --no-python train", "--no-python", None, "--module"),
    ],
)
def test_what_can_not_be_is_refused_with_a_suggestion(
    line: str, key: str, value: str | None, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        torchrun.translate_torchrun(line.split(), {})
    error = refused.value
    assert (error.key, error.value, error.suggestion) == (key, value, suggestion)
    assert suggestion in str(error)


def test_what_is_needless_is_noted_and_let_be() -> None:
    argv = [
        "--rdzv-backend=c10d",
        "--rdzv_endpoint",
        "host:29500",
        "--master-port",
        "1",
        "--standalone",
        "train.py",
    ]
    translated = torchrun.translate_torchrun(argv, {})
    assert [note.split()[0] for note in translated.notes] == [
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--master-port",
    ]
    assert not any("29500" in word for word in translated.overrides)
    [note] = torchrun.translate_torchrun(["--nnodes", "2:4", "train.py"], {}).notes
    assert note.startswith("--nnodes 2:4: ")
    assert "--max-restarts" in note


def test_a_lost_node_ends_an_elastic_launch_unless_max_restarts_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun's agents: a node that joins is no failure, but the peers of a lost one fail."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    lost = Attempt([End(0, "a", "stopped", 5.0), End(1, "b", "lost", 4.0)])
    for flags, goes_on in (([], False), (["--max-restarts", "1"], True)):
        translated = torchrun.translate_torchrun(["--nnodes", "1:2", *flags, "train.py"], {})
        rule = compose.compose(translated.overrides).restart
        assert isinstance(policy.decide(rule, [lost], program=True), policy.Retry) is goes_on


def test_the_page_lists_flags_by_what_becomes_of_them() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text()
    rows = {
        what: {*re.findall(r"`--([\w-]+)`", flags)}
        for what, flags in re.findall(
            r"^\| (not needed|accepted|refused)\b.*? \| (.*) \|$", page, re.M
        )
    }
    assert rows["not needed"] <= torchrun.NEEDLESS.keys()
    assert rows["accepted"] == {
        name for name, text in torchrun.SWITCHES.items() if text.startswith("accepted")
    }
    assert rows["refused"] == {"node-rank", *torchrun.REFUSED}
    assert torchrun.translate_torchrun(["--standalone", "--run-path", "a.py"], {}).notes == []


def test_the_tool_says_what_is_wrong_and_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--nnodes", "x", "train.py"]) == 2
    assert "--nnodes x" in capsys.readouterr().err
    assert launch.main(["--help"]) == 0
    assert "--nproc-per-node" in capsys.readouterr().out
    assert launch.main(["no_such_script.py"]) == 2
    assert "no_such_script.py" in capsys.readouterr().err


@pytest.mark.ray
def test_a_program_of_torchruns_by_its_command_line(
    on_ray: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = Path(__file__).parents[1] / "scripts"
    argv = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--log-dir",
        str(on_ray / "here"),
        str(scripts / "env_ddp.py"),
    ]
    assert launch.main([*argv, "--epochs", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("[")) == [
        f"[{rank}] rank {rank} local {rank} of 2: same weights True" for rank in range(2)
    ]
    assert len(list((on_ray / "here").glob("*/*/logs/rank-1.log"))) == 1
    assert launch.main([*argv, "--fail", "4"]) == 1
    assert "rank 1" in capfd.readouterr().out
