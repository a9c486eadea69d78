"""`raydist profile`, as a person types it beside a program that knows nothing of it."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.programs import Program
from tests.scenarios.test_operate import FIT, operate, refusal

LOOP = """
    import os, time
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import raydist

    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "has met the others", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.05)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = None
    for step in range(1, 1000000):
        if os.path.exists("own") and own is None:
            own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            own.__enter__()
            print("rank", dist.get_rank(), "profiles itself", flush=True)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if own is not None and not os.path.exists("own"):
            own.__exit__(None, None, None)
            print("rank", dist.get_rank(), "has", len(own.events()) > 0, flush=True)
            own = None
        raydist.report(step=step)
        time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A loop of two ranks, which makes no step yet."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "loop.py").write_text(textwrap.dedent(LOOP))
    words = ("script=loop.py", "scale=1x2", "group=inline", "restart=none")
    program = Program(folder, *words)
    program.wait_until(lambda: program.screen.count("has met the others") == 2, "the ranks")
    done = operate(folder, "profile")
    assert (done.returncode, done.stdout) == (2, "")
    assert "type seconds=2" in done.stderr  # it has made no step
    (folder / "go").touch()
    program.wait_for_step(2)
    yield program
    program.process.kill()
    program.process.wait()
    assert program.leftovers() == []


def profile(program: Program, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """What `raydist profile` prints first, and the events of its file. The program continues."""
    done = operate(program.folder, "profile", *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return written(program, done.stdout)


def written(program: Program, printed: str) -> tuple[str, list[dict[str, Any]]]:
    """The first line that `raydist profile` has printed, and the events of its file."""
    first, *_, last = printed.splitlines()
    found = re.fullmatch(r"profile: (\S+) in the run folder", last)
    assert found is not None, printed
    with gzip.open(program.run_dir / found[1], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    (event,) = [each for each in program.events("operated") if each["file"] == found[1]]
    assert event["command"] == "profile"
    assert [each for each in (program.run_dir / "operate").iterdir() if each.is_dir()] == []
    program.wait_for_step(program.events("report")[-1]["step"] + 5)
    return first, events


def steps_of(events: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    """How often the file has each step, and calls of the optimizer: by the process of the file."""
    return Counter(
        (event["pid"], event["name"])
        for event in events
        if event.get("cat") == "step" or event["name"].startswith("Optimizer.step")
    )


def test_the_same_steps_of_all_ranks_are_in_one_file(loop: Program) -> None:
    first, events = profile(loop, "steps=3")
    begin, end = map(int, re.findall(r"\d+", first)[:2])
    assert first == f"profiling steps {begin} to {end} of ranks 0-1"
    assert end == begin + 2
    rows = {
        event["args"]["name"].partition(" · ")[0]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }
    assert rows.keys() == {"rank 0", "rank 1"}
    assert steps_of(events) == Counter(
        {(pid, f"step {step}"): 1 for pid in rows.values() for step in range(begin, end + 1)}
        | {(pid, "Optimizer.step#SGD.step"): 3 for pid in rows.values()}
    )
    reduced = Counter(event["pid"] for event in events if event["name"] == "gloo:all_reduce")
    assert reduced == dict.fromkeys(rows.values(), 3)


def test_one_rank_for_some_time(loop: Program) -> None:
    first, events = profile(loop, "rank=1", "seconds=1.5")  # steps of a busy machine too
    assert first == "profiling 1.5 s of rank 1"
    assert {event["pid"] for event in events} == {1001}
    assert any(event["name"] == "gloo:all_reduce" for event in events)
    done = operate(loop.folder, "profile", "rank=1", "memory=true")
    assert done.returncode == 1
    assert "rank 1 can't be profiled: memory=true is about GPUs" in done.stderr


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("steps=0", "steps=5"),
        ("steps=x", "steps=5"),
        ("seconds=0", "seconds=2"),
        ("seconds=61", "seconds=2"),
        ("memory=yes", "memory=true"),
        ("rank=2", "rank=1"),
        ("stps=3", "rank=3"),
    ],
)
def test_wrong_words_are_refused(
    loop: Program,
    word: str,
    instead: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(loop.folder)
    error = refusal(capsys, "profile", word)
    assert error.startswith(f"error: {word}: ")
    assert instead in error


def test_the_programs_own_profiler_comes_first(loop: Program) -> None:
    """Two profilers in a process crash it: one that is active keeps raydist's from beginning, and
    one that begins ends raydist's."""
    (loop.folder / "own").touch()
    loop.wait_until(lambda: loop.screen.count("profiles itself") == 2, "the program's profiler")
    done = operate(loop.folder, "profile")
    assert done.returncode == 1
    assert "ranks 0-1 can't be profiled: the program's own profiler is active" in done.stderr
    (loop.folder / "own").unlink()
    loop.wait_until(lambda: loop.screen.count("has True") == 2, "the program's profile")
    profile(loop, "steps=2")


def test_a_profile_ends_when_the_program_begins_its_own(loop: Program) -> None:
    before = loop.screen.count("profiles itself")
    asking = subprocess.Popen(
        [sys.executable, "-m", "raydist.cli", "profile", "steps=1000"],
        cwd=loop.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asking.stdout is not None
    said = asking.stdout.readline()
    step = int(re.findall(r"\d+", said)[0])
    loop.wait_for_step(step + 3)
    (loop.folder / "own").touch()
    loop.wait_until(
        lambda: loop.screen.count("profiles itself") == before + 2, "the program's profiler"
    )
    said += asking.communicate(timeout=300)[0]
    (loop.folder / "own").unlink()
    _, events = written(loop, said)
    steps = Counter(event["pid"] for event in events if event.get("cat") == "step")
    assert steps.keys() == {1, 1001}
    assert all(0 < count < 1000 for count in steps.values())


SHORT = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(8):
        weight.grad = torch.ones(1)
        dist.all_reduce(weight.grad)
        optimizer.step()
"""


def profiled(program: Program) -> Counter[tuple[int, str]]:
    """The steps in the file that a run with watch.profile has written."""
    (event,) = program.events("operated")
    with gzip.open(program.run_dir / event["file"], "rt") as file:
        return steps_of(json.load(file)["traceEvents"])


def test_a_run_profiles_steps_from_its_start(tmp_path: Path) -> None:
    """The program ends before the last of them: the file has those that it made."""
    (tmp_path / "short.py").write_text(textwrap.dedent(SHORT))
    words = ("script=short.py", "scale=1x2", "group=inline", "watch.profile=5..20")
    program = Program(tmp_path, *words)
    assert program.wait() == 0, program.screen
    assert profiled(program) == Counter(
        {(pid, f"step {step}"): 1 for pid in (1, 1001) for step in (5, 6, 7, 8)}
        | {(pid, "Optimizer.step#SGD.step"): 4 for pid in (1, 1001)}
    )


def test_steps_of_fit_have_its_numbers(tmp_path: Path) -> None:
    """Its first ones, on one rank, and those that a person asks for."""
    (tmp_path / "fits.py").write_text(textwrap.dedent(FIT))
    words = ("job=fits.py", "scale=1x1", "group=inline", "data.batch_size=4", "train.accumulate=2")
    endless = ("train.epochs=1000000", "checkpoint.every=1000000000")
    program = Program(tmp_path, *words, *endless, "optim=sgd", "watch.profile=2..3")
    program.wait_for_step(2)
    program.wait_until(lambda: bool(program.events("operated")), "the first profile")
    assert profiled(program) == Counter(
        {(1, "step 2"): 1, (1, "step 3"): 1, (1, "Optimizer.step#SGD.step"): 2}
    )
    first, events = profile(program, "steps=2")
    begin = int(re.findall(r"\d+", first)[0])
    names = {event["name"] for event in events if event.get("cat") == "step"}
    assert names == {f"step {begin}", f"step {begin + 1}"}
    reported = [each["step"] for each in program.events("report")]
    asked = reported.index(begin)
    assert asked < len(reported) - 1
    assert operate(tmp_path, "stop").returncode == 0
    assert program.wait() == 128 + signal.SIGTERM


def test_steps_that_can_not_be_profiled_are_refused(tmp_path: Path) -> None:
    done = operate(tmp_path, "train", "watch.profile=7..3")
    assert (done.returncode, done.stdout) == (2, "")
    assert "watch.profile=7..12" in done.stderr
