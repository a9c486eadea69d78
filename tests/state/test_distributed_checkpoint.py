"""Sharded states on disk: any number of ranks and plain torch load them, and they run no code."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from raydist.settings.config import Backend, Job
from raydist.shared.errors import RaydistError
from raydist.state import distributed_checkpoint, object_store
from raydist.state.distributed_checkpoint import (
    ADMITTED,
    METADATA,
    RankPart,
    RankPlanner,
    load_into,
)
from raydist.state.write import META, Meta, complete
from raydist.training import sharded
from raydist.worker import context
from tests.ranks import run_ranks

GLOO = Job(backend=Backend("gloo"))


def save_part(folder: Path, state: dict[str, Any], rank: int, world_size: int) -> None:
    """As the node of a rank does."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = RankPlanner(rank).plan(state)
    distributed_checkpoint.write_part(
        folder, RankPart(rank, world_size, sharded.local(state), plan)
    )


def commit(folder: Path, ranks: int) -> None:
    files = distributed_checkpoint.write_metadata(folder, ranks)
    complete(folder, folder, Meta.of(1, ranks, {}, files, sharded=True))


def save(folder: Path, state: dict[str, Any]) -> Path:
    save_part(folder, state, 0, 1)
    commit(folder, 1)
    return folder


VALUES: dict[str, Any] = {
    "weight": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(7), "half": torch.ones(3).half(), "none": None,
    "text": "x", "pair": (1, 2.5), "numbers": {3: torch.ones(2), 4: "four"}, "empty": torch.empty(0, 3),
    "groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": []}],
}  # fmt: skip


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        **VALUES, "weight": torch.zeros(2, 3), "scalar": torch.tensor(0), "half": torch.zeros(3).half(), "none": 1,
        "text": "", "pair": (), "numbers": {3: torch.zeros(2), 4: ""}, "empty": torch.empty(0, 3),
        "groups": [{"lr": 0.0, "params": ["a", "b"]}, {"lr": 0.0, "params": []}],
    }  # fmt: skip
    weight = state["weight"]
    load_into(save(tmp_path / "state", VALUES), state)
    assert state["weight"] is weight
    assert repr(state) == repr(VALUES)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"more": 1}, "differ in more: give both keep and load what"),
        (
            {"weight": torch.ones(2, 4)},
            r"weight is \(2, 4\) in the state, and \(2, 3\) in the checkpoint",
        ),
        ({"weight": 5}, r"weight is no tensor in the state, and \(2, 3\) in the checkpoint"),
    ],
)
def test_another_state_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(RaydistError, match=why):
        load_into(save(tmp_path / "state", VALUES), {**VALUES, **change})


def test_a_missing_rank_leaves_no_checkpoint(tmp_path: Path) -> None:
    save_part(tmp_path / "state", {"x": torch.ones(3)}, 0, 2)
    with pytest.raises(FileNotFoundError):
        commit(tmp_path / "state", 2)


def test_a_plan_is_made_anew_only_for_another_layout() -> None:
    planner = RankPlanner(0)
    first = planner.plan({"x": torch.ones(3), "n": 1})
    assert planner.plan({"x": torch.zeros(3), "n": 2}) is first
    assert planner.plan({"x": torch.zeros(4), "n": 2}) != first
    assert planner.plan({"x": torch.zeros(4)}) != planner.plan({"y": torch.zeros(4)})


def on_mesh() -> Any:
    """This rank, a tensor of 7 rows sharded by rows (of 4 ranks two hold the same rows), and all of
    it."""
    me = context.rank()
    mesh = init_device_mesh("cpu", (2, 2) if me.world_size == 4 else (1, me.world_size))
    full = torch.arange(21.0).view(7, 3)
    return me, distribute_tensor(full, mesh, [Replicate(), Shard(0)]), full


def saves(folder: Path) -> Any:
    def job(job: Job) -> list[str]:
        me, tensor, full = on_mesh()
        save_part(
            folder,
            {"x": tensor, "same": full, "step": torch.tensor(5), "n": me.rank},
            me.rank,
            me.world_size,
        )
        return [
            item.index.fqn
            for item in distributed_checkpoint._Unpickler(open_plan(folder, me.rank))
            .load()[0]
            .items
        ]

    return job


def open_plan(folder: Path, rank: int) -> Any:
    return (folder / f"__{rank}.plan").open("rb")


def loads(folder: Path) -> Any:
    def job(job: Job) -> Any:
        _, tensor, full = on_mesh()
        state = {"x": tensor, "same": torch.zeros(7, 3), "step": torch.tensor(0), "n": -1}
        with torch.no_grad():
            tensor.to_local().zero_()
        load_into(folder, state)
        return (
            torch.equal(tensor.full_tensor(), full),
            torch.equal(state["same"], full),
            int(state["step"]),
            state["n"],
        )

    return job


def test_copies_are_written_once_and_any_number_of_ranks_loads(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    results = run_ranks(4, GLOO, saves(folder), tmp_path)
    assert [each.error for each in results] == [""] * 4
    assert [each.value for each in results] == [["x", "same", "step", "n"], ["x"], [], []]
    commit(folder, 4)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [METADATA, META, *(f"__{rank}_0.distcp" for rank in range(4))]
    )
    for ranks in (2, 3):
        results = run_ranks(ranks, GLOO, loads(folder), tmp_path)
        assert [(each.error, each.value) for each in results] == [("", (True, True, 5, 0))] * ranks
    plain: dict[str, Any] = {
        "x": torch.zeros(7, 3),
        "same": torch.zeros(7, 3),
        "step": torch.tensor(0),
        "n": -1,
    }
    load(plain, checkpoint_id=folder)
    assert torch.equal(plain["x"], torch.arange(21.0).view(7, 3))
    assert plain["n"] == 0


def hides(job: Job) -> str:
    _, tensor, _ = on_mesh()
    with pytest.raises(RaydistError, match="pair is a tuple with DTensors in it") as refused:
        RankPlanner(0).plan({"pair": (tensor, 1)})
    return refused.value.message


def test_a_sharded_tensor_in_a_tuple_is_refused(tmp_path: Path) -> None:
    assert [each.error for each in run_ranks(2, GLOO, hides, tmp_path)] == ["", ""]


class Evil:
    """What would make a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.file,))


def in_storage_data(metadata: Metadata, evil: Evil) -> None:
    metadata.storage_data = evil


def in_planner_data(metadata: Metadata, evil: Evil) -> None:
    metadata.planner_data = {"x": evil}


@pytest.mark.parametrize("change", [None, in_storage_data, in_planner_data])
def test_metadata_runs_nothing(tmp_path: Path, change: Any) -> None:
    folder, evil = save(tmp_path / "state", VALUES), Evil(tmp_path / "ran")
    metadata: Any = pickle.loads((folder / METADATA).read_bytes())
    if change is None:
        metadata = evil
    else:
        change(metadata, evil)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(pickle.UnpicklingError, match="it asks for pathlib"):
        load_into(folder, dict(VALUES))
    assert not evil.file.exists()


def test_other_pickles_are_no_metadata(tmp_path: Path) -> None:
    folder = save(tmp_path / "state", VALUES)
    (folder / METADATA).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(pickle.UnpicklingError, match="holds a dict"):
        load_into(folder, dict(VALUES))


def test_values_run_nothing(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    folder = save(tmp_path / "state", {"x": torch.ones(1), "value": evil})
    with pytest.raises(pickle.UnpicklingError):
        load_into(folder, {"x": torch.ones(1), "value": None})
    assert not evil.file.exists()


def test_a_plan_in_memory_runs_nothing(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "ran")
    with pytest.raises(pickle.UnpicklingError):
        distributed_checkpoint.write_part(
            tmp_path, RankPart(0, 1, {"x": torch.ones(1)}, pickle.dumps(evil))
        )
    assert not evil.file.exists()


def test_only_the_files_of_the_checkpoint_are_opened(tmp_path: Path) -> None:
    folder, other = (
        save(tmp_path / "state", {"x": torch.ones(2)}),
        save(tmp_path / "other", {"x": torch.zeros(2)}),
    )
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../{other.name}/{info.relative_path}"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    state = {"x": torch.full((2,), 5.0)}
    load_into(folder, state)
    assert state["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("module", "name"), sorted(ADMITTED))
def test_this_torch_has_what_is_admitted(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_a_store_gives_each_file_with_its_checksum(tmp_path: Path) -> None:
    folder = object_store.parse_path(f"memory://bucket/{tmp_path.name}/step-00000001")
    plan = RankPlanner(0).plan(VALUES)
    files = distributed_checkpoint.write_part(folder, RankPart(0, 1, VALUES, plan))
    complete(
        folder,
        folder,
        Meta.of(1, 1, {}, files | distributed_checkpoint.write_metadata(folder, 1), sharded=True),
    )
    state = {**VALUES, "weight": torch.zeros(2, 3)}
    load_into(folder, state)
    assert torch.equal(state["weight"], VALUES["weight"])
    (folder / "__0_0.distcp").write_text("x")
    with pytest.raises(RaydistError, match="another checksum"):
        load_into(folder, state)


PLAIN = """
import json, sys
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
state = torch.load(sys.argv[2], weights_only=True)
print(json.dumps([state["weight"].tolist(), state["pair"], state["groups"]]))
"""


def test_torch_makes_one_file_of_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "state", VALUES)
    words = [sys.executable, "-c", PLAIN, str(folder), str(tmp_path / "one.pt")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(ended.stdout) == [VALUES["weight"].tolist(), [1, 2.5], VALUES["groups"]]
