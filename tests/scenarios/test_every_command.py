"""Every command of the pages, as a person types it, with three ranks where it runs with three.

Each runs to its end, or is refused with exit code 2 before a rank is started. Those of later pages
whose settings run in other tests are only composed.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.settings import compose
from tests import commands
from tests.horovod_ranks import requires_horovod
from tests.mpi_programs import requires_openmpi
from tests.scenarios.test_every_choice import (
    LIMIT_S,
    SHORT_TEXT,
    assert_ends,
    choices,
    expected_code,
    home,
    run,
    short,
    write_files,
)
from tests.watch.test_web_mirror import write_run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    requires_horovod,
    requires_openmpi,
]
__all__ = ["home"]

NOT_HERE = {
    r"s3://": "no bucket; tests/scenarios/test_storage_rig.py has one",
    r"tools\.submit|--job|--address": "no dashboard; tests/scenarios/test_submit_rig.py and "
    "test_watch_rig.py have one",
    r"tools\.(ranks|stacks|exec|debug|profile|save|set|stop)": "a run that runs; tests/scenarios/test_operate.py types them",
    r"tools\.sweep add": "the folder of a sweep; tests/scenarios/test_sweep_add.py adds to one",
    r"tools\.queue": "runs that wait; tests/scenarios/test_queue.py types it",
    r"_sweep$": "the folder of a sweep; tests/scenarios/test_sweep.py resumes one, "
    "test_sweep_watched.py shows one",
    r"--multirun": "several runs; tests/scenarios/test_train.py types it",
    r"-m bench": "the figures of a whole machine; tests/test_bench.py",
    r"-m pytest": "the tests themselves",
    r"deploy/node/versions\.py": "a file in the sources; tests/deploy/test_node_setup.py types it",
    r"tools\.bandwidth.*--pairs": "one row more; tests/tools/test_bandwidth.py types it",
}
"""Commands of the pages that aren't typed here: a pattern, why, and which test types one like
it."""
COMPOSED = {
    r"optim=adamw": "test_every_choice.py",
    r"parallel\.[tp]p=2": "test_jobs.py",
    r"process_sets=": "test_horovod.py",
    r"queue\.(limit|priority)=": "test_queue.py",
    r"restart\.in_place=": "test_in_place_run.py",
    r"scale\.cpus=": "test_elastic_run.py",
    r"script=(FILE|train)\.py|script=-m|scale\.per_node=1": "tests/worker/test_program.py",
    r"script=\./a\.out": "tests/launch/test_mpirun.py",
    r"storage=/": "test_slow_storage.py",
    r"track=": "test_track.py",
    r"watch\.page=": "test_watch_page.py",
}
"""Commands of raydist.train that are only composed, unless they are on the first pages: a pattern,
and which test runs with these settings."""

MADE_SMALL = {
    r"'?scale(\.nodes)?=\d*\.\.\d+(x\d+)?'?": "scale=1..2x{ranks}",
    r"scale=(\d+x\d+|cluster)(?![\w,])": "scale=1x{ranks}",
    r"--nnodes 2 --nproc-per-node 8|--nproc-per-node [28]": "--nproc-per-node {ranks}",
    r"scale\.per_node=1": "scale.per_node={ranks}",
    r"/mnt/shared/runs": "shared",
    r"model\.size=1b": "model.size=1m",
    r"context=2048": f"context=64 {' '.join(SHORT_TEXT)}",
    r"=(COMMAND|nvidia-smi)$": "=./command",
    r"train\.(epochs=(5|150)|steps=10000)": "train.steps=2",
    r"FOLDER": "runs",
    r"report\.html": "page.html",
    r"sweep\.trials=\d+": "sweep.trials=2",
    r"sweep\.min_steps=\d+": "sweep.min_steps=1",
    r"optim\.lr=0\.1,0\.03,0\.01": "optim.lr=0.1",
    r"tools\.bandwidth(?= |$)": "tools.bandwidth --max 64K",
    r"--max 1G": "--max 2M",
}
"""What a command has on one node with 4 CPUs in place of what it has on a page."""
NO_RANKS = r"tools\.(plan|doctor)|--cfg|trian|backend=nccl"
"""Commands that start no ranks, though they have `scale=`."""
SERVES = r"tools\.watch(?!.*--(export|trace))"
"""A command that runs until Ctrl-C."""


def commands_here() -> Iterator[tuple[tuple[str, ...], int, bool]]:
    """Yield the commands on the pages that can be typed here, with a number of ranks that they do
    not refuse: 3, an odd one, if possible; and whether they are run, or composed.

    test_every_choice.py runs choices, and the defaults among them, with other numbers, too.
    """
    seen = {frozenset(short("raydist.train", *words)) for words in ((), *choices())}
    first = commands.commands_on_pages(commands.FIRST_PAGES)
    for shown in commands.commands_on_pages():
        text = shlex.join(shown)
        if any(re.search(pattern, text) for pattern in NOT_HERE):
            continue
        words = short(*small(shown))
        if frozenset(words) not in seen:
            seen.add(frozenset(words))
            has_ranks = "{ranks}" in str(words) and not re.search(NO_RANKS, " ".join(words))
            numbers = [each for each in (3, 4, 2, 1) if expected_code(words, each) != 2]
            composed = (
                shown not in first
                and words[0] == "raydist.train"
                and any(re.search(pattern, text) for pattern in COMPOSED)
            )
            yield words, numbers[0] if has_ranks and numbers else 3, not composed


def small(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words after `python -m` of the command as it runs here, with {ranks} for the
    number of ranks."""
    text = shlex.join(words)
    for pattern, instead in MADE_SMALL.items():
        text = re.sub(pattern, instead, text)
    match shlex.split(text):
        case ["python", "-m", *rest]:
            return tuple(rest)
        case ["python", script, *rest]:
            return (script.removesuffix(".py"), *rest)
        case ["torchrun", *rest]:
            return ("torch.distributed.run", *rest)
    raise AssertionError(words)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(words, ranks) for words, ranks, run_it in commands_here() if run_it],
    ids=lambda value: value if isinstance(value, int) else "_".join(value),
)
def test_a_command_of_the_pages(
    words: tuple[str, ...], ranks: int, tmp_path: Path, ray_address: str
) -> None:
    if {"raydist.tools.watch", "raydist.tools.note"} & {*words}:
        write_run(tmp_path / "runs/digits/2026-11-22_18-57-42")
    if "--with" in words:
        write_run(tmp_path / "runs/digits/2026-11-22_19-03-35")
    program = run(tmp_path, ray_address, words, ranks)
    if re.search(SERVES, " ".join(words)):
        program.wait_until(lambda: "http://" in program.screen, "link", LIMIT_S)
        program.signal(signal.SIGINT)
    assert_ends(program, expected_code(words, ranks))
    if "mine" in str(words):
        assert "loss" in program.screen  # README's example trains, by whichever launcher


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(words, ranks) for words, ranks, run_it in commands_here() if not run_it],
    ids=lambda value: value if isinstance(value, int) else "_".join(value),
)
def test_a_command_whose_settings_run_elsewhere_is_accepted(
    words: tuple[str, ...], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    compose.compose([word.replace("{ranks}", str(ranks)) for word in words[1:]])


def test_what_is_left_out_or_made_small_is_on_the_pages() -> None:
    shown = [shlex.join(words) for words in commands.commands_on_pages()]
    patterns = [*NOT_HERE, *COMPOSED, *MADE_SMALL, SERVES]
    assert [
        pattern for pattern in patterns if not any(re.search(pattern, text) for text in shown)
    ] == []
