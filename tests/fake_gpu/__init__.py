"""A machine with GPUs that compute nothing, on any machine with a compiler and a CUDA build of torch.

    machine = FakeGpus(tmp_path, build(folder), count=2)
    subprocess.run([sys.executable, …], env={**os.environ, **machine.env()})

What is real: torch's CUDA build, all of it: its devices, allocator, streams, events, autograd, DDP,
FSDP, pipelines, and its process groups for NCCL with their watchdogs and flight recorders; Ray's and
raydist's reading of GPUs. What is not:

| file | in place of |
|---|---|
| `cuda.c` | libcudart and libcuda: memory of a device is memory of the host, a stream is a queue |
| `nccl.c` | libnccl: collectives on that memory, between processes of one machine, over Unix sockets |
| `ras.c` | its RAS: a thread that answers on a local port what all ranks have launched |
| `nvml.c` | libnvidia-ml: readings and Xids from files that the test writes |
| `kernels.py` | the kernels: torch's own ones of the CPU, called on the same memory |
| `missing.c` | made by `build()`: what else torch is linked with; such a call is an error |

Compiled libraries with the names of the real ones are preloaded (LD_PRELOAD): the loader takes a
library that is loaded already for one of the same name, so torch's own are not opened. torch is not
changed. It loads `kernels.py` itself, as the code of a device (entry point `torch.backends`).

What it cannot tell stands in bench/gpu.py, ONLY_REAL: `make gpu` prints it when it runs on this one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
WANTED = re.compile(r"(?:__cuda|cuda|cu|nccl)[A-Z]\w*")
"""Names of the libraries that are replaced; cuFile's are another library's."""


def obstacle() -> str:
    """Return why there can be no fake GPU on this machine; empty if there can."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    tools = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    return f"no {tools[0]} here" if tools else ""


requires_fake_gpus = pytest.mark.skipif(obstacle() != "", reason=obstacle() or "-")


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML and CUDA see it."""

    state: str = "ok"
    """ok; ecc: an uncorrectable memory error; lost: it fell off the bus."""
    mig: int = 0
    """Its number of MIG instances."""
    busy: int = 0
    """In percent."""
    used_mib: int = 500
    total_mib: int = 81559
    watts: int = 120
    celsius: int = 40


class FakeGpus:
    """The GPUs of a machine, described by files in `folder`; `libraries`: from `build`."""

    def __init__(self, folder: Path, libraries: Path, count: int, gpu: Gpu | None = None) -> None:
        self.libraries, self.folder = libraries, folder / "fake-gpus"
        self.folder.mkdir()
        self.gpus = [gpu or Gpu()] * count
        self._write()

    def uuid(self, number: int, instance: int | None = None) -> str:
        """Return the name of a GPU, or of one of its MIG instances."""
        if instance is None:
            return f"GPU-00000000-0000-0000-0000-{number:012d}"
        return f"MIG-00000000-0000-0000-{instance:04d}-{number:012d}"

    def change(self, number: int, gpu: Gpu) -> None:
        """Change what a GPU is from now on, for running programs too."""
        self.gpus[number] = gpu
        self._write()

    def ask(self, name: str, rank: int | None = None, on: bool = True) -> None:
        """Ask the libraries for something until it is taken back.

        hold-copies: copies wait. slow-copies: each one to page-locked memory of more than a number
        takes 50 ms. hold-nccl: collectives wait. nccl-error: NCCL reports an error. no-events: NVML
        lets nobody register for events. ras-text: NCCL's RAS gives no JSON, as before 2.28.
        """
        path = self.folder / (name if rank is None else f"{name}.{rank}")
        path.touch() if on else path.unlink()

    def report_xid(self, number: int, xid: int, instance: int = -1) -> None:
        """Have the driver report an Xid of a GPU, or of one of its MIG instances."""
        self.report_xids((number, xid, instance))

    def report_xids(self, *xids: tuple[int, int, int]) -> None:
        """Report several as `report_xid` does: who begins to wait meanwhile gets all or none."""
        lines = (f"{number} {xid} {instance};\n" for number, xid, instance in xids)
        with (self.folder / "xids").open("a") as file:
            file.write("".join(lines))  # at once: a reader never sees half of it

    def repair(self) -> None:
        """Make all GPUs whole again, and take back what was asked."""
        self.gpus = [Gpu()] * len(self.gpus)
        self._write()
        asked = ("hold-copies", "slow-copies", "hold-nccl", "nccl-error", "no-events", "ras-")
        for name in asked:
            for path in self.folder.glob(f"{name}*"):
                path.unlink()

    def env(self) -> dict[str, str]:
        """Return the variables with which a program has these GPUs.

        CUDA_VISIBLE_DEVICES is one of them: without Ray raydist would count the folders in
        /proc/driver/nvidia, which only a driver can make.
        """
        names = [str(number) for number in range(len(self.gpus))]
        path = [str(self.libraries), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "FAKE_GPU": str(self.folder),
            "LD_PRELOAD": ":".join(map(str, sorted(self.libraries.glob("lib*.so.*")))),
            "PYTHONPATH": os.pathsep.join(path),
            "CUDA_VISIBLE_DEVICES": ",".join(names),
        }

    def _write(self) -> None:
        lines = [
            f"{self.uuid(number)} {each.state} {each.mig} {each.busy} {each.used_mib} "
            f"{each.total_mib} {each.watts} {each.celsius}\n"
            for number, each in enumerate(self.gpus)
        ]
        new = self.folder / "gpus.new"
        new.write_text("".join(lines))
        new.replace(self.folder / "gpus")  # a reader sees the old lines or the new ones


def build(into: Path) -> Path:
    """Compile the libraries into a folder; return it."""
    wanted = {name for path in (TORCH / "lib").glob("lib*.so") for name in symbols(path)}
    runtime = next(name.partition("@")[2] for name in wanted if name.startswith("cudaMalloc@"))
    needed = run("readelf", "-d", str(TORCH / "lib/libtorch_cuda.so"))
    (nccl,) = re.findall(r"\[(libnccl\.so[^]]*)\]", needed)
    names = {name.partition("@")[0] for name in wanted}
    names = {name for name in names if WANTED.fullmatch(name) and not name.startswith("cuFile")}
    ours = {name for name in names if name.startswith("nccl")}
    cuda = into / runtime
    library(cuda, [HERE / "cuda.c"], names - ours, 801)  # cudaErrorNotSupported
    library(into / nccl, [HERE / "nccl.c", HERE / "ras.c", cuda], ours, 5)  # ncclInvalidUsage
    library(into / "libnvidia-ml.so.1", [HERE / "nvml.c"])
    library(into / "libcuda.so.1", [cuda])  # the driver's calls are in cuda.c
    shutil.copy(HERE / "kernels.py", into / "fake_gpu_kernels.py")
    package = into / "fake_gpu_kernels-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-gpu-kernels\nVersion: 0\n")
    entry = "[torch.backends]\nfake_gpu = fake_gpu_kernels:register\n"
    (package / "entry_points.txt").write_text(entry)
    return into


def library(
    into: Path, sources: Sequence[Path], names: Collection[str] = (), code: int = 0
) -> None:
    """Compile a library. Calls of `names` that the sources lack return the error `code`."""
    packages = TORCH.parent
    headers = [
        *(packages / "nvidia").glob("*/include"),
        packages / "triton/backends/nvidia/include",
    ]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-pthread",
        "-Wl,--default-symver",
        "-Wl,--no-as-needed",
    ]
    command += [f"-Wl,-soname,{into.name}", "-o", str(into), *(f"-I{path}" for path in headers)]
    run(*command, *map(str, sources))
    missing = {*names} - {name.partition("@")[0] for name in symbols(into, "--defined-only")}
    if missing:
        more = into.parent / "missing.c"
        calls = [
            f'int {name}(void) {{ return fake_missing("{name}", {code}); }}\n'
            for name in sorted(missing)
        ]
        more.write_text("int fake_missing(const char *, int);\n" + "".join(calls))
        run(*command, *map(str, sources), str(more))


def symbols(path: Path, which: str = "--undefined-only") -> set[str]:
    """Return the names that a library lacks, or has."""
    return {line.split()[-1] for line in run("nm", "-D", which, str(path)).splitlines()}


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
