"""Runs on a Ray with room for one: they wait in order, and an urgent one takes the room."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydist.tools.queue import main as queue_command
from tests.programs import HEAD, KEEP_WARM_S, Program
from tests.scenarios.test_kept_warm import children, idle
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

JOB = '''
import json, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raydist

def job(config):
    """Train slowly until the file `hurry` exists, and in no step to its end while `hold` does."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(256, 10, generator=generator), torch.randint(3, (256,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 3))

    made = 0

    def loss(output, target):
        nonlocal made
        made += 1  # later steps take longer: it must not end before it is told to hurry
        if not Path("hurry").exists():
            time.sleep(1 if made < 30 else 3)
        while Path("hold").exists():
            time.sleep(0.05)
        return nn.functional.cross_entropy(output, target)

    raydist.fit(config, train=TensorDataset(inputs, targets), model=model, loss=loss)
    whole = {name: getattr(value, "full_tensor", value.clone)() for name, value in model.state_dict().items()}
    weights = {name: value.tolist() for name, value in whole.items()}
    Path(f"weights-{raydist.rank().rank}.json").write_text(json.dumps(weights))
'''
JOB_WORDS = ("job=slowly.py", "data.batch_size=8", "train.epochs=8")


LOOP = """
import time
from pathlib import Path

def job():
    '''A loop of its own, without a checkpoint, until the file `hurry` exists.'''
    while not Path("hurry").exists():
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    head = {**HEAD, "num_cpus": 2, "labels": {"stays": "yes"}}
    with pytest.MonkeyPatch.context() as patch:
        # The nodes' limit for all runs: it is the programs that keep a server for the next one.
        patch.setenv("RAYDIST_KEEP_WARM_S", KEEP_WARM_S)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        yield cluster
        cluster.shutdown()


class Person:
    """A person's shell: a folder, in which commands are typed."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self._address = address

    def train(self, name: str, *words: str, size: str = "1x2") -> Program:
        """Start the job in a folder of its own. It hurries once `hurry(name)` is called."""
        return self.run(name, *JOB_WORDS, f"scale={size}", *words)

    def run(self, name: str, *words: str, module: str = "raydist.train") -> Program:
        """Start a run of this name in a folder of its own."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "slowly.py").write_text(JOB)
        (folder / "loop.py").write_text(LOOP)
        return Program(folder, f"name={name}", *words, address=self._address, module=module)

    def hurry(self, name: str) -> None:
        (self.folder / name / "hurry").touch()

    def queue(self) -> dict[str, dict[str, Any]]:
        """Type `raydist queue --json`, and return its rows by run."""
        listed = self.type_queue("--json")
        rows = [json.loads(line) for line in listed.splitlines() if line.startswith("{")]
        return {row["run"]: row for row in rows}

    def type_queue(self, *words: str, code: int = 0) -> str:
        """Type `raydist queue …`, and return what it printed."""
        folder = self.folder / "queue"
        folder.mkdir(exist_ok=True)
        typed = Program(folder, *words, address=self._address, module="raydist.tools.queue")
        assert typed.wait() == code, typed.screen
        return typed.screen


@pytest.fixture
def person(ray: Any, tmp_path: Path) -> Person:
    return Person(tmp_path, ray.address)


def losses(run: Program) -> dict[int, float]:
    """Return rank 0's loss of each step; that of a repeated step must be the same."""
    found: dict[int, float] = {}
    for event in run.events("report"):
        if event["rank"] == 0 and "loss" in event["values"]:
            loss = event["values"]["loss"]
            assert found.setdefault(event["step"], loss) == loss
    return found


def waits(run: Program, text: str) -> None:
    """Wait until the run says that it waits for this."""
    run.wait_until(lambda: text in run.screen, text)


def test_an_urgent_run_takes_the_room_and_the_other_goes_on_exactly(
    person: Person, ray: Any
) -> None:
    low = person.train("low", "queue.priority=low", "queue.exempt_s=0")
    low.wait_for_step(3)
    for worker in idle(ray):  # those that Ray started with the node
        os.kill(worker, signal.SIGKILL)
    (low.folder / "hold").touch()
    urgent = person.train("urgent", "queue.priority=high")
    waits(urgent, "held by low of")  # it has asked Ray for a worker before it says so
    (low.folder / "hold").unlink()
    low.wait_until(lambda: bool(low.events("pause")), "the other run makes way")
    urgent.wait_for_step(1)
    waits(low, "held by urgent of")
    (pause,) = low.events("pause")
    (actor,) = (pid for pid, title in children(ray).items() if title.startswith("ray::NodeActor"))
    # Its worker was started while it waited.
    assert psutil.Process(actor).create_time() < pause["t"]
    last = person.train("last", "queue.priority=-50")
    waits(last, "held by urgent of")
    rows = person.queue()
    assert [(name, row["state"]) for name, row in rows.items()] == [
        ("urgent", "running"),
        ("last", "waiting"),
        ("low", "waiting"),
    ]
    assert rows["low"]["reason"].startswith("waiting behind last of ")
    # Nobody runs that was killed while it waited, and nobody waits for it.
    last.signal(signal.SIGKILL)
    last.wait()
    person.hurry("low")
    person.hurry("urgent")
    assert urgent.wait() == 0, urgent.screen
    assert low.wait() == 0, low.screen
    (back,) = low.events("restarted")
    assert (back["paused"], back["repeated"]) == (True, 0)
    assert losses(low) == losses(urgent)
    for file in ("weights-0.json", "weights-1.json"):
        assert (low.folder / file).read_text() == (urgent.folder / file).read_text()
    assert "pause back at step" in low.screen
    assert re.search(r"other time .* queue [1-9]", low.screen)
    assert person.queue() == {}


def test_an_agent_that_is_killed_before_its_ranks_begin_costs_a_restart(
    person: Person, ray: Any
) -> None:
    run = slow_to_open(person, ray, "1x2")
    (agent,) = agents(ray)
    os.kill(agent, signal.SIGKILL)
    assert run.wait() == 0, run.screen
    (restart,) = run.events("restart")
    assert "its node or its actor is gone" in restart["text"], restart


def test_a_node_that_is_lost_before_the_ranks_begin_is_waited_for(person: Person, ray: Any) -> None:
    """Outside the queue; test_a_run_that_waits_for_a_lost_node_can_be_paused is in it."""
    node = ray.add_node(num_cpus=2)
    run = slow_to_open(person, ray, "2x2", "queue=off")
    ray.remove_node(node)
    waits(run, "waiting for 1 more node with 2 CPU")
    ray.remove_node(ray.add_node(num_cpus=1))  # one that is of no use
    node = ray.add_node(num_cpus=2)
    assert run.wait() == 0, run.screen
    assert len(run.events("restart")) == 1
    ray.remove_node(node)


def slow_to_open(person: Person, ray: Any, size: str, *words: str) -> Program:
    """Start a run whose fork servers import torch first, and wait for an agent."""
    (person.folder / "loop.py").write_text("def job():\n    return 'done'\n")
    command = ("job=loop.py", f"scale={size}", "scale.keep_warm_s=0", *words)
    run = Program(person.folder, *command, address=ray.address, alone=True)
    while not agents(ray):  # without longer pauses: the ranks begin soon after that
        assert run.process.poll() is None, run.screen
        time.sleep(0.1)
    return run


def agents(ray: Any) -> list[int]:
    """Return the process ids of the agents on the first node."""
    return [pid for pid, title in children(ray).items() if title.startswith("ray::NodeActor")]


def test_of_two_runs_the_one_makes_way_whose_stop_costs_less(person: Person) -> None:
    low = ("queue.priority=low", "queue.exempt_s=0")
    cheap = person.train("cheap", *low, size="1x1")
    cheap.wait_for_step(1)
    # It was placed last, but all that it has done would be lost.
    dear = person.run("dear", *low, "job=loop.py", "scale=1x1")
    costs: dict[str, int] = {}

    def is_dear() -> bool:
        costs.update((name, row["stop_cost"] or 0) for name, row in person.queue().items())
        return costs.get("dear", 0) >= 5

    dear.wait_until(is_dear, "its cost")
    assert costs["cheap"] < 5
    urgent = person.train("urgent", "queue.priority=high", size="1x1")
    urgent.wait_for_step(1)
    (pause,) = cheap.events("pause")
    assert re.search(
        r"urgent of .* \(its stop costs \d rank-seconds?, that of dear ", pause["text"]
    )
    for name in ("cheap", "dear", "urgent"):
        person.hurry(name)
    for run in (urgent, dear, cheap):
        assert run.wait() == 0, run.screen
    assert not dear.events("pause")
    (back,) = cheap.events("restarted")
    assert (back["paused"], back["repeated"]) == (True, 0)


def test_runs_of_equal_priority_are_placed_in_order(person: Person) -> None:
    first = person.train("first")
    first.wait_for_step(1)
    second = person.train("second")
    waits(second, "held by first of")
    third = person.train("third", size="1x1")
    waits(third, "waiting behind second of")
    stopped = person.train("stopped")
    waits(stopped, "waiting behind second of")
    stopped.signal(signal.SIGINT)
    assert stopped.wait() == 130, stopped.screen
    # A driver that is stopped keeps nobody waiting.
    second.signal(signal.SIGSTOP)
    for name in ("first", "second", "third"):
        person.hurry(name)
    assert first.wait() == 0, first.screen
    assert third.wait() == 0, third.screen
    second.signal(signal.SIGCONT)
    assert second.wait() == 0, second.screen
    assert not first.events("pause")
    wait_until(lambda: not person.queue(), "an empty queue")


def test_a_program_makes_way_only_if_it_may(person: Person) -> None:
    (person.folder / "sleep.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as if it saved its state\n"
        "print('here', flush=True)\n"
        "time.sleep(600)\n"
    )
    words = (f"script={person.folder}/sleep.py", "scale=1x1", "queue.exempt_s=0")
    stays = person.run("stays", *words)
    leaves = person.run("leaves", *words, "queue.killable=true")
    for run in (stays, leaves):
        waits(run, "here")
    urgent = person.train("urgent", "queue.priority=high")
    person.hurry("urgent")
    waits(urgent, "held by ")
    assert not leaves.events("pause"), "its room alone would not be enough"
    stays.signal(signal.SIGTERM)
    assert stays.wait() == 143
    assert urgent.wait() == 0, urgent.screen
    leaves.wait_until(lambda: leaves.screen.count("here") == 2, "it is started anew")
    leaves.signal(signal.SIGTERM)
    assert leaves.wait() == 143
    assert len(leaves.events("pause")) == 1
    assert not stays.events("pause")


def test_a_person_pauses_moves_resumes_and_cancels_runs(person: Person) -> None:
    first = person.train("first", "queue.priority=high")
    first.wait_for_step(2)
    second = person.train("second")
    waits(second, "held by first of")
    assert "stops after a step" in person.type_queue("pause", "first")
    second.wait_for_step(1)
    waits(first, "type: raydist queue resume first")
    rows = person.queue()
    assert (rows["first"]["state"], rows["second"]["state"]) == ("paused", "running")
    assert rows["first"]["reason"].startswith("by ")
    assert "it is not paused" in person.type_queue("resume", "second", code=2)
    assert "did you mean first" in person.type_queue("resume", "firts", code=2)

    # Equal to the second now, it does not take its room, for which it would have come first.
    person.type_queue("move", "first", "normal")
    assert person.queue()["first"]["priority"] == 0
    assert "waits in the queue again" in person.type_queue("resume", "first")
    waits(first, "held by second of")
    assert not second.events("pause")
    assert "stops after a step" in person.type_queue("cancel", "second")
    assert second.wait() == 143, second.screen
    assert "`raydist queue cancel` of" in second.screen
    assert Path(json.loads((second.run_dir / "result.json").read_text())["checkpoint"]).is_dir()
    third = person.train("third", "queue.priority=low")
    waits(third, "held by first of")
    assert "third is cancelled" in person.type_queue("cancel", "third")
    assert third.wait() == 143, third.screen
    person.hurry("first")
    assert first.wait() == 0, first.screen
    (back,) = first.events("restarted")
    assert (back["paused"], back["repeated"]) == (True, 0)
    wait_until(lambda: not person.queue(), "an empty queue")


def test_a_paused_run_goes_on_once_it_is_resumed(person: Person) -> None:
    """From memory, as its node has stayed."""
    run = person.train("run")
    run.wait_for_step(1)
    assert "stops after a step" in person.type_queue("pause", "run")
    waits(run, "type: raydist queue resume run")
    (checkpoint,) = (run.run_dir / "checkpoints").glob("step-*")
    shutil.rmtree(checkpoint)
    person.hurry("run")
    assert "waits in the queue again" in person.type_queue("resume", "run")
    assert run.wait() == 0, run.screen
    (back,) = run.events("restarted")
    assert (back["paused"], back["repeated"]) == (True, 0)


def test_a_run_that_waits_for_a_lost_node_can_be_paused(person: Person, ray: Any) -> None:
    """It obeyed nobody before another node had come."""
    node = ray.add_node(num_cpus=2)
    run = person.train("run", size="2x2")
    run.wait_for_step(2)
    ray.remove_node(node)
    waits(run, "waiting for 1 more node with 2 CPU")
    person.type_queue("pause", "run")
    waits(run, "type: raydist queue resume run")
    assert list((run.run_dir / "checkpoints").glob("step-*"))
    other = person.train("other")
    other.wait_for_step(1)
    person.hurry("other")
    assert other.wait() == 0, other.screen
    node = ray.add_node(num_cpus=2)
    person.hurry("run")
    person.type_queue("resume", "run")
    assert run.wait() == 0, run.screen
    assert [len(run.events(kind)) for kind in ("restart", "pause", "restarted")] == [1, 1, 1]
    ray.remove_node(node)


def test_a_short_run_passes_a_large_one_that_has_room_only_later(person: Person) -> None:
    holder = person.train("holder", "queue.limit=2h", size="1x1")
    holder.wait_for_step(1)
    large = person.train("large", "queue.requeue=false", "queue.exempt_s=0")
    waits(large, "(queue.limit)")
    assert person.queue()["holder"]["reason"].startswith("its limit ends at ")
    long = person.train("long", "queue.limit=3h", size="1x1")
    waits(long, "waiting behind large of")
    short = person.train("short", "queue.limit=1h", size="1x1")
    person.hurry("short")
    assert short.wait() == 0, short.screen
    assert not large.events("report")
    person.hurry("holder")
    assert holder.wait() == 0, holder.screen
    large.wait_for_step(1)
    assert not long.events("report")
    person.hurry("long")
    urgent = person.train("urgent", "queue.priority=high")
    person.hurry("urgent")
    assert large.wait() == 143, large.screen
    assert "queue.requeue=false" in large.screen
    assert urgent.wait() == 0, urgent.screen
    assert long.wait() == 0, long.screen


def test_a_run_past_its_limit_makes_way_for_its_equals(person: Person) -> None:
    long = person.train("long", "queue.limit=1")
    long.wait_for_step(2)
    equal = person.train("equal")
    equal.wait_for_step(1)
    assert len(long.events("pause")) == 1
    # It came first, and yet is behind those that have waited since.
    waits(long, "held by equal of")
    person.hurry("equal")
    person.hurry("long")
    assert equal.wait() == 0, equal.screen
    assert long.wait() == 0, long.screen
    assert losses(long) == losses(equal)


def test_a_run_waits_for_room_outside_the_queue_for_wait_s_and_in_order(person: Person) -> None:
    outsider = person.train("outsider", "queue=off")
    outsider.wait_for_step(1)
    assert person.queue() == {}
    first = person.train("first")
    waits(first, "waiting for 1 more node with 2 CPU")
    second = person.train("second")
    waits(second, "in the queue: waiting for 1 more node with 2 CPU")
    hasty = person.train("hasty", "scale.wait_s=2")
    assert hasty.wait() == 1, hasty.screen
    assert "gave up after 2 s (scale.wait_s): waiting for 1 more node with 2 CPU" in hasty.screen
    person.hurry("outsider")
    assert outsider.wait() == 0, outsider.screen
    waits(second, "held by first of")
    person.hurry("first")
    person.hurry("second")
    assert first.wait() == 0, first.screen
    assert second.wait() == 0, second.screen


def test_a_run_that_lacks_a_lost_node_holds_nobody_back_and_gives_up(
    ray: Any, person: Person
) -> None:
    node = ray.add_node(num_cpus=2)
    holder = person.train("holder", "scale.labels.stays=yes", size="1x1")
    holder.wait_for_step(1)
    large = person.train("large", "scale.wait_s=6", size="2x2")
    waits(large, "held by holder of")
    small = person.train("small", size="1x1")
    waits(small, "waiting behind large of")
    ray.remove_node(node)
    person.hurry("small")
    assert small.wait() == 0, small.screen
    assert large.wait() == 1, large.screen
    assert "gave up after 6 s (scale.wait_s): waiting for 2 more nodes with 2 CPU" in large.screen
    assert not holder.events("end")
    person.hurry("holder")
    assert holder.wait() == 0, holder.screen


def test_another_run_comes_before_the_next_trial_of_a_sweep(person: Person) -> None:
    words = (*JOB_WORDS, "scale=1x2", "sweep.parallel=1", "optim.lr=0.1,0.2")
    sweep = person.run("sweep", *words, module="raydist.tools.sweep")
    rows = person.queue
    sweep.wait_until(lambda: any(row["state"] == "running" for row in rows().values()), "a trial")
    other = person.train("other")
    waits(other, "held by sweep of")
    person.hurry("sweep")
    other.wait_for_step(1)
    sweep.wait_until(lambda: "held by other of" in str(rows()), "the next trial waits")
    person.hurry("other")
    assert other.wait() == 0, other.screen
    assert sweep.wait() == 0, sweep.screen


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("stop", "gpt"), "there is no such action"),
        (("pause",), "it takes RUN"),
        (("move", "gpt"), "it takes RUN and PRIORITY"),
        (("move", "gpt", "urgent"), "must be high, normal, low, or a whole number"),
    ],
)
def test_wrong_words_of_the_queue(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queue_command(words) == 2
    assert says in capsys.readouterr().err
