"""torch's private parts, as this torch has them; and what a rank says where a torch has them no
longer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import _composable_state, distributed_c10d

from raydist.messages.rank import Collective, TellActivity
from raydist.messages.wire import encode
from raydist.settings.config import Backend, Job, Train
from raydist.training import outlive
from raydist.training.blueprint import indivisible
from raydist.worker import context, stacks, torch_private
from raydist.worker.channel import Channel
from raydist.worker.timeouts import HELD, GroupTimeouts
from tests.ranks import run_ranks
from tests.worker.test_channel import Line

GLOO = Job(backend=Backend(name="gloo"))


def reduce_three_times(job: Job) -> Any:
    import torch
    import torch.distributed as dist

    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    return stacks.collectives()


def without_recorder(job: Job) -> Any:
    torch_private.RECORDERS = (torch_private.Recorder("gloo", "_no_such_recorder"),)
    return stacks.collectives()


def read_each_torch(job: Job) -> dict[str, Any]:
    """Return the collectives that the reader finds if another torch keeps them: the prefix and the
    shape of each."""
    import torch
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d  # torch before 2.15 has no type hints of these functions
    for size in (3, 4):
        dist.all_reduce(torch.ones(size))
    recorded: bytes = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False)

    def under(prefix: str) -> bytes:
        return recorded.replace(b"gloo:", f"{prefix}:".encode())

    def legacy(includeCollectives: bool, onlyActive: bool) -> bytes:
        return under("nccl")

    def one_instance(includeCollectives: bool, onlyActive: bool) -> bytes:
        return recorded

    result: dict[str, Any] = {}

    def read(torch_of: str, **functions: Any) -> None:
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            setattr(c10d, name, functions.get(name))
        entries = torch_private.flight_recorder("nccl")
        result[torch_of] = entries and [
            (each["profiling_name"], each["input_sizes"]) for each in entries
        ]
        result[torch_of + ", gloo"] = len(torch_private.flight_recorder("gloo") or [])

    read("2.14", _dump_fr_trace_json=one_instance, _dump_nccl_trace_json=legacy)
    read("without NCCL", _dump_fr_trace_json=one_instance)
    for instance in ("nccl2", "nccl-lazy"):

        def several(
            includeCollectives: bool, onlyActive: bool, backend: str = "gloo", own: str = instance
        ) -> bytes:
            """_dump_fr_trace_json(includeCollectives=None, onlyActive=None, backend: str = 'gloo')
            -> bytes"""
            return under(backend) if backend in ("gloo", own) else b"{}"

        read(instance, _dump_fr_trace_json=several, _dump_nccl_trace_json=lambda **_: b"{}")
    return result


def test_every_instance_of_the_recorder_is_read(tmp_path: Path) -> None:
    """torch 2.15's NCCL records elsewhere than 2.14's, and an older torch has no names for its
    instances."""
    (result,) = run_ranks(1, GLOO, read_each_torch, tmp_path, {"TORCH_FR_BUFFER_SIZE": "2000"})
    assert result.error == ""
    recorders = result.value
    for torch_of, prefix in (("2.14", "nccl"), ("nccl2", "nccl2"), ("nccl-lazy", "nccl-lazy")):
        reduced = [
            (name, sizes) for name, sizes in recorders[torch_of] if name == f"{prefix}:all_reduce"
        ]
        assert reduced[-2:] == [(f"{prefix}:all_reduce", [[3]]), (f"{prefix}:all_reduce", [[4]])]
        assert recorders[f"{torch_of}, gloo"] >= 2
    assert recorders["without NCCL"] is None
    assert recorders["without NCCL, gloo"] >= 2


def test_the_recorder_has_what_a_hang_report_reads(tmp_path: Path) -> None:
    # torch 2.8 records only with the variable that network/variables.py plans for it
    for result in run_ranks(
        2, GLOO, reduce_three_times, tmp_path, {"TORCH_FR_BUFFER_SIZE": "2000"}
    ):
        assert result.error == ""
        entries, lacks = result.value
        assert lacks == ""
        newest = entries[-1]
        assert set(newest) == set(Collective.__annotations__)
        assert None not in newest.values()
        assert (newest["profiling_name"], newest["input_sizes"]) == ("gloo:all_reduce", [[3]])


def test_a_torch_without_a_recorder_is_named(tmp_path: Path) -> None:
    for result in run_ranks(2, GLOO, without_recorder, tmp_path):
        assert result.error == ""
        entries, lacks = result.value
        assert entries == []
        assert "keeps no record of gloo's collectives" in lacks


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_rank_0_warns_once_of_a_missing_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, count: int
) -> None:
    def broken(since_ns: int) -> Any:
        raise TypeError("_dump_fr_trace_json() got an unexpected keyword argument")

    monkeypatch.setattr(stacks, "collectives", broken)
    line = Line(tmp_path)
    me = context.Rank(rank=rank, world_size=2, run_dir=tmp_path)
    context.enter(context.Context(rank=me, emit=line.channel.emit, beat=lambda step, phase: None))
    try:
        for _ in range(2):
            line.socket.sendall(encode(TellActivity()) + b"\n")
        received = [line.receive() for _ in range(2 + count)]
    finally:
        context.enter(None)
        line.channel.shut()
    assert isinstance(line.channel, Channel)
    assert [each["collectives"] for each in received if each.get("protocol") == "Activity"] == [
        [],
        [],
    ]
    warnings = [each["text"] for each in received if each.get("kind") == "warning"]
    assert len(warnings) == count
    assert all("TypeError: _dump_fr_trace_json()" in text for text in warnings)


def without_ddps_methods(job: Job) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    for name in (torch_private.FORWARD_BEGINS, torch_private.FORWARD_ENDS):
        delattr(DistributedDataParallel, name)
    return time_steps()


def without_horovods_optimizer(job: Job) -> list[str]:
    sys.modules["horovod.torch.optimizer"] = ModuleType("horovod.torch.optimizer")
    return time_steps()


def time_steps() -> list[str]:
    from raydist.worker import main

    channel: Any = SimpleNamespace(note_compute_time=None, note_pauses=None)
    main.watch_steps(Job(train=Train(gc=0)), channel)
    return []


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (without_ddps_methods, "DistributedDataParallel._pre_forward"),
        (without_horovods_optimizer, "_DistributedOptimizer.synchronize"),
    ],
)
def test_a_library_with_which_steps_are_not_timed_is_named(
    tmp_path: Path, without: Callable[[Job], list[str]], missing: str
) -> None:
    first, second = run_ranks(2, GLOO, without, tmp_path)
    assert (first.error, second.error) == ("", "")
    (warning,) = [each for each in first.events if each["kind"] == "warning"]
    assert f"has no {missing}: slow ranks are not named" in warning["text"]
    assert not [each for each in second.events if each["kind"] == "warning"]


def limit_before_torch_2_15(job: Job) -> float:
    """Return the limit of a group after a change of it, which only a private function can make."""
    import torch
    import torch.distributed as dist

    group: Any = dist.new_group()
    library: Any = dist
    library.distributed_c10d = SimpleNamespace(_set_pg_timeout=distributed_c10d._set_pg_timeout)
    torch_private.set_timeout(group, timedelta(seconds=77))
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit.total_seconds()


@pytest.mark.skipif(
    not hasattr(distributed_c10d, "_set_pg_timeout"), reason="this torch has only the public name"
)
def test_the_limit_of_a_group_is_changed_without_the_public_name(tmp_path: Path) -> None:
    for result in run_ranks(2, GLOO, limit_before_torch_2_15, tmp_path):
        assert result.error == ""
        assert result.value == 77


def limits_while_held(job: Job) -> list[list[float]]:
    """Return the limits of two groups: before, with two reasons to raise them, one, and none."""
    import torch
    import torch.distributed as dist

    groups: list[Any] = [dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=50))]
    timeouts, found = GroupTimeouts(), []

    def note() -> None:
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        found.append([each.options._timeout.total_seconds() for each in backends])

    note()
    before = timeouts.hold("a")
    assert timeouts.hold("b") == before > 0
    note()
    timeouts.let_go("a")
    note()
    timeouts.let_go("b")
    note()
    return found


def test_the_limits_of_all_groups_are_raised_while_there_is_a_reason(tmp_path: Path) -> None:
    for result in run_ranks(2, GLOO, limits_while_held, tmp_path):
        assert result.error == ""
        first, both, one, none = result.value
        assert first == none
        assert first[1] == 50
        assert both == one == [HELD.total_seconds()] * 2


def held_without_the_list_of_groups(job: Job) -> int:
    """Return what a rank replies that can't raise limits: this torch does not list its groups."""
    library: Any = distributed_c10d
    world = library._world
    library._world = SimpleNamespace(default_pg=world.default_pg)
    try:
        return GroupTimeouts().hold("a")
    finally:
        library._world = world


def test_without_the_list_of_groups_no_limit_is_raised(tmp_path: Path) -> None:
    for result in run_ranks(2, GLOO, held_without_the_list_of_groups, tmp_path):
        assert (result.error, result.value) == ("", 0)


@pytest.mark.parametrize("name", ["_reconfigure", "_get_reconfigure_handle"])
def test_ranks_are_not_connected_anew_without_either_function(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(distributed_c10d, name, raising=False)
    assert not torch_private.connects_anew()


@pytest.mark.parametrize("name", ["_world", "_get_default_group"])
def test_a_rank_does_not_outlive_another_if_torch_does_not_count_collectives(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(distributed_c10d, "_get_default_group", object)
    monkeypatch.delattr(distributed_c10d, name)
    order: Any = SimpleNamespace(kind="map")
    context.enter(context.Context(context.Rank(), lambda event: None, lambda step, phase: None))
    try:
        assert "this torch does not say" in outlive.unable(order)
    finally:
        context.enter(None)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(_composable_state, "_module_state_mapping"), (distributed_c10d, "_World")],
)
def test_a_model_is_not_divided_twice_without_either_name(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    monkeypatch.setattr(torch_private, "group_store", object)
    layer = torch.nn.Linear(2, 2)
    assert indivisible(layer) == ""
    monkeypatch.delattr(owner, name)
    assert indivisible(layer) == "this torch does not divide a model twice"


def groups_without_a_counter(job: Job) -> Any:
    import torch.distributed as dist

    group: Any = dist.new_group()
    library: Any = distributed_c10d
    del library._World.group_count
    torch_private.begin_groups_anew(1, torch_private.group_store())
    dist.barrier(group=group)
    return dist.get_world_size(group)


def test_groups_stay_where_torch_does_not_count_them(tmp_path: Path) -> None:
    results = run_ranks(2, GLOO, groups_without_a_counter, tmp_path)
    assert [(each.error, each.value) for each in results] == [("", 2)] * 2


class FlatScaler:
    """A GradScaler of a torch that has other names for its tensors."""

    def is_enabled(self) -> bool:
        return True

    def state_dict(self) -> dict[str, float]:
        return {"scale": 2.0}


def products_noted() -> int:
    """Multiply two matrices; return how many products were noted."""
    import torch

    noted: list[Any] = []
    with torch_private.note_operations(lambda operation, output: noted.append(operation)):
        torch.ones(2, 2) @ torch.ones(2, 2)
    return noted.count(torch.ops.aten.mm.default)


def test_torchs_private_names_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for without in (False, True):
        if without:
            monkeypatch.delattr(torch, "_foreach_mul_")
            for module in (
                "torch._dynamo",
                "torch._inductor.codecache",
                "torch._subclasses.fake_tensor",
                "torch.utils._python_dispatch",
            ):
                monkeypatch.setitem(sys.modules, module, None)
        tensors = [torch.ones(2), torch.ones(3)]
        torch_private.multiply_all(tensors, torch.tensor(0.5))
        assert [each.tolist() for each in tensors] == [[0.5] * 2, [0.5] * 3]
        torch_private.import_dynamo()
        if without:
            torch_private.prepare_compiler()
        with torch_private.fake_tensors():
            made = torch.ones(2)
        assert made.device.type == ("meta" if without else "cpu")
        assert products_noted() == (0 if without else 1)
    scaler: Any = FlatScaler()
    assert torch_private.scaler_state(scaler) == {"scale": 2.0}


def test_a_scaler_is_told_only_of_optimizers_that_would_have_unscaled() -> None:
    for fused, name in ((True, {"_step_supports_amp_scaling": False}), (False, {})):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, fused=fused)
        torch_private.unscale_before_step(optimizer)
        assert {key: each for key, each in vars(optimizer).items() if "amp" in key} == name


READY = """
import os, sys
import torch._dynamo

def refuse(*given):
    raise SystemExit("CUDA was used: a process that is forked from this one could not")

own = {each: getattr(torch._C, each) for each in dir(torch._C) if each.startswith("_cuda_")}
for each in own:
    setattr(torch._C, each, refuse)
threads = os.listdir("/proc/self/task")
import raydist.worker.compiler

vars(torch._C).update(own)
assert os.listdir("/proc/self/task") == threads, "a thread would be missing in the ranks"
assert "torch._inductor.compile_fx" in sys.modules
opened = []
sys.addaudithook(lambda event, given: event == "open" and opened.append(given[0]))
from torch._inductor import codecache
assert codecache.torch_key()
if hasattr(codecache, "triton_key"):  # a newer torch, which hashes Triton by a function of its own
    assert codecache.CacheBase.get_system()
assert len(opened) < 100, f"{len(opened)} files were read again"
"""


def test_what_is_forked_neither_imports_the_compiler_nor_hashes_its_files() -> None:
    done = subprocess.run([sys.executable, "-c", READY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_torch_without_a_kernel_of_attention_has_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = torch_private.attention_kernels()
    assert len(kernels) == len(torch_private.ATTENTION)
    names = ("_no_such_attention", *torch_private.ATTENTION[1:])
    monkeypatch.setattr(torch_private, "ATTENTION", names)
    assert torch_private.attention_kernels() == kernels[1:]


def test_a_torch_whose_profilers_are_not_known_is_not_profiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.autograd.profiler import profile

    from raydist.worker import profiling

    monkeypatch.delattr(profile, "_prepare_trace")
    turn = torch_private.ProfilerTurn()
    turn.watch_program()
    assert "has no profile._prepare_trace" in profiling.reason_against(turn, memory=False)


def test_a_torch_that_profiles_no_other_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C import _profiler

    def other(**options: Any) -> None:
        raise TypeError("an unexpected keyword argument 'profile_all_threads'")

    monkeypatch.setattr(_profiler, "_ExperimentalConfig", other)
    with (
        pytest.raises(RuntimeError, match="profiles no other thread"),
        torch_private.profile_all_threads(),
    ):
        pass


def test_a_torch_without_memory_history_takes_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    assert not torch_private.begin_memory_history()


def make_steps(job: Job) -> list[int]:
    """The steps counted after each of: a plain optimizer, one that calls another's step, a
    compiled one, and one whose step failed before."""
    import torch

    from raydist.worker import context, profiling

    class Wraps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)  # which has hooks of its own, as Horovod's does

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.defaults["lr"] > 1:
                raise RuntimeError("too fast")
            return super().step(closure)

    profiling.count_optimizer_steps()
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    plain = torch.optim.SGD([weight], 0.1)
    wraps, fails = Wraps([weight], 0.1), Fails([weight], 2.0)
    seen = []

    def note() -> None:
        seen.append(context.current().actions.hold_in_fit()[0] - 1)
        context.current().actions.release()

    plain.step()
    note()
    wraps.step()
    note()
    torch.compile(plain.step, backend="eager")()
    note()
    with pytest.raises(RuntimeError, match="too fast"):
        fails.step()
    note()
    plain.step()
    note()
    return seen


def test_steps_of_optimizers_are_counted_once(tmp_path: Path) -> None:
    (result,) = run_ranks(1, GLOO, make_steps, tmp_path)
    assert result.error == ""
    assert result.value == [1, 2, 2, 2, 3]
