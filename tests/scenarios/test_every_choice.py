"""Every choice of every group in conf/ on three ranks, as a person types it: choices of different
groups together; those that depend on the number of ranks separately, with 1 or 4, too.

Each runs to its end, or is refused with exit code 2 before a rank is started.
"""

from __future__ import annotations

import argparse
import re
import stat
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from raydist.settings import compose
from raydist.settings.config import Job
from tests.conftest import ROOT
from tests.horovod_ranks import requires_horovod
from tests.mpi_programs import SUM, requires_openmpi
from tests.programs import Program
from tests.scenarios.test_jobs import write_folder, write_mnist

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    requires_horovod,
    requires_openmpi,
]
LIMIT_S = 600
"""Limit on the seconds of a command on a busy machine."""

SEPARATE = ("backend", "parallel")
"""Groups whose choices depend on the number of ranks."""
RANKS = (1, 3)
"""For those: alone, and an odd number. Most other tests have two ranks. Other groups: three."""
RANKS_OF_TEXT = (4,)
"""The same for the language model: a number that tp, pp and shards divide. (It runs under every
division with other numbers in test_jobs.py.)"""
SHORT = ("train.steps=2", "train.epochs=1")
"""Two steps show the groups, the snapshots and the end of a run."""
SHORT_TEXT = ("data.root=text", "job.args.held_out=32", "job.args.sample=10")
"""The same of job=gpt, which would read all of Python's sources on each rank, and write 200
tokens."""

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
SAME_JOB = {
    ("backend=auto",): ("job=digits",),
    ("fabric=auto",): ("job=digits",),
    ("model=small_cnn",): ("job=digits",),
    ("optim=adamw",): ("job=digits",),
    ("parallel=ddp",): ("job=digits",),
    ("restart=some",): ("job=digits",),
    ("scale=local",): ("job=digits",),
    ("model=gpt", "job=gpt"): ("job=gpt",),
    ("parallel=ddp", "job=gpt"): ("job=gpt",),
    ("model=small_cnn_rgb", *NEEDS["model=small_cnn_rgb"]): (
        "job=synthetic",
        *NEEDS["job=synthetic"],
    ),
}
"""Choices that are the default: they give the same Job as other words, and those run."""
REFUSED = {
    r"backend=nccl": "this machine has no GPU",
    r"backend=ucc": "torch has no UCC",
    r"^[34] ranks: parallel=pp$": "the model of the digits has two blocks",
    r"^[34] ranks: parallel=tp job=gpt": "four heads, two heads of keys and values",
    r"^[13] ranks: .*parallel\.[pt]p=2": "2 does not divide the ranks",
    r"^[124] ranks: .*parallel\.shard=3": "3 does not divide the ranks",
    r"^[123] ranks: .*process_sets": "the sets name four ranks",
    r"scale\.spares=1": "the spare is a second node, and this Ray has one",
    r"trian\.": "the page shows how a wrong setting is refused",
    r"fabric\.interface=ib0": "this machine has no ib0",
    r"tools\.launch$": "a sentence names the command, without a program",
}
"""Choices and commands that must be refused with 2: a pattern for `N ranks: WORDS`, and why."""
FAILS = {
    r"job=cifar10": "torchvision knows the checksums of its files, which can't be made",
    r"^[234] ranks: .*job=broken\.py": "the page breaks it",
    r"^[234] ranks: parallel=tp$": "a job may plan the layers of its model: only the ranks know "
    "whether it does",
}
"""What the ranks refuse themselves, as REFUSED: the run fails with 1, and names the setting."""

OF_RANKS = (
    "raydist.train",
    "raydist.tools.sweep",
    "raydist.tools.bandwidth",
    "raydist.tools.doctor",
)
"""Commands that start ranks: the number in `scale=`, or those of this machine without it."""
TRAIN = """
import os
import torch
import torch.distributed as dist
import raydist

def job(config):
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randint(2, (256,)))
    net, loss = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
    return raydist.fit(config, model=net, train=data, test=data, loss=loss)

def main():
    if "HOROVOD_RANK" in os.environ:
        import horovod.torch as hvd
        hvd.init()
        hvd.allreduce(torch.ones(1))
    else:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
"""A program and a job, as the pages call both train.py."""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trackers keep caches and settings in the home, and would use an account that is found
    there."""
    with pytest.MonkeyPatch.context() as on:
        on.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        on.setenv("WANDB_MODE", "offline")
        yield


def choices() -> Iterator[tuple[str, ...]]:
    """Yield one choice of one group at a time: the files of conf/ are the list. `parallel=` with
    both kinds of model."""
    for path in sorted(ROOT.glob("conf/*/*.yaml")):
        word = f"{path.parent.name}={path.stem}"
        both = ("job=gpt",) if path.parent.name == "parallel" else ()
        for words in ((word, *NEEDS.get(word, ())), *((word, each) for each in both)):
            if words not in SAME_JOB:
                yield words


def run(folder: Path, address: str, words: tuple[str, ...], ranks: int) -> Program:
    """Type a command in a folder that has the files it names."""
    write_files(folder)
    module, *rest = (word.replace("{ranks}", str(ranks)) for word in words)
    return Program(folder, *rest, module=module, address=address)


def write_files(folder: Path) -> None:
    (example,) = re.findall(
        r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    programs = dict.fromkeys(("FILE.py", "package/module.py", "pkg/train.py", "train.py"), TRAIN)
    wrong = '    if raydist.rank().rank == 1:\n        hidden = "64"\n'
    programs["broken.py"] = example.replace("    net = ", f"{wrong}    net = ")
    programs |= {"mine.py": example, "solve.py": SUM, "command": "#!/bin/sh\necho rank $RANK\n"}
    programs["a.out"] = f"#!{sys.executable}\n{SUM.replace('sys.argv[1:]', '[]')}"
    for name, text in programs.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    write_mnist(folder / "mnist")
    write_folder(folder / "images")
    (folder / "text").mkdir()
    (folder / "text/argparse.py").write_bytes(Path(argparse.__file__).read_bytes())


def expected_code(words: tuple[str, ...], ranks: int) -> int:
    text = f"{ranks} ranks: {' '.join(words)}"
    for code, patterns in ((2, REFUSED), (1, FAILS)):
        if any(re.search(pattern, text) for pattern in patterns):
            return code
    return 0


def assert_ends(program: Program, expected: int) -> None:
    """It ends by itself with this exit code; a refused one has started no rank."""
    try:
        code = program.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        program.process.terminate()
        program.wait(60)
        pytest.fail(f"it did not end within {LIMIT_S} s:\n{program.screen}")
    assert code == expected, program.screen
    if code == 0:
        return
    assert re.search(r"(^e|\wE)rror: ", program.screen, re.MULTILINE), program.screen
    if code == 2:
        assert not started(program), program.screen


def started(program: Program) -> bool:
    """Return whether the command has started ranks."""
    return any(
        '"kind": "began"' in path.read_text()
        for path in program.folder.glob("runs/*/*/events.jsonl")
    )


def sizes() -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield commands that have all choices, each with a number of ranks.

    A choice of a group in SEPARATE has commands of its own, and so has one that does not run. Of
    all other groups the first choices are one command, the second ones are another, …
    """
    together: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for words in choices():
        group, _, _ = words[0].partition("=")
        if group not in SEPARATE and not expected_code(words, 3):
            together[group].append(words)
        elif group not in SEPARATE or expected_code(words, 1) == 2:  # alike with any number
            yield 3, words
        else:
            numbers = RANKS_OF_TEXT if "job=gpt" in words else RANKS
            yield from ((ranks, words) for ranks in numbers)
    for row in zip_longest(*together.values(), fillvalue=()):
        yield 3, tuple(chain(*row))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [*sizes()],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_a_choice(ranks: int, words: tuple[str, ...], tmp_path: Path, ray_address: str) -> None:
    program = run(tmp_path, ray_address, short("raydist.train", *words), ranks)
    assert_ends(program, expected_code(words, ranks))


@pytest.mark.parametrize(("words", "others"), SAME_JOB.items(), ids=str)
def test_a_default_that_is_typed_changes_nothing(
    words: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert composed(words) == composed(others)


def composed(words: tuple[str, ...]) -> Job:
    """Return the Job of a command for two ranks."""
    _, *rest = short("raydist.train", *words)
    return compose.compose([word.replace("{ranks}", "2") for word in (*rest, "hydra.run.dir=run")])


def short(module: str, *words: str) -> tuple[str, ...]:
    """Return a command that starts {ranks} ranks for two steps."""
    if module not in OF_RANKS or "--help" in words or "--cfg" in words:
        return (module, *words)
    scales = [word for word in words if word.startswith("scale=")]
    size = {"scale=local": "scale.per_node={ranks}", "scale=cluster": "scale.per_node={ranks}"}
    scale = [size[word] for word in scales if word in size] if scales else ["scale=1x{ranks}"]
    trains = module in OF_RANKS[:2] and not any(word.startswith("script=") for word in words)
    text = SHORT_TEXT if "job=gpt" in words and "job.args." not in str(words) else ()
    return (module, *words, *scale, *text, *(SHORT if trains else ()))
