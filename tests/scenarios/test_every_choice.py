"""Every choice of every group in conf/, with 1 to 4 ranks, as a person types it.

Each runs to its end, or is refused with exit code 2 before a rank is started.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.horovod_ranks import requires_horovod
from tests.mpi_programs import SUM, requires_openmpi
from tests.programs import Program
from tests.scenarios.test_jobs import write_folder, write_mnist

pytestmark = [pytest.mark.ray, pytest.mark.slow, requires_horovod, requires_openmpi]

RANKS = (1, 2, 3, 4)
SHORT = ("train.steps=2", "train.epochs=1")
"""Two steps show the groups, the snapshots and the end of a run."""

NEEDS = {
    "backend=mpi": ("script=solve.py",),
    "backend=script": ("script=train.py",),
    "job=folder": ("data.root=images", "model=small_cnn_rgb", "data.batch_size=2"),
    "job=mnist": ("data.root=mnist", "data.batch_size=2"),
    "job=synthetic": ("model=small_cnn_rgb", "job.args.samples=256", "job.args.size=8"),
    "model=gpt": ("job=gpt",),
    "model=small_cnn_rgb": ("job=synthetic", "job.args.samples=256", "job.args.size=8"),
}
"""What a choice needs next to it."""
REFUSED = {
    r"backend=nccl": "this machine has no GPU",
    r"backend=ucc": "torch has no UCC",
    r"^[34] ranks: parallel=pp$": "the model of the digits has two blocks",
    r"^[34] ranks: parallel=tp job=gpt": "four heads, two heads of keys and values",
}
"""Choices that must be refused with 2: a pattern for `N ranks: WORDS`, and why."""
FAILS = {
    r"job=cifar10": "torchvision knows the checksums of its files, which can't be made",
    r"^[234] ranks: parallel=tp$": "a job may plan the layers of its model: only the ranks know whether it does",
}
"""What the ranks refuse themselves, as REFUSED: the run fails with 1, and names the setting."""

TRAIN = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def choices() -> Iterator[tuple[str, ...]]:
    """One choice of one group at a time: the files of conf/ are the list. `parallel=` with both kinds of model."""
    for path in sorted(ROOT.glob("conf/*/*.yaml")):
        word = f"{path.parent.name}={path.stem}"
        yield (word, *NEEDS.get(word, ()))
        if path.parent.name == "parallel":
            yield (word, "job=gpt")


def run(folder: Path, address: str, words: tuple[str, ...], ranks: int) -> Program:
    """Type a command in a folder that has the files it names."""
    write_files(folder)
    size = f"scale.per_node={ranks}" if words[0].startswith("scale=") else f"scale=1x{ranks}"
    short = () if any(word.startswith("script=") for word in words) else SHORT
    return Program(folder, *words, size, *short, address=address)


def write_files(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "solve.py").write_text(SUM)
    write_mnist(folder / "mnist")
    write_folder(folder / "images")


def expected_code(words: tuple[str, ...], ranks: int) -> int:
    text = f"{ranks} ranks: {' '.join(words)}"
    for code, patterns in ((2, REFUSED), (1, FAILS)):
        if any(re.search(pattern, text) for pattern in patterns):
            return code
    return 0


def assert_ends(program: Program, expected: int) -> None:
    """It ends by itself with this exit code; a refused one has started no rank."""
    try:
        code = program.wait(180)
    except subprocess.TimeoutExpired:
        program.process.terminate()
        program.wait(60)
        pytest.fail(f"it did not end within 180 s:\n{program.screen}")
    assert code == expected, program.screen
    if code == 0:
        return
    assert re.search(r"(^e|ConfigE)rror: ", program.screen, re.MULTILINE), program.screen
    if code == 2:
        assert not started(program), program.screen


def started(program: Program) -> bool:
    """Whether it has started ranks."""
    return any('"kind": "began"' in path.read_text() for path in program.folder.glob("runs/*/*/events.jsonl"))


@pytest.mark.parametrize("words", [*choices()], ids="_".join)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_choice(words: tuple[str, ...], ranks: int, tmp_path: Path, ray_address: str) -> None:
    program = run(tmp_path, ray_address, words, ranks)
    assert_ends(program, expected_code(words, ranks))
