"""The files for people who work on raydist: workflows, issue form, hooks, the documentation's
site."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
FORMS = [ROOT / ".github/ISSUE_TEMPLATE/bug.yml"]


@pytest.mark.parametrize("path", [*WORKFLOWS, *FORMS], ids=lambda path: path.name)
def test_github_understands_it(path: Path) -> None:
    schema = "vendor.github-workflows" if path in WORKFLOWS else "vendor.github-issue-forms"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_targets_that_are_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                targets = line.split()[1:] if line.startswith("make ") else []
                assert all(
                    re.search(rf"^[a-z -]*\b{target}\b[a-z -]*:", makefile, re.MULTILINE)
                    for target in targets
                )


def test_the_workflow_has_every_python() -> None:
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["fast"]
    pythons = tests["strategy"]["matrix"]["python"]
    assert pythons[0] == re.findall(r'requires-python = ">=([\d.]+)"', PYPROJECT)[0]
    assert pythons == [f"3.{minor}" for minor in range(10, 10 + len(pythons))]


def test_pre_commit_has_the_ruff_of_the_tests() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (revision,) = (repo["rev"] for repo in hooks["repos"] if "ruff" in repo["repo"])
    assert f'"ruff=={revision.removeprefix("v")}"' in PYPROJECT


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("x" * 72, False),
        ("x" * 73, True),
        (f"x\n\n{'x' * 99}\n", False),
        (f"{'x' * 73}\n\nx\n", True),
    ],
)
def test_the_subject_of_a_commit_is_short(message: str, refused: bool) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (subject,) = (
        hook for repo in hooks["repos"] for hook in repo["hooks"] if hook["id"] == "subject"
    )
    # As pygrep searches with --multiline.
    found = re.search(subject["entry"].encode(), message.encode(), re.MULTILINE | re.DOTALL)
    assert (found is not None) == refused


def test_every_page_is_in_the_navigation() -> None:
    shown = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    outside = set(re.findall(r'": "([\w-]+\.md)"', (ROOT / "docs/site.py").read_text()))
    assert shown == {path.name for path in ROOT.glob("docs/*.md")} | outside


def build_site(clone: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(clone / "mkdocs.yml"),
    ]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True)


def test_the_site_is_built_and_a_broken_link_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for path in ROOT.iterdir():  # files that pages link to
        if path.name not in ("docs", "build", ".git"):
            (tmp_path / path.name).symlink_to(path)
    done = build_site(tmp_path)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "build/site/index.html").read_text()
    assert 'href="faults/"' in start
    assert "docs/faults.md" not in start
    page = tmp_path / "docs/faults.md"
    page.write_text(page.read_text() + "\n[more](no-such-page.md)\n")
    wrong = build_site(tmp_path)
    assert wrong.returncode == 1
    assert "no-such-page.md" in wrong.stdout + wrong.stderr
