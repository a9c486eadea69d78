from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist import flow
from raydist.launch import preload
from raydist.node import fork_launcher
from raydist.settings import compose
from raydist.settings.config import Job, Target
from raydist.shared.events import Events
from raydist.worker import target
from tests.records import read_events


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_function_of_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_job.py").write_text("answer = 42")
    (tmp_path / "my_job_file.py").write_text(
        "from neighbour_of_job import answer\ndef job(): return answer"
    )
    assert target.load_target(f"{tmp_path}/my_job_file.py:job")() == 42
    assert "my_job_file" in sys.modules  # loader workers and pickle look it up there


def test_a_function_of_a_module() -> None:
    assert target.load_target("os.path:basename")("/a/b") == "b"


def test_the_job_gets_its_arguments_and_config_if_it_has_that_parameter() -> None:
    settings = replace(Job(), job=Target("x", {"hidden": 64}))

    def plain(hidden: int) -> int:
        return hidden

    def asking(config: Job, hidden: int) -> tuple[int, Any]:
        return hidden, config

    assert target.call_function(plain, settings) == 64
    assert target.call_function(asking, settings) == (64, settings)


def test_what_is_passed_by_place_are_the_parameters_beside_config() -> None:
    """`config` got the first of them, and a second value."""

    def first(config: Job, lr: float, *rest: float) -> tuple[Any, ...]:
        return config, lr, *rest

    def second(lr: float, config: Job, steps: int = 5) -> tuple[Any, ...]:
        return config, lr, steps

    def last(lr: float, *, config: Job) -> tuple[Any, ...]:
        return config, lr

    def all_by_name(**config: Any) -> Any:
        return config

    settings = Job()
    assert target.call_function(first, settings, 0.1) == (settings, 0.1)
    assert target.call_function(first, settings, 0.1, 2.0) == (settings, 0.1, 2.0)
    assert target.call_function(first, settings, lr=0.1) == (settings, 0.1)
    assert target.call_function(second, settings, 0.1) == (settings, 0.1, 5)
    assert target.call_function(second, settings, 0.1, 7) == (settings, 0.1, 7)
    assert target.call_function(last, settings, 0.1) == (settings, 0.1)
    assert target.call_function(all_by_name, settings) == {"config": settings}


def test_arguments_of_a_function_that_travelled() -> None:
    assert target.call_function(lambda a, b=0: (a, b), Job(), 1, b=2) == (1, 2)


def test_what_a_file_imports_is_read_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "from __future__ import annotations\nimport os, json as j\nfrom sklearn.datasets import "
        "load_digits\n"
        "from . import near\nraise SystemExit\ndef job():\n    import inside\n"
    )
    assert preload.imported_modules(file.read_text()) == [
        "os",
        "json",
        "sklearn.datasets",
        "sklearn.datasets:load_digits",
    ]
    modules = preload.modules(f"{file}:job", "gloo")
    assert modules[: len(fork_launcher.ALWAYS)] == list(fork_launcher.ALWAYS)
    assert "sklearn.datasets" in modules
    assert "raydist.training.fit" not in modules
    assert "sklearn.datasets:load_digits" in preload.lasting_modules(modules)
    file.write_text("from mpi4py import MPI\nfrom raydist import fit\nfrom os import *\n")
    assert preload.imported_modules(file.read_text()) == ["mpi4py", "raydist", "raydist:fit", "os"]
    assert "raydist:fit" not in preload.modules(f"{file}:job", "gloo")


def test_a_file_that_uses_raydist_gets_the_loop_warm(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text("import raydist\n")
    assert set(preload.LOOP) <= set(preload.modules(f"{file}:job", "gloo"))


def test_a_file_whose_neighbour_uses_raydist_gets_the_loop_warm(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import raydist\n\ndef train(config): ...\n")
    file = tmp_path / "job.py"
    file.write_text("from own import train\n\ndef job(config):\n    train(config)\n")
    assert set(preload.LOOP) <= set(preload.modules(f"{file}:job", "gloo"))


def test_a_job_or_program_that_compiles_gets_the_compiler_warm(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import torch\n\nfast = torch.compile(print)\n")
    (file := tmp_path / "job.py").write_text("import own\n\ndef job(config): ...\n")
    target = f"{file}:job"
    assert preload.COMPILER in preload.modules(target, "gloo")
    assert preload.COMPILER in preload.script_modules(str(file))
    (tmp_path / "own.py").write_text("import torch\n")
    assert preload.COMPILER not in preload.modules(target, "gloo")
    for word, warm in (("blocks", True), ("true", True), ("false", False)):
        job = compose.compose([f"job={file}", f"train.compile={word}"])
        assert (preload.COMPILER in preload.of(job)) == warm


@pytest.mark.parametrize("name", ["", "no.such.module:f", "os.path:basename", "nothing"])
def test_a_target_without_a_file_warms_torch_only_or_what_its_module_imports(name: str) -> None:
    assert preload.modules(name, "gloo")[: len(fork_launcher.ALWAYS)] == list(fork_launcher.ALWAYS)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['TORCH_LOGS'] = 'all'\nimport torch\n", "TORCH_LOGS"),
        ("import os\nif True:\n    os.environ.setdefault('A', '')\nfrom torch import nn\n", "A"),
        ("import own\n", "OWN"),
        ("import package.part\n", "PACKAGE"),
        ("import os\nos.environ.update({'A': '1'}, B='2')\nimport torch\n", "B"),
        ("import os\nos.environ |= {'NCCL_DEBUG': '1', 'C': '2'}\nimport torch\n", "C"),
        ("import os\na = os.environ['D'] = '1'\nimport torch\n", "D"),
        ("import os\nfor n in 'ab':\n    os.environ[n] = ''\nimport torch\n", "variables"),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch\n", "variables"),
        ("import torch, os\nos.environ['TORCH_LOGS'] = 'all'\nimport json\n", ""),
        ("import os\nos.environ['NCCL_DEBUG'] = 'INFO'\nimport torch\n", ""),
        ("import harmless, torch, os\nos.environ['TORCH_LOGS'] = 'all'\n", ""),
        ("import os\ndef main():\n    os.environ['A'] = ''\nimport torch\n", ""),
        ("import os\nos.environ['A'] =\n", ""),
    ],
)
def test_a_variable_that_is_set_before_an_import(source: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from os import environ\nenviron['OWN'] = '1'\n")
    (tmp_path / "harmless.py").write_text("import os, torch\nhome = os.environ['HOME']\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("import os\nos.environ['PACKAGE'] = '1'\n")
    (file := tmp_path / "train.py").write_text(source)
    job = replace(Job(), script=str(file))
    assert preload.variable_set_early(job) == name
    file.write_text(f"{source}def job(): ...\n" if name or "def" not in source else source)
    assert preload.variable_set_early(replace(Job(), job=Target(f"{file}:job"))) == name


@pytest.mark.parametrize("file", ["part/train.py", "part/train/__main__.py"])
def test_the_packages_of_a_module_are_looked_into(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs them before the module itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("outer", "outer.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (main := tmp_path / "outer" / file).parent.mkdir(parents=True)
    main.write_text("import torch\n\ndef job(): ...\n")
    for folder in main.parents[: main.parents.index(tmp_path)]:
        (folder / "__init__.py").touch()
    by_module = Job(script="-m outer.part.train")
    by_path = Job(script=str(main))
    target = Job(job=Target("outer.part.train:job"))
    assert [preload.variable_set_early(job) for job in (by_module, by_path, target)] == [""] * 3
    (tmp_path / "outer/__init__.py").write_text("import os, yaml\nos.environ['OUTER'] = '1'\n")
    found = [preload.variable_set_early(job) for job in (by_module, by_path, target)]
    assert found == ["OUTER", "", "OUTER"]
    assert preload.script_modules(by_module.script) == ["os", "yaml", "torch"]
    assert preload.script_modules(by_path.script) == ["torch"]


def test_a_program_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("import torch  # of this test\n")
    (file := tmp_path / "train.py").write_text("import own  # of this test\n")
    parsed, parse = list[str](), ast.parse

    def noted(source: str) -> ast.Module:
        parsed.append(source)
        return parse(source)

    job = Job(script=str(file))
    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", noted)
        found = preload.of(job), preload.variable_set_early(job)
    assert found == (["torch"], "")
    assert sorted(parsed) == ["import own  # of this test\n", "import torch  # of this test\n"]


def test_a_variable_that_is_set_early_is_told_once(tmp_path: Path) -> None:
    """Also if the run is placed several times."""
    (file := tmp_path / "train.py").write_text("import os\nos.environ['A'] = '1'\nimport torch\n")
    with Events(tmp_path / "events.jsonl") as events:
        for again in (False, True):
            assert flow.settle_start(Job(script=str(file)), events, again).start == "spawn"
    (warning,) = read_events(tmp_path / "events.jsonl")
    assert warning["text"].startswith("train.py sets A before it imports a package")
