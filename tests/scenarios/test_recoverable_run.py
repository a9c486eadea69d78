"""A loop of one's own goes back by raydist.Recoverable: killed ranks are replaced, to the bit."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import raydist
from raydist.reporting.result import Result
from raydist.shared.rank_names import name_ranks
from raydist.worker import context
from raydist.worker.torch_private import connects_anew
from tests import faults
from tests.conftest import ROOT
from tests.faults import Fault, kill
from tests.leftovers import alive
from tests.programs import Program
from tests.scenarios.test_in_place_run import pids
from tests.scenarios.test_restart_run import events, losses

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not connects_anew(), reason="this torch cannot connect ranks anew"),
]
RANKS = 3
WORDS = (
    f"scale=1x{RANKS}",
    "group=inline",
    "watch.progress=none",
    "snapshot.every=1",
    "restart.max=9",
    "hang.limit_s=90",
)


class Struck(nn.Module):
    """A layer in which ranks are struck: in its forward pass at even steps, in backward at odd."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        step = context.current().step
        if step % 2 == 0:
            faults.strike(step)
        outputs = inputs * 1
        if step % 2 and outputs.requires_grad:
            outputs.register_hook(lambda gradient: faults.strike(step))  # type: ignore[no-untyped-call]
        return outputs


def own_loop(
    config: Any, struck: tuple[Fault, ...] = (), used: bool = False, pause: float = 0.0
) -> dict[str, Any]:
    """Train in a loop of one's own; return the final state to the last bit.

    `used`: the ranks agree on something before they train. `pause`: seconds in each step.
    """
    faults.add_faults(*struck)
    me = raydist.rank()
    if used:
        torch.distributed.barrier()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 10, generator=generator)
    targets = torch.randint(3, (256,), generator=generator)
    torch.manual_seed(0)
    last = nn.Linear(64, 3)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), Struck(), last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    order = torch.Generator().manual_seed(2)
    average, own = torch.zeros(3), torch.zeros(())
    torch.manual_seed(me.rank)  # another dropout on each rank
    parts: dict[str, Any] = {"schedule": schedule, "order": order, "average": average, "own": own}
    training = raydist.Recoverable(config, model=model, optimizer=optimizer, **parts)
    for step in training.steps(40):
        with training.step():
            time.sleep(pause)
            chosen = torch.randperm(256, generator=order)[me.rank :: me.world_size][:8]
            loss = cross_entropy(training.model(inputs[chosen]), targets[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            average.lerp_(last.bias.detach(), 0.1)
            own += loss.detach()  # another number on each rank
            raydist.report(step=step, loss=loss)
    weights = {name: each.tolist() for name, each in model.state_dict().items()}
    random = torch.get_rng_state().tolist()
    return {"weights": weights, "random": random, "average": average.tolist(), "own": own.item()}


def train(*words: str, struck: tuple[Fault, ...] = (), **more: Any) -> Result[Any]:
    return raydist.run(own_loop, *WORDS, *words, struck=struck, **more)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The runs are in an empty folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path_factory.mktemp("recoverable"))
        yield


@pytest.fixture(scope="module")
def whole(folder: None) -> Result[Any]:
    """A run without a fault, whose ranks are connected once and for all."""
    return train()


def same(done: Result[Any], whole: Result[Any]) -> None:
    """Assert that two runs have the same results to the bit."""
    assert done.status == "finished"
    assert (done.values, losses(done)) == (whole.values, losses(whole))


STRUCK = (
    kill(1, 9),  # in backward
    kill(1, 0, 1),  # the new one, before it has made a step
    kill(0, 20, 2),  # rank 0, in forward
    kill(1, 30, 3),
    kill(2, 30, 3),  # two at once
)


def test_only_killed_ranks_of_an_own_loop_are_replaced(whole: Result[Any]) -> None:
    done = train("restart.in_place=on", struck=STRUCK)
    same(done, whole)
    ran = pids(done)
    stayed = [
        {rank for rank in range(RANKS) if before[rank] == after[rank]}
        for before, after in itertools.pairwise(ran)
    ]
    killed = [{1}, {1}, {0}, {1, 2}]
    as_few = [{*range(RANKS)} - gone == kept for gone, kept in zip(killed, stayed, strict=False)]
    # On a busy machine, or in gloo, a rank may be stuck: then it is forked too.
    assert sum(as_few) > 1
    kept = {event["number"]: event.get("kept", []) for event in events(done, "restarted")}
    assert kept.items() <= dict(enumerate(map(sorted, stayed), 1)).items()
    number, these = next((number, each) for number, each in kept.items() if each)
    shown = f"in place, {name_ranks(these)} kept their processes"
    if len(these) > 1:
        assert shown in (done.dir / f"blame-{number}.txt").read_text()
    assert not [pid for each in ran for pid in each.values() if alive(pid)]


def test_the_same_loop_goes_on_when_all_ranks_are_forked(whole: Result[Any]) -> None:
    done = train(struck=(kill(1, 9), kill(0, 20, 1)))
    same(done, whole)
    # ranks that are stopped at the same moment may be one step apart
    assert max(event["repeated"] for event in events(done, "restarted")) <= 1
    first, *later = pids(done)
    assert later
    assert not {*first.values()} & {*later[0].values()}


def test_a_rank_of_an_own_loop_that_is_stopped_is_replaced(whole: Result[Any]) -> None:
    done = train("restart.in_place=on", struck=(Fault("stop", 2, 20),), pause=0.15)
    same(done, whole)
    (back,) = events(done, "restarted")
    first, second = pids(done)
    kept = [rank for rank in range(RANKS) if first[rank] == second[rank]]
    # On a busy machine, or in gloo, a rank may be stuck: then it is forked too.
    assert kept
    assert 2 not in kept
    assert back["kept"] == kept
    assert not alive(first[2])


def test_an_own_loop_goes_on_in_another_run(whole: Result[Any]) -> None:
    words = ("hydra.run.dir=again", "checkpoint.every=6")
    with pytest.raises(raydist.RunFailed):
        train(*words, "restart.max=0", struck=(kill(1, 21),))
    done = train(*words, "resume=auto")
    (begun,) = [each["resumed"] for each in events(done, "begin") if each["rank"] == 0][-1:]
    assert begun in (20, 21)
    # Of what differs among ranks the checkpoint has rank 0's.
    mine, other = ([{**(each or {}), "own": 0} for each in one.values] for one in (done, whole))
    assert mine == other
    assert done.values[0] == whole.values[0]
    assert losses(done) == losses(whole)


def test_an_own_loop_that_cannot_go_back_alone_begins_anew_on_all_ranks(
    whole: Result[Any],
) -> None:
    done = train("restart.in_place=auto", struck=(kill(1, 10),), used=True)
    same(done, whole)
    (back,) = events(done, "restarted")
    why = "the job used torch.distributed before the steps of raydist.Recoverable"
    # a rank that notices by itself that it has lost a peer is not asked
    assert back["why_not_kept"].endswith((why, "it failed because it had lost a peer"))
    assert "kept" not in back
    first, second = pids(done)
    assert not {*first.values()} & {*second.values()}


HOLD = """

def hold(step):
    import os, time

    while step == 400 and not os.path.exists("go"):
        time.sleep(0.05)
"""
"""The run of the page's program must not end before a rank of it is killed."""


def test_the_program_of_the_page_keeps_its_processes(tmp_path: Path) -> None:
    section = (ROOT / "docs/faults.md").read_text().partition("### In a loop of your own\n")[2]
    program, command = re.search(  # type: ignore[union-attr]
        r"```python\n(.*?)```\n\n    raydist train (.*?)\n", section, re.DOTALL
    ).groups()
    report = "            raydist.report("
    assert report in program
    (tmp_path / "mine.py").write_text(program.replace(report, f"            hold(step)\n{report}"))
    with (tmp_path / "mine.py").open("a") as file:
        file.write(HOLD)
    words = (*command.split(), "watch.progress=none", "train.steps=800")
    run = Program(tmp_path, *words, "group=inline")
    run.wait_for_step(100)
    (victim,) = [each["pid"] for each in run.events("began") if each["rank"] == 1]
    os.kill(victim, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert run.wait() == 0, run.screen
    (back,) = run.events("restarted")
    # On a busy machine, or in gloo, a rank may be stuck: then it is forked too.
    assert back["kept"] in ([0, 2], [0], [2])
    if len(back["kept"]) == 2:
        page = (run.run_dir / "blame-1.txt").read_text()
        assert "in place, ranks 0, 2 kept their processes" in page
    again = Program(tmp_path, *words, "group=inline")
    assert again.wait() == 0, again.screen
    final = [[each for each in made.events("report") if each["rank"] == 0] for made in (run, again)]
    assert len({each[-1]["values"]["loss"] for each in final}) == 1
