"""A job's function found in its source: what counts as defined, what it takes; and the text of the
help."""

from __future__ import annotations

import ast
import json
from dataclasses import MISSING
from operator import attrgetter
from pathlib import Path

import pytest

from raydist.settings import compose, help, targets
from raydist.settings import overrides as words
from raydist.settings.config import Job, Optim
from raydist.shared.errors import ConfigError


def names(source: str) -> set[str]:
    return {*targets.defined(ast.parse(source))}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def job(): ...", "job"),
        ("async def job(): ...", "job"),
        ("class job: ...", "job"),
        ("job = make()", "job"),
        ("job: Any = make()", "job"),
        ("first, (job, *rest) = make()", "job"),
        ("from x import job", "job"),
        ("from x import y as job", "job"),
        ("import job.part", "job"),
        ("from x import *", "*"),
        ("if fast:\n  def job(): ...\nelse:\n  pass", "job"),
        ("if fast:\n  pass\nelse:\n  def job(): ...", "job"),
        ("try:\n  from x import job\nexcept ImportError:\n  pass", "job"),
        ("try:\n  import x\nexcept ImportError:\n  def job(): ...", "job"),
        ("with x:\n  job = 1", "job"),
    ],
)
def test_what_a_file_defines(source: str, name: str) -> None:
    assert name in names(source)


@pytest.mark.parametrize(
    "source", ["x.job = 1", "def f():\n  def job(): ...", "class C:\n  def job(self): ...", "job"]
)
def test_what_it_does_not(source: str) -> None:
    assert "job" not in names(source)


def check(source: str, **args: object) -> None:
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef)
    targets.check_args("digits", tree.args, args)


@pytest.mark.parametrize(
    ("source", "args"),
    [
        ("def job(): ...", {}),
        ("def job(config): ...", {}),
        ("def job(config, a): ...", {"a": 1}),
        ("def job(config, a, b=1): ...", {"a": 1}),
        ("def job(a=1, *, b=2, config): ...", {"b": 1}),
        ("def job(*, b): ...", {"b": 1}),
        ("def job(*rest, **named): ...", {"anything": 1}),
    ],
)
def test_arguments_that_fit(source: str, args: dict[str, object]) -> None:
    check(source, **args)


@pytest.mark.parametrize(
    ("source", "args", "text"),
    [
        ("def job(): ...", {"a": 1}, "job.args.a=1: job=digits has no argument a"),
        ("def job(config, width=1): ...", {"with": 1}, "did you mean job.args.width=1?"),
        ("def job(config, a): ...", {}, "needs a; set job.args.a=VALUE"),
        ("def job(a, *, b, c=1): ...", {}, "needs a, b; set job.args.a=VALUE job.args.b=VALUE"),
        ("def job(*, b, **named): ...", {"c": 1}, "needs b"),
        ("def job(config): ...", {"config": 1}, "job.args.config"),
    ],
)
def test_arguments_that_do_not(source: str, args: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(source, **args)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("target", "stem"),
    [
        ("/a/digits.py:job", "digits"),
        ("/a/digits.py", "digits"),
        ("pack.part:train", "part"),
        ("part:train", "part"),
        ("digits", "digits"),
    ],
)
def test_stems(target: str, stem: str) -> None:
    assert targets.target_stem(target) == stem


def test_a_job_here_comes_before_one_of_raydist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert targets.resolve_target("digits", {}) == f"{targets.shipped('jobs')}/digits.py:job"
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "digits.py").write_text("def job(): ...")
    (tmp_path / "jobs" / "_private.py").write_text("def job(): ...")
    assert targets.resolve_target("digits", {}) == f"{tmp_path}/jobs/digits.py:job"
    assert "digits" in targets.job_files()
    assert "_private" not in targets.job_files()


def test_a_compiled_module_is_taken_on_trust() -> None:
    assert (
        targets.resolve_target("numpy.random.mtrand:rand", {"d0": 1}) == "numpy.random.mtrand:rand"
    )


def test_the_source_of_a_job_may_be_in_its_own_encoding(tmp_path: Path) -> None:
    file = tmp_path / "latin.py"
    file.write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\ndef job(): ...\n")
    assert targets.resolve_target(str(file), {}) == f"{file}:job"
    file.write_bytes(b"# \xe9\ndef job(): ...\n")
    with pytest.raises(ConfigError, match="is not Python"):
        targets.resolve_target(str(file), {})


def test_jobs_that_come_with_raydist_can_be_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = {file.stem for file in targets.shipped("jobs").glob("*.py")}
    assert {"digits", "own_loop"} <= shipped
    for name in shipped:
        assert targets.resolve_target(name, {}).endswith(f"/{name}.py:job")


def test_help_comes_from_the_docstrings() -> None:
    assert help.texts()["optim.lr"].startswith("Learning rate for a global batch")
    assert help.texts()["seed"].startswith("Seed of all random numbers")
    assert help.texts()["optim"] == Optim.__doc__


def test_every_setting_has_a_text_a_type_and_a_default() -> None:
    for name, field in words.SETTINGS.items():
        assert help.texts()[name], name
        assert help.type_text(field), name
        assert help.default_text(field), name


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("optim.lr", "float", "0.05"),
        ("scale.per_node", "int or null", "null"),
        ("train.precision", "fp32|bf16|fp16", "fp32"),
        ("data.shuffle", "bool", "true"),
        ("name", "str", "''"),
        ("env", "dict[str, str]", "{}"),
    ],
)
def test_types_and_defaults_as_typed(name: str, kind: str, default: str) -> None:
    field = words.SETTINGS[name]
    assert (help.type_text(field), help.default_text(field)) == (kind, default)


def test_a_default_that_a_file_replaces_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The help shows the defaults of the classes, but config.yaml chooses the files of groups."""

    def function() -> None: ...

    monkeypatch.chdir(tmp_path)
    job = compose.compose([], function=function)
    arguments = " ".join(f"{key}={json.dumps(value)}" for key, value in job.optim.args.items())
    told = {
        "name": "empty: the name of the job",
        "job.target": "A name in jobs/",
        "optim.lr": f"(sgd: {job.optim.lr})",
        "optim.args": f"(sgd: {arguments})",
        "watch.output": "none for a job",
        "dir": "raydist sets it",
    }
    differing = {
        name
        for name, field in words.SETTINGS.items()
        if attrgetter(name)(job)
        != (field.default if field.default_factory is MISSING else field.default_factory())
    }
    assert differing == told.keys()
    for name, text in told.items():
        assert text in help.texts()[name]


def test_help_is_grouped_by_part() -> None:
    parts = help.by_part()
    assert [name for name, _ in parts["optim"]] == [
        f"optim.{name}" for name in Optim.__dataclass_fields__
    ]
    assert {"name", "seed", "resume"} <= {name for name, _ in parts[""]}
    assert {part for part in parts if part} <= Job.__dataclass_fields__.keys()


def test_columns_are_wrapped_and_aligned() -> None:
    lines = [*help.columns([("a", "one two three four five"), ("long", "six")], 20)]
    assert all(len(line) <= 20 for line in lines)
    assert [line[:8].strip() for line in lines if line[:8].strip()] == ["a", "long"]
    assert lines[0].index("one") == lines[-1].index("six")
