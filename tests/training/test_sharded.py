"""Sharded states: each part has a copy on the next node, and what is lost comes back from there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load

import raydist
from raydist import report
from raydist.launch import flush as launch_flush
from raydist.messages.agent import Flush, Flushed
from raydist.messages.server import KeptSteps, ListSteps
from raydist.messages.writer import HeldShards
from raydist.node import writer_requests
from raydist.settings.config import Backend, Checkpoint, Job
from raydist.shared import cgroup
from raydist.shared.errors import RaydistError, RunFailed
from raydist.state import checkpoint_files, distributed_checkpoint
from raydist.state.object_store import StoragePath, parse_path
from raydist.state.shard_choice import WholeShards
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import PAGE, blank_page, whole_slots
from raydist.training import sharded, snapshot_interval
from raydist.training.checkpointer import ShardCheckpointer
from raydist.worker import context
from tests.conftest import ROOT
from tests.lagging import Lagging
from tests.ranks import run_ranks, succeeded
from tests.records import read_events
from tests.rig import QUICK_DEATH

FILES = [".metadata", *(f"__{rank}_0.distcp" for rank in range(4)), "meta.json"]
GLOO = Job(backend=Backend("gloo"))


# Which node holds what


@pytest.mark.parametrize(
    ("nodes", "held_by"),
    [
        ([0, 1], [1, 0]),
        ([0, 0, 1, 1, 2, 2], [2, 3, 4, 5, 0, 1]),
        ([0, 0], None),  # one node
        ([0, 0, 1], None),  # unequal ones
    ],
)
def test_the_next_node_holds_the_copies(nodes: list[int], held_by: list[int] | None) -> None:
    assert sharded.holders(nodes) == held_by


@pytest.mark.parametrize(
    ("own", "guests", "step"),
    [
        ([[5, 4], [5, 4]], [[5, 4], [5, 4]], 5),
        ([[5, 4], [6, 5]], [[4, 3], [4, 3]], 5),
        ([[5, 4], []], [[4, 3], []], 4),  # rank 1 is new, rank 0 has its copy of step 4
        ([[], [5, 4]], [[], [5, 4]], 5),
        ([[5, 4], []], [[], []], -1),
        ([[], []], [[], []], -1),
    ],
)
def test_the_newest_step_that_is_there_whole(
    own: list[list[int]], guests: list[list[int]], step: int
) -> None:
    assert sharded.common(own, guests, [1, 0]) == step


def test_what_does_not_fit_is_refused() -> None:
    for into, kept, word in (
        (
            {"a": torch.ones(2)},
            {"a": torch.ones(3)},
            r"state\['a'\] is \(2,\) on this rank, and was kept as \(3,\)",
        ),
        (
            {"a": {}},
            {"a": {"b": torch.ones(1)}},
            r"state\['a'\] and the kept state differ in b: .*get_state_dict",
        ),
    ):
        with pytest.raises(RaydistError, match=word):
            sharded.put_into(into, kept, "state")


# Copies on the next node


def memory() -> int:
    descriptor = os.memfd_create("test")
    os.pwrite(descriptor, blank_page(), 0)
    return descriptor


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = layers()
    mesh = init_device_mesh("cpu", (context.rank().world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step + 100 * context.rank().rank))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> list[float]:
    return [
        value
        for parameter in model.parameters()
        for value in parameter.full_tensor().flatten().tolist()  # type: ignore[attr-defined]
    ]


def loses(lost: tuple[int, ...]) -> Any:
    """Train 6 steps on ranks that are separate nodes; then some lose their memory, and all continue
    from step 4."""

    def job(job: Job) -> Any:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        here = context.current()
        me = here.rank.rank
        here.rank = context.Rank(me, 0, me, here.rank.world_size)
        here.memory = memory(), -1
        model, optimizer = training()
        assert sharded.load(everything(model, optimizer)) == 0
        for step in range(1, 7):
            train(model, optimizer, step)
            if step < 5:
                sharded.keep(step, everything(model, optimizer))
        unbroken = full(model)
        here.sharded.rest()
        assert not whole_slots(os.pread(here.memory[0], 4096, 0))  # no checkpoint is made of a part
        if me in lost:
            here.memory = memory(), -1
        here.sharded, os.environ["TORCHELASTIC_RESTART_COUNT"] = None, "1"
        model, optimizer = training()
        state = everything(model, optimizer)
        begin = sharded.load(state)
        if begin:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        for step in range(begin + 1, 7):
            train(model, optimizer, step)
        return begin, full(model) == unbroken, sorted(SnapshotBuffer(here.memory[0]).steps)

    return job


@pytest.mark.parametrize(("lost", "begin"), [((), 4), ((1,), 4), ((2,), 4), ((0, 1), 0)])
def test_a_lost_part_comes_back_from_the_next_node(
    tmp_path: Path, lost: tuple[int, ...], begin: int
) -> None:
    results = run_ranks(3, GLOO, loses(lost), tmp_path, {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert [each.error for each in results] == [""] * 3
    assert [each.value[:2] for each in results] == [(begin, True)] * 3
    assert [len(each.kind("warning")) for each in results] == [
        0 if begin else 1,
        0,
        0,
    ]  # not all shards are left
    if begin:
        assert all(4 in each.value[2] for each in results)


def until_the_end(steps: int = 30, strike: int = 0, wrong: int = 0) -> tuple[int, list[float]]:
    """Train to the end; return the step that it resumed from, and the last weights.

    After step `strike` Ray loses the node of the last rank; after step `wrong` the job raises on
    rank 0.
    """
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = training()
    state = everything(model, optimizer)
    begin = sharded.load(state)
    if begin:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    for step in range(begin + 1, steps + 1):
        train(model, optimizer, step)
        sharded.keep(step, everything(model, optimizer))
        report(step=step, steps=steps)
        me = context.rank()
        if step == wrong and me.rank == 0:
            raise ValueError("wrong")
        if step == strike and not begin and me.rank == me.world_size - 1:
            os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
            signal.pause()
    return begin, full(model)


NODES = """
import json, sys
import ray
from ray.cluster_utils import Cluster
import raydist
from raydist.shared.errors import RaydistError
from tests.programs import HEAD
from tests.training.test_sharded import until_the_end

made = Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": 0})
for _ in range(3):
    made.add_node(num_cpus=2)
ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
words = ["scale=2x2", "backend=gloo", "watch.progress=none", "hydra.run.dir=run"]
done = raydist.run(until_the_end, *words, strike=20)
told = {"struck": done.values}
words = ["scale=2x2", "backend=gloo", "watch.progress=none"]
try:
    raydist.run(until_the_end, *words, "hydra.run.dir=stuck", "scale.wait_s=2", strike=20)
except RaydistError as error:
    told["stuck"] = error.message
made.add_node(num_cpus=2)
told["resumed"] = raydist.run(until_the_end, *words, "hydra.run.dir=resumed", "resume=stuck").values
words = ["scale=1..2x2", "backend=gloo", "watch.progress=none", "hydra.run.dir=fewer"]
told["fewer"] = raydist.run(until_the_end, *words, strike=20).values
print(json.dumps(told))
ray.shutdown()
made.shutdown()
"""


@pytest.mark.ray
@pytest.mark.timeout(700)
def test_the_loss_of_a_node_does_not_lose_its_part_in_the_run_nor_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        QUICK_DEATH | {"PYTHONPATH": str(ROOT), "RAYDIST_LEDGER": str(tmp_path / "nodes")}
    ).items():
        monkeypatch.setenv(name, value)
    ended = subprocess.run(
        [sys.executable, "-c", NODES], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    output = json.loads(ended.stdout.splitlines()[-1])
    values = output["struck"]
    unbroken = run_ranks(4, GLOO, lambda job: until_the_end(), tmp_path)
    assert [each.error for each in unbroken] == [""] * 4
    # what was kept last when the node went: its own step, or the one after which it had told the
    # others
    (begin,) = {begin for begin, _ in values}
    assert begin in (19, 20)
    assert [weights for _, weights in values] == [each.value[1] for each in unbroken]
    (restart,) = json.loads((tmp_path / "run" / "result.json").read_text())["restarts"]
    assert restart["how"] == "lost"
    (back,) = [
        happened
        for happened in read_events(tmp_path / "run" / "events.jsonl")
        if happened["kind"] == "restarted"
    ]
    assert back["repeated"] <= 1

    # no node for the lost one: what the others have, its copies among it, is a checkpoint
    assert "gave up after 2 s (scale.wait_s)" in output["stuck"]
    left = json.loads((tmp_path / "stuck" / "result.json").read_text())
    (begin,) = {begin for begin, _ in output["resumed"]}
    assert begin in (19, 20)
    assert Path(left["checkpoint"]).name == f"step-{begin:08d}"
    assert sorted(path.name for path in Path(left["checkpoint"]).iterdir()) == FILES
    assert [weights for _, weights in output["resumed"]] == [each.value[1] for each in unbroken]

    # the two ranks that are left continue with what four had, from the memory of their node
    assert not (tmp_path / "fewer" / "checkpoints").exists()
    assert len(output["fewer"]) == 2
    (begin,) = {begin for begin, _ in output["fewer"]}
    assert begin in (19, 20)


def test_the_last_step_of_a_run_that_failed_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("group=inline", "backend=gloo", "watch.progress=none", "restart=none")
    with pytest.raises(RunFailed, match="ValueError: wrong") as failed:
        raydist.run(until_the_end, *words, "scale=1x2", "hydra.run.dir=failed", steps=8, wrong=5)
    saved = checkpoint_files.newest(tmp_path / "failed" / "checkpoints")
    assert saved is not None
    assert (saved.sharded, saved.meta.world_size, saved.path) == (
        True,
        2,
        failed.value.result.checkpoint,
    )
    assert saved.step in (4, 5)
    with pytest.raises(RaydistError, match=r"load it with raydist\.sharded\.load"):
        _ = saved.state
    done = raydist.run(
        until_the_end, *words, "scale=1x2", "hydra.run.dir=resumed", "resume=failed", steps=8
    )
    unbroken = run_ranks(2, GLOO, lambda job: until_the_end(8), tmp_path)
    assert done.values == tuple((saved.step, each.value[1]) for each in unbroken)
    damaged = Path(str(saved.path)) / "__1_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert checkpoint_files.newest(tmp_path / "failed" / "checkpoints") is None


# Another number of ranks


def keeps_and_dies(steps: int) -> None:
    """Every rank keeps each step; after the last one all are killed."""
    model, optimizer = training()
    for step in range(1, steps + 1):
        train(model, optimizer, step)
        sharded.keep(step, everything(model, optimizer))
    context.current().sharded.rest()
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a flat state with each sharded tensor whole, by DCP's names."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    full = {
        name: getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in planner.state_dict.items()
    }
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in full.items()
    }


def trained(steps: int) -> dict[str, Any]:
    model, optimizer = training()
    for step in range(1, steps + 1):
        train(model, optimizer, step)
    return whole(everything(model, optimizer))


def loaded() -> tuple[int, dict[str, Any]]:
    state = everything(*training())
    return sharded.load(state), whole(state)


def test_another_number_of_ranks_loads_what_killed_ranks_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("group=inline", "backend=gloo", "watch.progress=none", "restart=none")
    with pytest.raises(RunFailed) as failed:
        raydist.run(keeps_and_dies, *words, "scale=1x4", "hydra.run.dir=killed", steps=3)
    saved = failed.value.result.checkpoint
    assert saved is not None
    assert sorted(path.name for path in Path(str(saved)).iterdir()) == FILES
    unbroken = run_ranks(4, GLOO, lambda job: trained(3), tmp_path)
    assert [each.error for each in unbroken] == [""] * 4
    wanted = unbroken[0].value
    done = raydist.run(loaded, *words, "scale=1x2", "hydra.run.dir=two", "resume=killed")
    assert done.values == ((3, wanted),) * 2
    model = layers()  # in this one process
    plain = everything(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    load(plain, checkpoint_id=str(saved))
    assert whole(plain) == wanted


# A checkpoint of the parts of all nodes


def a_node(rank: int, folder: StoragePath, steps: dict[int, float]) -> launch_flush.FlushNode:
    """Return a node with this rank of two and the steps that it kept."""
    mine = memory()
    for step, value in steps.items():
        state = {f"x{rank}": torch.full((3,), value), "n": 7}
        plan = distributed_checkpoint.RankPlanner(0).plan(
            state
        )  # each as if it were to write all that it has
        part = distributed_checkpoint.RankPart(rank, 2, state, plan)
        SnapshotBuffer(mine).write(step, {"own": vars(part)})

    def ask(request: Any) -> Future[Any]:
        reply: Future[Any] = Future()
        match request:
            case Flush():
                reply.set_result(Flushed([], had_state=False))
            case ListSteps():
                reply.set_result(KeptSteps([]))
            case _:
                reply.set_result(writer_requests.answer_request({0: mine}, folder, request))
        return reply

    return launch_flush.FlushNode(f"host-{rank}", ask)


@pytest.mark.parametrize("where", ["shared", "url", "apart"])
def test_the_parts_of_all_nodes_become_a_checkpoint_where_all_see_its_folder(
    tmp_path: Path, where: str
) -> None:
    folders: dict[str, list[StoragePath]] = {
        "shared": [tmp_path / "runs"] * 2,
        "url": [parse_path(f"memory://bucket/{tmp_path.name}")] * 2,
        "apart": [tmp_path / "0", tmp_path / "1"],
    }
    (first, second), events = folders[where], list[Any]()
    nodes = [a_node(0, first, {4: 0.4, 5: 0.5}), a_node(1, second, {3: 1.3, 4: 1.4})]
    launch_flush.flush(nodes, Checkpoint(keep=1), events.append, 2)
    if where == "apart":
        (warning,) = events
        assert (
            f"step 4 is not on the disk: host-0 does not see what host-1 wrote to {first}; set"
            in warning.text
        )
        assert [*first.glob("*"), *second.glob("*"), *first.glob(".*"), *second.glob(".*")] == []
        return
    (saved,) = events
    newest = checkpoint_files.newest(first)
    assert newest is not None
    assert (saved.kind, saved.path, newest.step, newest.sharded) == (
        "saved",
        str(newest.path),
        4,
        True,
    )
    loaded: dict[str, Any] = {"x0": torch.zeros(3), "x1": torch.zeros(3), "n": 0}
    distributed_checkpoint.load_into(newest.path, loaded)
    assert [round(float(loaded[name].sum()), 3) for name in ("x0", "x1")] == [1.2, 4.2]
    assert loaded["n"] == 7
    launch_flush.flush(nodes, Checkpoint(keep=1), events.append, 2)
    assert events == [saved]  # it is there already


@pytest.mark.parametrize("url", [False, True])
def test_shards_are_a_checkpoint_where_old_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: bool
) -> None:
    """The nodes dropped their files, at a URL those of the complete checkpoint."""

    def denied(folder: StoragePath, rule: str | None) -> StoragePath:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(checkpoint_files, "best", denied)
    folder = parse_path(f"memory://bucket/{tmp_path.name}") if url else tmp_path
    events: list[Any] = []
    nodes = [a_node(rank, folder, {4: 0.4}) for rank in range(2)]
    launch_flush.flush(nodes, Checkpoint(keep=1), events.append, 2)
    newest = checkpoint_files.newest(folder)
    assert newest is not None
    assert [each.kind for each in events] == ["warning", "saved"]
    assert "could not be removed: PermissionError: Access Denied" in events[0].text
    assert events[1].path == str(newest.path)


def saves_beside_a_file(job: Job) -> Any:
    """Save a state where the folder cannot be pruned; return what is returned, and its steps."""
    folder = context.rank().run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    (folder / ".step-00000009").touch()
    path = sharded.save(3, {"x": torch.ones(2)}, wait=True)
    return path, [each.name for each in folder.glob("step-*")]


def test_ranks_save_shards_where_old_checkpoints_cannot_be_removed(tmp_path: Path) -> None:
    ranks = succeeded(run_ranks(2, GLOO, saves_beside_a_file, tmp_path))
    for rank in ranks:
        path, there = rank.value
        assert there == [path.name] == ["step-00000003"]
    assert [each["kind"] for each in ranks[0].events] == ["warning", "saved"]


@pytest.mark.parametrize(("step", "whole"), [(4, True), (5, False)])
def test_only_the_step_that_was_asked_for_becomes_a_checkpoint(
    tmp_path: Path, step: int, whole: bool
) -> None:
    """The ranks of a later attempt may have saved another one: the memories hold step 4."""
    mine, events = memory(), list[Any]()
    state = {"x": torch.full((3,), 0.4)}
    part = distributed_checkpoint.RankPart(
        0, 1, state, distributed_checkpoint.RankPlanner(0).plan(state)
    )
    SnapshotBuffer(mine).keep_to_save(4, {"own": vars(part)})

    def ask(request: Any) -> Future[Any]:
        reply: Future[Any] = Future()
        try:
            reply.set_result(
                writer_requests.answer_request({0: mine}, tmp_path / "another", request)
            )
        except Exception as error:
            reply.set_exception(OSError(str(error)))
        return reply

    description = launch_flush.Description(3, None, str(tmp_path), {"loss": 0.5}, {"epoch": 2})
    asked = WholeShards(step, 1, {0: (0,)})
    launch_flush.have_shards_written(
        [launch_flush.FlushNode("host", ask)], asked, description, events.append
    )
    newest = checkpoint_files.newest(tmp_path)
    assert (newest is not None) == whole
    assert newest is None or (newest.step, newest.metrics, dict(newest.reported)) == (
        4,
        {"loss": 0.5},
        {"epoch": 2},
    )
    assert [each.kind for each in events] == (["saved"] if whole else ["warning"] * 2)
    assert not list(tmp_path.glob(".*"))


def held(own: str, copies: str = "", disk: int = -1, world: int = 3) -> HeldShards:
    """Of words like `0@20`: a rank's shards of a step."""
    mine, others = (
        [
            (int(rank), world, int(step))
            for rank, _, step in (word.partition("@") for word in words.split())
        ]
        for words in (own, copies)
    )
    return HeldShards(mine, others, disk)


@pytest.mark.parametrize(
    ("held", "step", "of"),
    [
        (
            {0: held("0@5 0@4"), 1: held("1@5 1@4"), 2: held("2@5 2@4")},
            5,
            {0: (0,), 1: (1,), 2: (2,)},
        ),
        (
            {0: held("0@5 0@4"), 1: held("1@4 1@3"), 2: held("2@5 2@4")},
            4,
            {0: (0,), 1: (1,), 2: (2,)},
        ),
        (
            {0: held("0@5 0@4", "2@5"), 1: held("1@5 1@4", "0@5")},
            5,
            {0: (0, 2), 1: (1,)},
        ),  # node 2 is gone
        ({0: held("0@5 1@5", "2@5"), 1: held("2@4")}, 5, {0: (0, 1, 2)}),
        ({0: held("0@5 0@4", "2@5")}, None, "no step has the shards of all ranks in memory"),
        ({0: held("0@5 1@5 2@5", disk=5)}, None, "^$"),  # the disk has it
        ({0: held("0@5 1@5 2@5", disk=4)}, 5, {0: (0, 1, 2)}),
        ({0: held("0@2 1@2", world=2), 1: held("2@1")}, 2, {0: (0, 1)}),
        ({0: held("")}, None, "^$"),
    ],
)
def test_which_node_writes_which_shards(
    held: dict[int, HeldShards], step: int | None, of: Any
) -> None:
    chosen = launch_flush.choose_shards(held)
    if isinstance(chosen, str):
        assert step is None
        assert re.search(of, chosen)
    else:
        assert (chosen.step, chosen.ranks) == (step, of)


def fewer(job: Job) -> Any:
    """Keep a state on two ranks, then look for it as if each was one of three; return what is
    found."""
    here = context.current()
    me = here.rank.rank
    here.rank, here.memory = context.Rank(me, 0, me, 2), (memory(), -1)
    sharded.keep(3, {"x": torch.full((4,), float(me))})
    here.sharded.rest()
    here.sharded, os.environ["TORCHELASTIC_RESTART_COUNT"] = None, "1"
    state = {"x": torch.zeros(4)}
    loaded = sharded.load(state), state["x"].tolist()
    here.sharded, here.rank = None, context.Rank(me, 0, me, 3)
    return *loaded, sharded.load(state), state["x"].tolist()


def test_a_state_of_another_number_of_ranks_is_read_as_from_the_disk(tmp_path: Path) -> None:
    results = run_ranks(2, GLOO, fewer, tmp_path)
    assert [each.error for each in results] == ["", ""]
    assert [each.value for each in results] == [
        (3, [each] * 4, 3, [0.0] * 4) for each in (0.0, 1.0)
    ]


# Slow networks, lagging devices, full nodes


def slow_network(job: Job) -> Any:
    """Train a few steps on two nodes, between which a copy takes as long as 16 steps; return the
    interval that was chosen."""
    snapshot_interval.FIRST_LOOK = 6  # three costs: their median is no stall of the machine
    here = context.current()
    me = here.rank.rank
    here.rank, here.memory = context.Rank(me, 0, me, 2), (memory(), -1)
    copy = sharded.Ring._copy

    def travels(ring: Any, *what: Any) -> None:
        time.sleep(0.5)
        copy(ring, *what)

    sharded.Ring._copy = travels  # type: ignore[assignment,method-assign]
    keeper: Any = ShardCheckpointer(job, here.comm)
    keeper._keep = lambda state, _: sharded.keep(state.progress.step, {"x": torch.zeros(4)})
    model = SimpleNamespace(watch=SimpleNamespace(changed_by_steps_only=False))
    keeper.begin(0)
    for step in range(1, 9):
        time.sleep(0.03)
        progress, stepper = SimpleNamespace(step=step), SimpleNamespace(model=model)
        keeper.keep(SimpleNamespace(progress=progress, stepper=stepper))
    here.sharded.rest()
    return keeper.interval.every


def test_the_way_of_a_copy_to_the_next_node_is_not_taken_for_the_cost_of_a_snapshot(
    tmp_path: Path,
) -> None:
    """Only the first steps waited for it, and then one in two thousand was kept.

    An interval of 1,000 steps would be that of a snapshot that costs as much as ten steps.
    """
    one, other = run_ranks(2, GLOO, slow_network, tmp_path)
    assert (one.error, other.error) == ("", "")
    assert one.value == other.value
    assert 1 < one.value < 1000  # about 16: the next snapshot would wait for the copy


def no_room(job: Job) -> Any:
    here = context.current()
    here.rank = context.Rank(here.rank.rank, 0, here.rank.rank, 2)
    here.memory = memory(), -1
    if here.rank.rank == 1:
        cgroup.memory_left = lambda root=Path("/"): 1000
    for step in range(1, 4):
        sharded.keep(step, {"x": torch.ones(10_000)})
    here.sharded.rest()
    return os.fstat(here.memory[0]).st_blocks * 512


def lagging(job: Job) -> Any:
    """Keep the state of a lagging device on two ranks; its next step changes the state before the
    copy has begun."""
    here = context.current()
    me = here.rank.rank
    here.rank, here.memory = context.Rank(me, 0, me, 2), (memory(), -1)
    device = Lagging()
    device.pause = lambda: bool(time.sleep(0.001 * (me + 1))) or device.advance()  # type: ignore[func-returns-value]
    pytest.MonkeyPatch().setattr(sharded, "device_of", lambda _: device)
    x, reports_sent = torch.zeros(4), [0]
    here.flush = lambda: reports_sent.append(step)
    for step in range(1, 8):
        device.launch(partial(x.fill_, 10.0 * step + me))
        sharded.keep(step, {"x": x})
    here.sharded.rest()
    own = SnapshotBuffer(here.memory[0])
    here.sharded, os.environ["TORCHELASTIC_RESTART_COUNT"] = None, "1"
    state = {"x": torch.zeros(4)}
    copy = own.read(own.replicas[7])["own"]["state"]["x"]
    assert reports_sent == [*range(8)], "a restart from a step does not repeat its report"
    return (
        sharded.load(state),
        state["x"].tolist(),
        copy.tolist(),
        len(own.steps),
        len(device.registered),
    )


def test_shards_of_a_lagging_device_are_of_their_step_here_and_on_the_next_node(
    tmp_path: Path,
) -> None:
    results = run_ranks(2, GLOO, lagging, tmp_path)
    assert [each.error for each in results] == ["", ""]
    # two slots take turns, as all ranks wait for each other; the copy of another rank's state never
    # meets the device
    assert [each.value for each in results] == [
        (7, [70.0 + me] * 4, [71.0 - me] * 4, 2, 3) for me in range(2)
    ]


def test_without_room_on_one_rank_all_go_on_without(tmp_path: Path) -> None:
    one, other = run_ranks(2, GLOO, no_room, tmp_path)
    assert (one.error, other.error) == ("", "")
    (warning,) = other.kind("warning")
    assert "no more snapshots of the sharded state: a state takes" in warning["text"]
    assert not one.kind("warning")
    assert max(one.value, other.value) <= PAGE  # what was kept is freed
