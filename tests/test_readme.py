"""What the README says holds: its tree, its example, its words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_structure import LAYERS, modules

README = (ROOT / "README.md").read_text()
PLACES = {
    "conf": "the groups of words, as files: conf/scale/local.yaml is scale=local",
    "jobs": "jobs to run, and to copy",
    "bench": "the figures, side by side with Ray Train, torchrun and horovodrun",
    "deploy": "clusters: Kubernetes, Docker, Slurm, machines of one's own",
    "docs": "jobs, programs, networks, faults, storage, Horovod, MPI, clusters",
    "tests": "real Ray, real ranks, real hosts in namespaces (tests/rig)",
}


# The way of a job through the files; what all need comes last.
FLOW = """
    train words run cluster lifetime gcs autoscaler ledger inventory placement shortage shipping preload home places
    reserve group sight script node fabric fabric_network fabric_horovod fabric_mpi fabric_findings fabric_site
    fabric_across findings transport traffic parcel target backends context loop apart snapshot sharded checkpoint
    writing direct storage attempts rescue mpi vigil lookout notice sentry pace stuck straggler restart result records
    blame failures remedy goodput watch standalone inline tools config check events errors signals
"""


def tree() -> str:
    """Every file of the package with the first line of its docstring, in the order of the flow."""
    files, order = modules(), LAYERS.split()
    assert {name for name in files if "." not in name} == set(FLOW.split()), (
        "FLOW lists all files at the top, and no other"
    )
    lines = ["raydist/"]
    for top in FLOW.split():
        inside = sorted((name for name in files if name.startswith(f"{top}.")), key=order.index)
        lines.append(f"    {top + ('/' if inside else '.py'):<22}{about(files[top])}")
        lines += [f"        {name.split('.')[1] + '.py':<22}{about(files[name])}" for name in inside]
    return "\n".join([*lines, *(f"{place + '/':<26}{what}" for place, what in PLACES.items())])


def about(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    return re.sub(r"\.? \([^()]*\)$", "", first)


def test_the_tree_is_the_one_of_the_code() -> None:
    assert tree() in README, f"put this into the README:\n{tree()}"


def test_every_file_it_links_to_is_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), ROOT / "bench" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.ray
@pytest.mark.parametrize("how", ["raydist", "torchrun", "alone"])
def test_its_example_runs_all_three_ways(
    tmp_path: Path, ray_address: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "def job" in code]
    (tmp_path / "mine.py").write_text(example)
    command = {
        "raydist": ["-m", "raydist.train", "job=mine.py", "job.args.hidden=64"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mine.py"],
        "alone": ["mine.py"],
    }[how]
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    ended = subprocess.run(
        [sys.executable, *command, "train.epochs=1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "loss" in ended.stdout


def test_a_wrong_word_is_answered_as_it_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"\$ python -m raydist\.train (\S+)\n +error: (.*?) …", README)
    ended = subprocess.run(
        [sys.executable, "-m", "raydist.train", shown[0]], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {shown[1]}")


if __name__ == "__main__":
    print(tree())
