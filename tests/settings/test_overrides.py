"""Words as typed -> words as Hydra reads them; nothing is composed here."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from raydist.settings import overrides as words
from raydist.shared.errors import ConfigError

GROUPS = frozenset({"job", "backend", "scale", "model", "optim", "hydra", "hydra/launcher"})


def translated(*overrides: str, multirun: bool = False) -> list[str]:
    return words.translate_overrides(overrides, GROUPS, multirun)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        words.translate_overrides(overrides, GROUPS)
    return str(caught.value)


def as_hydra_reads(word: str) -> tuple[str, object]:
    override = OverridesParser.create().parse_override(word)
    return override.key_or_group, override.value()


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("optim.lr=0.1", "optim.lr", 0.1),
        ("backend=nccl", "backend", "nccl"),
        ("scale=2x8", "scale", "2x8"),
        ("scale=4", "scale", "4"),
        ("backend='gloo'", "backend", "gloo"),
        ("backend=null", "backend", "null"),
        ("name=1.10", "name", "1.10"),
        ("++name=1e3", "name", "1e3"),
        ("script=true", "script", "true"),
        ("checkpoint.best=null", "checkpoint.best", None),
        ("job=path/to/file.py:main", "job", "path/to/file.py:main"),
        ("job=~/mine.py", "job", "~/mine.py"),
        ("job=package.module:function", "job", "package.module:function"),
        ("resume=~/runs/x", "resume", "~/runs/x"),
        ("model.num_classes=10", "model.num_classes", 10),
        ("optim.args.betas=[0.9,0.99]", "optim.args.betas", [0.9, 0.99]),
        ("job.args.hidden=64", "job.args.hidden", 64),
        ("scale.resources.highmem=1", "scale.resources.highmem", 1),
        ("env.NCCL_IB_HCA==mlx5_0,mlx5_1", "env.NCCL_IB_HCA", "=mlx5_0,mlx5_1"),
        ("env.FLAGS=--a=b (c) {d}", "env.FLAGS", "--a=b (c) {d}"),
        ("env.SAID=it's", "env.SAID", "it's"),
        ("env.PATHS=C:\\dir\\", "env.PATHS", "C:\\dir\\"),
        ("env.ON=true", "env.ON", "true"),
        ("env.EMPTY=", "env.EMPTY", ""),
        ("scale.labels.zone=in(a,b)", "scale.labels.zone", "in(a,b)"),
        ("scale.labels.zone=!spot", "scale.labels.zone", "!spot"),
        (
            "scale.labels.ray.io/market-type=on-demand",
            "scale.labels",
            {"ray.io/market-type": "on-demand"},
        ),
        (
            "scale.resources.accelerator_type:H100=0.5",
            "scale.resources",
            {"accelerator_type:H100": 0.5},
        ),
        ("hydra.run.dir=/a/b", "hydra.run.dir", "/a/b"),
        ("train={epochs: 3}", "train", {"epochs": 3}),
    ],
)
def test_hydra_reads_what_was_meant(word: str, key: str, value: object) -> None:
    assert as_hydra_reads(translated(word)[0]) == (key, value)


@pytest.mark.parametrize(
    "word",
    [
        "model.num_classes=10",
        "env.A=b,c",
        "env.API_KEY=abc",
        "scale.labels.ray.io/zone=in(a,b)",
        "scale=2x8",
        "scale=4",
        "name=1.10",
        "job=~/x.py",
        "~model.x",
        r"args=it\'s\ \\",
        "++optim.lr=1",
    ],
)
def test_translating_twice_changes_nothing(word: str) -> None:
    once = translated(word)
    assert translated(*once) == once


@pytest.mark.parametrize(
    "word", ["model.a=1", "job.args.a=1", "optim.args.a=1", "env.A=1", "scale.labels.a=1"]
)
def test_open_dictionaries_take_any_key(word: str) -> None:
    assert OverridesParser.create().parse_override(translated(word)[0]).is_force_add()


def test_a_sweep_over_variables_stays_a_sweep() -> None:
    assert translated("env.NCCL_ALGO=Ring,Tree", multirun=True) == ["++env.NCCL_ALGO=Ring,Tree"]
    assert OverridesParser.create().parse_override("++env.NCCL_ALGO=Ring,Tree").is_sweep_override()


def test_a_sweep_of_choices_that_look_like_numbers() -> None:
    assert translated("scale=1x1,2", multirun=True) == ["scale=1x1,'2'"]


def test_a_variable_is_verbatim_in_a_sweep_too() -> None:
    assert translated("env.NCCL_IB_HCA==mlx5_0", multirun=True) == ["++env.NCCL_IB_HCA='=mlx5_0'"]


def test_a_secret_with_a_comma_is_one_value_in_a_sweep_too() -> None:
    assert translated("env.TOKEN=a,b", multirun=True) == ["++env.TOKEN='a,b'"]


def test_an_unlike_word_is_not_guessed_at() -> None:
    text = refusal("zzzz=1")
    assert "did you mean" not in text
    assert "backend" in text


def test_settings_have_full_names() -> None:
    names = dict(words.setting_fields())
    assert {"name", "optim.lr", "scale.labels", "job.target"} <= names.keys()
    assert "optim" not in names
    assert {"optim", "scale", "job"} <= words.PARTS
    assert {"model", "env", "job.args", "optim.args", "scale.resources", "scale.labels"} <= set(
        words.OPEN
    )


def test_the_same_plain_word_may_come_twice() -> None:
    assert translated("optim.lr=1", "optim.lr=2") == ["optim.lr=1", "optim.lr=2"]


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("args=[--lr,0.1],[--lr,'0, 2']", ["['--lr','0.1']", "['--lr','0, 2']"]),
        ("args=choice(['a],[b'],[c])", ["['a],[b']", "['c']"]),
        ("args=choice('--lr 0.1','--lr 0,2')", ["['--lr','0.1']", "['--lr','0,2']"]),
        ("args=--betas 0.9,0.99", ["['--betas','0.9,0.99']"]),
        ("args=[--shape=[1],[2]]", ["['--shape=[1]','[2]']"]),
        ("fabric.hca=a,b", ["['a']", "['b']"]),
        ("fabric.hca=[a,b],[c]", ["['a','b']", "['c']"]),
    ],
)
def test_a_sweep_has_several_lists(typed: str, values: list[str]) -> None:
    key = typed.partition("=")[0]
    assert translated(typed, multirun=True) == [f"{key}={','.join(values)}"]
