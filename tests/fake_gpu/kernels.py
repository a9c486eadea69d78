"""The kernels of the fake GPU: torch's own CPU kernels, called on the same memory.

torch imports this module at the end of `import torch`: build() registers it under the entry point
`torch.backends`, torch's own way to load the code of a device. Each operator that has a kernel for
CUDA, and one for the CPU, gets one that waits for its stream, calls the operator on CPU tensors
which are views of the same memory, and moves new results into memory of the device. All around the
kernels is torch's CUDA build as it is: devices, allocator, streams, autograd, autocast, DDP, FSDP,
NCCL's process groups, copies between host and device. What differs: random numbers of a device come
from the CPU's generator, and the host waits at each kernel for what is before it in its stream.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch

ALSO = ("aten::convolution", "aten::convolution_backward")  # or torch would choose cuDNN's
NATIVE = {
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
}
"""They launch no kernel; nor do those that return views."""

runtime = ctypes.CDLL(None)
kept: list[torch.library.Library] = []


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that is the same memory as a CUDA tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(flat, *place)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CUDA tensor with the values and strides of a CPU tensor."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    on_host(made).copy_(tensor)
    return made


def wait(device: torch.device) -> None:
    """Wait for the current stream of a device; other threads of Python run meanwhile."""
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):  # the default streams of all devices have the same number
        code = runtime.cudaStreamSynchronize(ctypes.c_void_p(stream))
    if code:
        text = ctypes.c_char_p(runtime.cudaGetErrorString(code)).value
        raise torch.AcceleratorError(f"CUDA error: {(text or b'').decode()}")


def convert(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with each tensor, device and generator in it changed."""
    if isinstance(value, list | tuple):
        return type(value)(convert(item, change) for item in value)
    if isinstance(value, torch.Tensor | torch.device | torch.Generator):
        return change(value)
    return value


def on_same_memory(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return a kernel for CUDA that calls an operator on CPU tensors."""
    tensors = [at for at, each in enumerate(op._schema.arguments) if str(each.type) == "Tensor"]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        of_view: dict[int, torch.Tensor] = {}
        devices = []

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return None if value.device.type == "cuda" else value
            device = value if isinstance(value, torch.device) else value.device
            if device.type != "cuda":
                return value
            devices.append(device)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            view = on_host(value)
            of_view[id(view)] = value
            views.append(view)
            return view

        def back(value: Any) -> Any:
            if id(value) in of_view:
                return of_view[id(value)]
            return to_device(value, where) if isinstance(value, torch.Tensor) else value

        views: list[torch.Tensor] = []  # alive until the end: an id belongs to one of them
        inputs = convert(args, to_host)
        named = {name: convert(value, to_host) for name, value in kwargs.items()}
        where = devices[0] if devices else torch.device("cuda", torch.cuda.current_device())
        wait(where)
        # Python gets a number for a tensor that torch has made of one: another overload takes it.
        number = any(
            isinstance(value, int | float) for at, value in enumerate(args) if at in tensors
        )
        result = (op.overloadpacket if number else op)(*inputs, **named)
        for view in views:
            given = of_view[id(view)]
            if view.shape != given.shape:  # an empty tensor, given for the result
                given.resize_(view.shape).as_strided_(view.shape, view.stride())
                on_host(given).copy_(view)
        return convert(result, back)

    return kernel


def copying(native: Any, on_device: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel of `copy_`: torch's own one copies to and from the host.

    It waits for the stream, if the caller does, before torch's own one would with Python's lock.
    """

    def kernel(keys: Any, into: torch.Tensor, source: torch.Tensor, *more: Any) -> Any:
        if into.is_cuda and source.is_cuda:
            return on_device(into, source, *more)
        if not any(more):  # not non_blocking
            wait(source.device if source.is_cuda else into.device)
        return native.call_boxed(keys, into, source, *more)

    return kernel


def rms_norm_backward(
    grad: torch.Tensor,
    value: torch.Tensor,
    shape: list[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of RMSNorm's input and weight: the CPU has no such operator."""
    inner = [-1 - number for number in range(len(shape))]
    normal, weighted = value * scale, grad if weight is None else grad * weight
    of_value = scale * (weighted - normal * (weighted * normal).mean(inner, keepdim=True))
    of_weight = (grad * normal).reshape(-1, *shape).sum(0).to(value.dtype) if mask[1] else None
    return of_value.to(value.dtype), of_weight


def overload(name: str) -> torch._ops.OpOverload | None:
    """Return the operator of a name like aten::add.Tensor."""
    base, _, which = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base, None), which or "default", None)


def is_view(op: torch._ops.OpOverload) -> bool:
    found = (each.alias_info for each in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in found)


def register() -> None:
    """Give torch the kernels; called by torch."""
    torch.backends.cudnn.enabled = False
    # Attention is then made of other operators, which have kernels of the CPU.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    found = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = {*(name for name in found if name.startswith("aten::")), *ALSO} - NATIVE
    native_copy = torch.library.get_kernel("aten::copy_", "CUDA")
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kept.append(library)  # its end would take the kernels away
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each overrides a kernel
        for name in sorted(names):
            op = overload(name)
            if op is not None and not is_view(op) and has_kernel(name, "CPU"):
                library.impl(op, on_same_memory(op), "CUDA")
        library.impl("_fused_rms_norm_backward", rms_norm_backward, "CUDA")
        copy = copying(native_copy, on_same_memory(torch.ops.aten.copy_.default))
        library.impl("copy_", copy, "CUDA", with_keyset=True)
