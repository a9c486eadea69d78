"""All private parts of torch that raydist uses, each with a fallback. (rank side)"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from raydist.messages.rank import Collective

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    import torch.profiler
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


FORWARD_BEGINS, FORWARD_ENDS = "_pre_forward", "_post_forward"
"""Methods of DistributedDataParallel around the forward pass of its module."""
GIVE_WAY_S = 60.0
"""Longest wait of the program's own profiler for the end of raydist's."""
HISTORY = 100_000
"""Allocations that a memory snapshot holds, oldest dropped first."""

ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""The operations that torch.nn.functional.scaled_dot_product_attention calls."""


class Recorder(NamedTuple):
    """One instance of torch's flight recorder; each backend implementation records into its own."""

    backend: str
    """gloo or nccl: the backend that it belongs to, as a hang report names it."""
    function: str
    """A function of torch._C._distributed_c10d, Python's way to FlightRecorder.hpp."""
    instance: str = ""
    """The argument `backend` of that function, which torch 2.15 added; empty: called without it."""


RECORDERS: tuple[Recorder, ...] = (
    Recorder("gloo", "_dump_fr_trace_json"),
    # torch 2.15's `nccl`: ProcessGroupNCCL2, or its lazy kind
    Recorder("nccl", "_dump_fr_trace_json", "nccl2"),
    Recorder("nccl", "_dump_fr_trace_json", "nccl-lazy"),
    # ProcessGroupNCCL: `nccl` up to torch 2.14, `nccl-legacy` or TORCH_DIST_USE_NCCL2=0 since
    Recorder("nccl", "_dump_nccl_trace_json"),
)
"""Every instance that may hold collectives of a rank. An unused instance is empty."""


def flight_recorder(backend: str, since_ns: int = 0) -> list[Collective] | None:
    """Return the collectives in all recorders of a backend, oldest first; None if torch has none.

    `since_ns`: leave out those before this time, in nanoseconds since the epoch. A recorder
    is on by default, for gloo on a CPU too (torch 2.8 and newer).
    """
    dumps = [_dump(recorder) for recorder in RECORDERS if recorder.backend == backend]
    found = [entries for entries in dumps if entries is not None]
    if not found:
        return None
    entries = [entry for each in found for entry in each]
    entries.sort(key=lambda entry: entry.get("time_created_ns", 0))
    entries = [each for each in entries if each.get("time_created_ns", since_ns) >= since_ns]
    keys = Collective.__annotations__
    return [cast("Collective", {key: entry.get(key) for key in keys}) for entry in entries]


def _dump(recorder: Recorder) -> list[Any] | None:
    """Return the entries of one instance; None if this torch does not have it."""
    from torch._C import _distributed_c10d

    dump: Callable[..., bytes] | None = getattr(_distributed_c10d, recorder.function, None)
    if dump is None:
        return None
    if not recorder.instance:
        said = dump(includeCollectives=True, onlyActive=False)
    elif "backend" not in (dump.__doc__ or ""):
        return None  # a torch before 2.15: one instance for each function
    else:
        said = dump(includeCollectives=True, onlyActive=False, backend=recorder.instance)
    entries: list[Any] = json.loads(said).get("entries") or []
    return entries


def attention_kernels() -> list[Any]:
    """Return the operations of attention that this torch has.

    The output of any other is computed again with `train.recompute=selective`.
    """
    import torch

    aten = torch.ops.aten
    return [getattr(aten, name).default for name in ATTENTION if hasattr(aten, name)]


def connects_anew() -> bool:
    """Report whether gloo's process group can be connected anew (torch 2.14).

    It can't inside the wrapper with which TORCH_DISTRIBUTED_DEBUG=DETAIL checks each collective.
    """
    from torch.distributed import distributed_c10d

    names = ("_reconfigure", "_get_reconfigure_handle")
    level = distributed_c10d.get_debug_level()
    return all(hasattr(distributed_c10d, name) for name in names) and level.name != "DETAIL"


def group_handle() -> str:
    """Return what other ranks need to connect the default group to this one."""
    from torch.distributed import distributed_c10d

    handle: str = distributed_c10d._get_reconfigure_handle()
    return handle


def connect_group(number: int, handles: Sequence[str]) -> None:
    """Connect the default group to the ranks with these handles. `number`: unique in the run."""
    from torch.distributed import distributed_c10d

    distributed_c10d._reconfigure(uuid=number, handles=[*handles]).wait()


def group_store() -> Any:
    """Return the store of the default group; None if this torch does not tell."""
    from torch.distributed import distributed_c10d

    try:
        world: Any = distributed_c10d._world
        return world.pg_map[distributed_c10d._get_default_group()][1]
    except AttributeError:
        return None


def begin_groups_anew(number: int, store: Any) -> None:
    """Leave all groups but the default one, and name the next ones as in a new process.

    torch names a group by a counter. With the same names, what torch has cached about a mesh (the
    results of operations on DTensors) finds the new groups. `number`: unique in the run; the new
    groups have a part of `store` for themselves.
    """
    from torch.distributed import destroy_process_group, distributed_c10d

    if not hasattr(distributed_c10d._World, "group_count") or group_store() is None:
        return
    world: Any = distributed_c10d._world
    default = distributed_c10d._get_default_group()
    for group in [each for each in world.pg_map if each is not default]:
        destroy_process_group(group)
    backend, _ = world.pg_map[default]
    part = distributed_c10d.PrefixStore(f"attempt-{number}", store)
    world.pg_map[default] = backend, part
    world.group_count = 1


def divides_anew() -> bool:
    """Report whether sub-groups can be made anew, and a model can be divided once more."""
    from torch.distributed import _composable_state, distributed_c10d

    counts = hasattr(getattr(distributed_c10d, "_World", None), "group_count")
    knows = hasattr(_composable_state, "_module_state_mapping")
    return counts and knows and group_store() is not None


def forget_division(module: torch.nn.Module) -> None:
    """Let fully_shard divide a module that it has divided before."""
    from torch.distributed import _composable_state

    _composable_state._module_state_mapping.pop(module, None)


def allow_compilations(number: int) -> None:
    """Let torch.compile compile one function at least so often; later calls run uncompiled.

    Its default is 8, for blocks of one class in all.
    """
    import torch._dynamo

    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, number)


def forget_compiled(module: torch.nn.Module) -> None:
    """Undo `module.compile()`."""
    module._compiled_call_impl = None


def drop_reducer(model: Any) -> None:
    """Free the buckets of a DistributedDataParallel, and its hooks in the backward pass."""
    model.reducer = model.logger = None


def group_use() -> tuple[int, int] | None:
    """Return the number of process groups, and that of the default group's collectives so far.

    None if this torch does not count them.
    """
    from torch.distributed import distributed_c10d

    try:
        default: Any = distributed_c10d._get_default_group()
        return len(distributed_c10d._world.pg_map), default._get_sequence_number_for_group()
    except AttributeError:
        return None


def fake_tensors() -> AbstractContextManager[Any]:
    """Create tensors without values but with a device inside the block.

    Attention is that of a CPU, which it would not be on meta.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        from torch import device

        return device("meta")
    return FakeTensorMode()


def note_operations(note: Callable[[Any, Any], None]) -> AbstractContextManager[Any]:
    """Call `note` with each operation, as torch.ops names it, and its output inside the block.

    A torch without the private class notes none.
    """
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        return contextlib.nullcontext()

    class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = operation(*args, **(kwargs or {}))
            note(operation, output)
            return output

    return Noting()  # type: ignore[no-untyped-call]


def import_dynamo() -> None:
    """Import what torch's optimizers otherwise import in their first step.

    `run_standalone` says what goes wrong if that is while a DDP model exists.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")


def prepare_compiler() -> None:
    """Do what a process does once, when it first compiles, for all that are forked from this one.

    It imports the compiler, and hashes the files of torch and Triton, which are part of the names
    of all compiled code on the disk. It starts no thread and does not use a GPU.
    """
    with contextlib.suppress(Exception):  # in another torch each rank does it for itself
        importlib.import_module("torch._inductor.compile_fx")
        code_cache = importlib.import_module("torch._inductor.codecache")
        for name in ("torch_key", "triton_key"):
            if (hashed := getattr(code_cache, name, None)) is not None:
                hashed()


def multiply_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place: on a GPU in a few kernels, in place of one for each tensor."""
    import torch

    # The public clip_grads_with_norm_ takes parameters, and these are the local parts of DTensors.
    if multiply := getattr(torch, "_foreach_mul_", None):
        multiply(tensors, factor)
        return
    for each in tensors:
        each.mul_(factor)


def set_timeout(group: Any, limit: timedelta) -> None:
    """Set how long an operation of a process group may take.

    A mesh creates its groups with torch's own limit.
    """
    from torch.distributed import distributed_c10d

    # public since torch 2.15
    change = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    change(limit, group)


def group_timeouts() -> list[tuple[Any, timedelta]]:
    """Return the process groups of this rank, each with the timeout of its operations.

    Those whose timeout this torch does not tell are left out.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    from torch.distributed import distributed_c10d

    found = []
    world = getattr(distributed_c10d, "_world", None)
    for group in list(getattr(world, "pg_map", ())):
        with contextlib.suppress(AttributeError, IndexError, RuntimeError):
            backend = group._get_backend(group._device_types[0])
            found.append((group, backend.options._timeout))
    return found


def gpipe(stage: PipelineStage, count: int) -> ScheduleGPipe:
    """Return a schedule of `count` micro-batches.

    torch 2.8 refuses fewer micro-batches than stages, but only when the schedule is created.
    """
    from torch.distributed.pipelining import ScheduleGPipe

    try:
        return ScheduleGPipe(stage, count)
    except ValueError:
        made = ScheduleGPipe(stage, stage.num_stages)
        made._n_microbatches = count
        return made


def unscale_before_step(optimizer: torch.optim.Optimizer) -> None:
    """Have a GradScaler unscale the gradients of this optimizer, which is no longer fused.

    A fused one does so itself; the others fail if the scaler still leaves it to them.
    """
    if hasattr(optimizer, "_step_supports_amp_scaling"):
        optimizer._step_supports_amp_scaling = False


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return the scaler's state_dict with tensors on its device instead of numbers.

    A number would make the host wait for the GPU.
    """
    if (
        not scaler.is_enabled()
        or (scale := getattr(scaler, "_scale", None)) is None
        or (tracker := getattr(scaler, "_growth_tracker", None)) is None
    ):
        return scaler.state_dict()  # it was never used, or this torch has other names
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker,
    }


@contextlib.contextmanager
def profile_all_threads() -> Iterator[torch.profiler.profile]:
    """Profile all threads of this process inside the block, and its GPU if it uses one.

    RuntimeError: this torch profiles only the thread itself.
    """
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    try:
        options: Any = _ExperimentalConfig(profile_all_threads=True)
    except TypeError as error:
        why = f"torch {torch.__version__} profiles no other thread; install a newer one"
        raise RuntimeError(why) from error
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=options) as profiler:
        yield profiler


class ProfilerTurn:
    """Whose turn it is to profile this process: two profilers at a time crash it (torch 2.15)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: Literal["", "raydist", "program"] = ""
        self._thread = 0
        """The thread that makes raydist's profile."""
        self._give_way: threading.Event | None = None
        self._pid = os.getpid()
        self.lacks = ""
        """What torch lacks for it to be known; then raydist must not profile."""

    def watch_program(self) -> None:
        """Note each profiler of the program from now on; it ends one of raydist's first."""
        import torch
        from torch.autograd.profiler import profile

        patched: Any = profile
        prepare, leave = getattr(profile, "_prepare_trace", None), patched.__exit__
        if prepare is None:
            self.lacks = (
                f"torch {torch.__version__} has no profile._prepare_trace: raydist can't know "
                "whether the program's own profiler is active"
            )
            return
        turn = self

        def _prepare_trace(self: Any) -> Any:
            turn.take()
            return prepare(self)

        def __exit__(self: Any, *error: Any) -> Any:
            try:
                return leave(self, *error)
            finally:
                turn.give_back()

        patched._prepare_trace, patched.__exit__ = _prepare_trace, __exit__

    def take(self) -> None:
        """The program begins to profile: wait until raydist has stopped."""
        with self._changed:
            if self._thread == threading.get_ident() or os.getpid() != self._pid:
                return
            if self._give_way is not None:
                self._give_way.set()
            self._changed.wait_for(lambda: self._owner != "raydist", GIVE_WAY_S)
            self._owner = "program"

    def give_back(self) -> None:
        """The program's profiler has ended."""
        with self._changed:
            if self._owner == "program":
                self._owner = ""

    @contextlib.contextmanager
    def own(self, give_way: threading.Event | None = None) -> Iterator[bool]:
        """Take the turn for raydist inside the block; False: the program has it.

        `give_way`: is set when the program wants it.
        """
        with self._changed:
            ours = not self._owner
            if ours:
                self._owner, self._thread = "raydist", threading.get_ident()
                self._give_way = give_way
        try:
            yield ours
        finally:
            if ours:
                with self._changed:
                    self._owner, self._thread, self._give_way = "", 0, None
                    self._changed.notify_all()


def begin_memory_history() -> bool:
    """Have torch record what allocates GPU memory from here; False: it does already, or can't."""
    import torch

    memory: Any = torch.cuda.memory
    begin = getattr(memory, "_record_memory_history", None)
    records = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    if begin is None or not torch.cuda.is_initialized() or records():  # type: ignore[no-untyped-call]
        return False
    begin(max_entries=HISTORY)
    return True


def end_memory_history(path: str) -> None:
    """Write the recorded history and the present use to a file, and end the recording."""
    import torch

    memory: Any = torch.cuda.memory
    memory._dump_snapshot(path)
    memory._record_memory_history(enabled=None)
