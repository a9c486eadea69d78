"""cluster.yaml held against Ray's own schema, and what it sends and runs held against what is
there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.conftest import ROOT

TEXT = (ROOT / "cluster.yaml").read_text()
NODE = ROOT / "deploy" / "node"


def test_ray_takes_the_file() -> None:
    settings = prepare_config(yaml.safe_load(TEXT))
    validate_config(settings)
    (kind,) = settings["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (2, 2)  # all that are named, always


def test_all_that_it_sends_is_there() -> None:
    config = yaml.safe_load(TEXT)
    ours = [source for source in config["file_mounts"].values() if not source.startswith("~")]
    assert [source for source in ours if not (ROOT / source).exists()] == []
    commands = [
        *config["setup_commands"],
        *config["head_start_ray_commands"],
        *config["worker_start_ray_commands"],
    ]
    run = set(re.findall(r"~/\.raydist/src/(\S+\.sh)", " ".join(commands)))
    assert run == {f"deploy/node/{path.name}" for path in NODE.glob("*.sh")}


def test_a_person_changes_three_lines() -> None:
    marked = [
        line.split("#")[1].split(".")[0].strip()
        for line in TEXT.splitlines()
        if re.search(r"# \d\. ", line)
    ]
    assert marked == ["1", "2", "3"]


def test_the_versions_of_the_nodes_were_tried_and_are_admitted() -> None:
    """Those of the image, which tests/deploy/test_deploy.py compares with docs/versions.md."""
    (line,) = yaml.safe_load(TEXT)["setup_commands"]
    assert f"- {line} " in (ROOT / "docs" / "clusters.md").read_text()
    named = re.findall(r"\b(RAY|TORCH)=(\S+)", line)
    image = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert named == re.findall(r"^ARG (RAY|TORCH)=(.+)$", image, re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    for name, version in named:
        (asked,) = re.findall(
            rf'^    "({name.lower()}(?:\[\w+\])?>=[^"]*)",', project, re.MULTILINE
        )
        assert version in Requirement(asked).specifier


def test_the_scripts_are_sound() -> None:
    check = [Path(sys.executable).parent / "shellcheck", *NODE.glob("*.sh"), ROOT / ".ci" / "run"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_the_page_tells_what_nodes_start_with() -> None:
    source = (NODE / "environment.sh").read_text()
    source = source.replace("$(id -u)", "UID")
    starts = re.findall(r'^export (RAY_\w+)="?(?:\$\{\w+:-)?([\w/-]+)', source, re.MULTILINE)
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert re.findall(r"^\| `(RAY_\w+)` \| `?([\w/-]+)`? \|", page, re.MULTILINE) == starts
    (fixed,) = re.findall(r"^export (RAY_\w+)=\w", source, re.MULTILINE)
    assert f"are not overridden, except `{fixed}`:" in " ".join(page.split())
