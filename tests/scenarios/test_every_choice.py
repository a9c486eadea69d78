"""Every choice of every group in conf/, and every command of the pages, with 1 to 4 ranks, as a person types them.

Each runs to its end, or is refused with exit code 2 before a rank is started.
"""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.conftest import ROOT
from tests.horovod_ranks import requires_horovod
from tests.mpi_programs import SUM, requires_openmpi
from tests.programs import Program
from tests.scenarios.test_jobs import write_folder, write_mnist

pytestmark = [pytest.mark.ray, pytest.mark.slow, requires_horovod, requires_openmpi]

RANKS = (1, 2, 3, 4)
SHORT = ("train.steps=2", "train.epochs=1")
"""Two steps show the groups, the snapshots and the end of a run."""

TRAIN_COMMANDS = ("raydist.train", "raydist.tools.sweep")
OF_RANKS = (*TRAIN_COMMANDS, "raydist.tools.bandwidth", "raydist.tools.doctor")
"""Commands that have ranks, whether `scale=` is typed or not."""

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
    r"^[13] ranks: .*parallel\.[pt]p=2": "2 does not divide the ranks",
    r"^[124] ranks: .*parallel\.shard=3": "3 does not divide the ranks",
    r"^[123] ranks: .*process_sets": "the sets name four ranks",
    r"trian": "the page shows how a wrong setting is refused",
}
"""Choices and commands that must be refused with 2: a pattern for `N ranks: WORDS`, and why."""
FAILS = {
    r"job=cifar10": "torchvision knows the checksums of its files, which can't be made",
    r"^[234] ranks: parallel=tp$": "a job may plan the layers of its model: only the ranks know whether it does",
}
"""What the ranks refuse themselves, as REFUSED: the run fails with 1, and names the setting."""

NOT_HERE = {
    r"s3://": "no bucket; tests/scenarios/test_storage_rig.py has one",
    r"raydist\.tools\.submit|--address": "no dashboard; tests/scenarios/test_submit_rig.py has one",
    r"track=\S*wandb": "no account; tests/scenarios/test_track.py types it without one",
    r"raydist\.tools\.watch": "shows a run that is there: tests/scenarios/test_watch_page.py",
    r"raydist\.tools\.horovod build": "takes minutes; `make test` begins with it",
    r"-m bench": "makes the figures of a machine with GPUs: tests/test_bench.py",
    r"model\.size=1b": "takes 20 GiB",
    r"sweep\.resume=": "the folder of one sweep: tests/scenarios/test_sweep.py",
}
"""Commands of the pages that can't be typed here: a pattern, and why, or which test types one like it."""

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
        print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum))
    else:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def choices() -> Iterator[tuple[str, ...]]:
    """One choice of one group at a time: the files of conf/ are the list. `parallel=` with both kinds of model."""
    for path in sorted(ROOT.glob("conf/*/*.yaml")):
        word = f"{path.parent.name}={path.stem}"
        yield (word, *NEEDS.get(word, ()))
        if path.parent.name == "parallel":
            yield (word, "job=gpt")


def typed() -> list[tuple[str, ...]]:
    """The commands of the pages that can be typed here, made small."""
    found = [small(each.words) for each in commands.shown() if not not_here(each)]
    return sorted(set(found))


def not_here(command: commands.Command) -> bool:
    return any(re.search(pattern, command.text) for pattern in NOT_HERE)


def small(words: tuple[str, ...]) -> tuple[str, ...]:
    """The same command on one node, for a few steps. The number of ranks comes later, in place of {ranks}."""
    text = shlex.join(words)
    for pattern, instead in {
        r"'?scale(\.nodes)?=\d*\.\.\d+(x\d+)?'?": "scale=1..2x{ranks}",
        r"scale=(\d+x\d+|cluster)": "scale=1x{ranks}",
        r"--nnodes 2 --nproc-per-node 8|--nproc-per-node 2": "--nproc-per-node {ranks}",
        r"/(mnt/)?shared/runs": "shared",
        r"train\.(steps|epochs)=\d+": "train.steps=2",
        r"\bFILE\.py": "train.py",
        r"package\.module": "train",
        r"COMMAND": "./a.out",
        r"sweep\.trials=\d+": "sweep.trials=2",
        r"sweep\.min_steps=\d+": "sweep.min_steps=1",
        r"--min 1M --max 1G": "--min 1K --max 1M",
        r"runs/digits/[\w-]+": "newest",
    }.items():
        text = re.sub(pattern, instead, text)
    return tuple(shlex.split(text))


def run(folder: Path, address: str, words: tuple[str, ...], ranks: int) -> Program:
    """Type a command in a folder that has the files it names."""
    write_files(folder)
    module, *rest = python_module(words)
    rest = [word.replace("{ranks}", str(ranks)) for word in rest]
    if module in TRAIN_COMMANDS and not any(word.startswith("script=") for word in rest):
        rest += SHORT
    if module in OF_RANKS and not any(word.startswith("scale=") for word in rest):
        rest.append(f"scale=1x{ranks}")
    return Program(folder, *rest, module=module, address=address)


def python_module(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words after `python -m` of a command that starts Python or torchrun."""
    match words:
        case ("python", "-m", *rest):
            return tuple(rest)
        case ("python", script, *rest):
            return (script.removesuffix(".py"), *rest)
        case ("torchrun", *rest):
            return ("torch.distributed.run", *rest)
    raise AssertionError(words)


def write_files(folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "solve.py").write_text(SUM)
    (example,) = re.findall(r"```python\n(import torch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "mine.py").write_text(example)
    executable = folder / "a.out"
    executable.write_text(f"#!{sys.executable}\n" + SUM.replace("sys.argv[1:]", "[]"))
    executable.chmod(executable.stat().st_mode | stat.S_IXUSR)
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
    program = run(tmp_path, ray_address, ("python", "-m", "raydist.train", *words), ranks)
    assert_ends(program, expected_code(words, ranks))


def commands_with_ranks() -> Iterator[tuple[tuple[str, ...], int]]:
    """Each command of the pages with each number of ranks; one without ranks once."""
    for words in typed():
        has_ranks = "{ranks}" in shlex.join(words) or python_module(words)[0] in OF_RANKS
        for ranks in RANKS if has_ranks else RANKS[:1]:
            yield words, ranks


@pytest.mark.parametrize(("words", "ranks"), [*commands_with_ranks()])
def test_a_command_of_the_pages(words: tuple[str, ...], ranks: int, tmp_path: Path, ray_address: str) -> None:
    program = run(tmp_path, ray_address, words, ranks)
    assert_ends(program, expected_code(words, ranks))


def test_the_commands_that_are_left_out_are_on_the_pages() -> None:
    texts = [each.text for each in commands.shown()]
    assert [pattern for pattern in NOT_HERE if not any(re.search(pattern, text) for text in texts)] == []
