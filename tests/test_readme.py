"""What the pages for people say holds: links, names, files, the README's example and its
refusal."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import raydist
from tests.conftest import ROOT
from tests.test_structure import PACKAGES

README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "bench" / "README.md",
]
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def slugs(headings: list[str]) -> set[str]:
    """Return the anchors that GitHub makes of headings: lower case, no punctuation, hyphens; -1, -2
    for a repeated one."""
    counts: Counter[str] = Counter()
    result = set()
    for heading in headings:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        result.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return result


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page. A # in a block of code is no heading."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return slugs(re.findall(r"^#{1,6} +(.+)$", prose, re.MULTILINE))


def broken(page: Path, text: str) -> Iterator[str]:
    """Yield the links in the text of a page that lead nowhere."""
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]*))?\)", text):
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield f"{target}#{anchor}" if anchor else target


@named
def test_its_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_a_link_to_a_heading_that_is_not_there_is_found() -> None:
    page = ROOT / "docs" / "faults.md"
    wrong = ["#no-such", "storage.md#no-such", "no-such.md", "no-such.md#stores"]
    text = " ".join(
        f"[x]({target})"
        for target in [*wrong, "storage.md#stores", "#spares", "../README.md#settings"]
    )
    assert list(broken(page, text)) == wrong
    assert slugs(["A state in shards (FSDP)", "`a.b`, c", "Spares", "Spares", "[x](y.md) z"]) == {
        "a-state-in-shards-fsdp", "ab-c", "spares", "spares-1", "x-z",
    }  # fmt: skip


def code(text: str) -> str:
    """Return the code of a page, in blocks and between backticks."""
    fenced = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(
        [*fenced, *re.findall(r"^ {4}.*$", rest, re.MULTILINE), *re.findall(r"`([^`\n]+)`", rest)]
    )


def called(text: str) -> set[str]:
    """Return the names of raydist that code on a page calls, imports, or names as a class."""
    mentioned = {match.rstrip("(") for match in re.findall(r"\braydist\.[\w.]+\(", code(text))}
    mentioned |= set(re.findall(r"\braydist\.[A-Z]\w*", code(text)))
    for module, names in re.findall(r"from (raydist[\w.]*) import ([\w, ]+)", code(text)):
        mentioned |= {f"{module}.{name.strip()}" for name in names.split(",")}
    return mentioned


def is_public(name: str) -> bool:
    """Return whether `raydist.a` is exported, and `raydist.a.b` is part of what is exported."""
    first, *rest = name.split(".")[1:]
    if first not in raydist.__all__:
        return False
    value = getattr(raydist, first)
    return not rest or (len(rest) == 1 and rest[0] in getattr(value, "__all__", dir(value)))


@named
def test_what_it_tells_to_call_is_public(page: Path) -> None:
    hidden = {name for name in called(page.read_text()) if not is_public(name)}
    assert not hidden, "docs tell users to call these, and `import raydist` does not give them"


def test_a_name_that_is_not_public_is_found() -> None:
    text = "`raydist.fit(x)`, `raydist.nope(1)`, `raydist.checkpoint.settle()`"
    text += "\n```python\nfrom raydist import run, no\n```"
    assert {name for name in called(text) if not is_public(name)} == {
        "raydist.nope", "raydist.checkpoint.settle", "raydist.no",
    }  # fmt: skip


NAMED = (
    r"(?<![\w/.])((?:[\w-]+/)+[\w-]+\.py|(?:flow|train)\.py)(?:: ((?:\w+\(\)|[A-Z]\w*)(?:, "
    r"(?:\w+\(\)|[A-Z]\w*))*))?"
)
"""A file, and after a colon what is in it: `settings/compose.py: load(), Loader`."""


def defined(file: Path) -> set[str]:
    """Return the functions and classes that a file defines, including methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}


@named
def test_the_files_and_functions_that_it_names_are_there(page: Path) -> None:
    for file, names in re.findall(NAMED, page.read_text().replace("path/to/file.py", "")):
        path = next(
            (
                each / file
                for each in (ROOT, ROOT / "raydist", page.parent)
                if (each / file).exists()
            ),
            None,
        )
        assert path is not None, f"{page.name} names {file}"
        for name in re.findall(r"(\w+)(?:\(\))?", names):
            assert name in defined(path), f"{page.name} names {name} in {file}"


def test_the_architecture_lists_the_packages_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, section = page.partition("## What may import what\n")
    (block,) = re.findall(r"\A\n((?: {4}.*\n)+)", section)
    assert block.split() == PACKAGES.split()[:-1]


def test_the_readme_fits_one_visit() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


def test_the_readme_names_every_page() -> None:
    assert [
        page.name for page in PAGES[1:] if page.relative_to(ROOT).as_posix() not in README
    ] == []


def test_a_wrong_setting_is_answered_as_it_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"\$ raydist train (\S+)\n +error: (.*?) …", README)
    ended = subprocess.run(
        [sys.executable, "-m", "raydist.train", shown[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {shown[1]}")


def tune_example() -> str:
    """Return the program of the page on sweeps that has raydist.run in Ray Tune."""
    _, _, section = (ROOT / "docs/sweeps.md").read_text().partition("## Inside Ray Tune\n")
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return str(example)


def test_the_example_of_ray_tune_finds_its_job_from_the_folder_of_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune calls the trainable there, not where the person typed the command."""
    (tmp_path / "train.py").touch()
    (tmp_path / "trial").mkdir()
    monkeypatch.chdir(tmp_path)
    tune, run = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(tune=tune))
    monkeypatch.setattr(raydist, "run", run)
    names: dict[str, Any] = {}
    exec(tune_example(), names)
    assert tune.Tuner.call_args.args[0] is tune.with_resources.return_value
    monkeypatch.chdir("trial")
    tune.with_resources.call_args.args[0]({"lr": 0.1})
    job, *settings = run.call_args.args
    assert Path(job).samefile(tmp_path / "train.py")
    assert "optim.lr=0.1" in settings
    assert tune.report.called
