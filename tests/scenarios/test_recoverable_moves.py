"""A loop of one's own with raydist.Recoverable moves: a node is drained, joins or is lost, a person
stops the run. Real Ray nodes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.shared.kinds import EventJson
from tests.programs import Program
from tests.scenarios.test_elastic_run import Site, resized, site_of, sizes
from tests.scenarios.test_operate import operate

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 300
JOB = """
import os, time, torch, raydist
from torch import nn
from torch.nn.functional import cross_entropy

def job(config, dropout=0.1):
    me, draw = raydist.rank(), torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(256, 10, generator=draw), torch.randint(3, (256,), generator=draw)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    order = torch.Generator().manual_seed(2)
    torch.manual_seed(me.rank)  # another dropout on each rank
    training = raydist.Recoverable(
        config, model=model, optimizer=optimizer, schedule=schedule, order=order
    )
    for made, step in enumerate(training.steps(config.train.steps)):
        with training.step():
            # later steps take longer: it must not end before it is told to go
            time.sleep(0 if os.path.exists("go") else 0.1 if made < 40 else 1)
            chosen = torch.randperm(256, generator=order)[:32]
            mine = chosen[me.rank :: me.world_size]
            loss = cross_entropy(training.model(inputs[mine]), targets[mine])
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                of_all = cross_entropy(model(inputs[chosen]), targets[chosen])
            model.train()
            raydist.report(step=step, loss=loss, of_all=of_all, lr=schedule.get_last_lr()[0])
            schedule.step()
"""


def start(folder: Path, *words: str, address: str | None = None) -> Program:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(JOB)
    more = ("job=mine.py", "watch.progress=none", f"train.steps={STEPS}")
    return Program(folder, *more, *words, address=address)


def finish(run: Program) -> list[EventJson]:
    """Let a run finish quickly; return rank 0's reports."""
    (run.folder / "go").touch()
    assert run.wait() == 0, run.screen
    assert run.leftovers() == []
    return reports(run)


def reports(run: Program) -> list[EventJson]:
    return [each for each in run.events("report") if each["rank"] == 0]


def values(made: list[EventJson], name: str) -> list[float]:
    return [each["values"][name] for each in made]


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A cluster whose head has no CPU."""
    with site_of(tmp_path_factory.mktemp("nodes"), 0) as site:
        yield site


@pytest.fixture
def site(grounds: Site) -> Iterator[Site]:
    yield grounds
    grounds.tidy()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[EventJson]:
    """The reports of a run of two ranks that nothing disturbs."""
    return finish(start(tmp_path_factory.mktemp("whole"), "scale=1x2", "group=inline"))


def test_an_own_loop_leaves_a_drained_node(
    site: Site, tmp_path: Path, whole: list[EventJson]
) -> None:
    site.have(3)
    # hardly ever a snapshot: the step after which all ranks stop is kept
    words = ("scale=2x1", "scale.spares=1", "snapshot.every=1000", "restart.max=1")
    run = start(tmp_path, *words, address=site.cluster.address)
    site.runs.append(run)
    run.wait_for_step(5)
    (first,) = run.events("plan")
    left = first["slots"][1]["node"]
    site.drain(next(node for node in site.added if node.node_id == left))
    run.wait_until(lambda: len(run.events("restarted")) == 1, "step after the drain")
    made = finish(run)
    assert left not in {slot["node"] for slot in run.events("plan", "takeover")[-1]["slots"]}
    (back,), (failure,) = run.events("restarted"), run.events("failure")
    assert (failure["cause"]["how"], back["repeated"]) == ("drained", 0)
    assert [each["step"] for each in made] == [*range(1, STEPS + 1)]
    assert [each["values"] for each in made] == [each["values"] for each in whole]


def test_an_own_loop_grows_with_a_node_that_joins_and_shrinks_without_it(
    site: Site, tmp_path: Path
) -> None:
    site.have(1)
    words = ("scale=1..2x1", "job.args.dropout=0.0", "snapshot.every=1")
    run = start(tmp_path / "run", *words, address=site.cluster.address)
    site.runs.append(run)
    run.wait_for_step(5)
    assert sizes(run) == [1]
    second = site.add()
    resized(run, 1, 2)
    run.wait_for_step(reports(run)[-1]["step"] + 2)
    site.remove(second)
    resized(run, 1, 2, 1)
    assert run.events("saved") == []  # nothing has gone through the disk
    made = finish(run)
    grown, shrunk = run.events("restarted")
    assert (grown["resized"], grown["repeated"]) == (True, 0)
    assert (shrunk["resized"], shrunk["repeated"] <= 1) == (False, True)
    by_step = {each["step"]: each for each in made}
    assert [*by_step] == [*range(1, STEPS + 1)]
    assert len(made) - STEPS <= shrunk["repeated"]
    other = finish(start(tmp_path / "other", "scale=1x1", "job.args.dropout=0.0", "group=inline"))
    assert values([*by_step.values()], "lr") == values(other, "lr")
    # two ranks add the gradients in another order than one
    assert values([*by_step.values()], "of_all") == pytest.approx(values(other, "of_all"), abs=1e-4)


def test_an_own_loop_that_is_stopped_goes_on_with_the_next_run(
    tmp_path: Path, whole: list[EventJson]
) -> None:
    words = ("scale=1x2", "group=inline", "snapshot.every=1")
    run = start(tmp_path, *words)
    run.wait_for_step(5)
    stopped = operate(tmp_path, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert run.wait() == 128 + signal.SIGTERM
    before, saved = reports(run), run.events("saved")[-1]["step"]
    assert before[-1]["step"] - saved <= 1
    again = start(tmp_path, *words, "resume=auto")
    made = [*before[:saved], *finish(again)]
    assert [each["values"] for each in made] == [each["values"] for each in whole]
