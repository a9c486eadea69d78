"""Patch and build Horovod's source distribution for the installed torch. (driver)

0.28.1 is Horovod's last release (June 2023). It requires C++14 and a Python with distutils, and it
takes any nvcc for a CUDA toolkit. PATCHES corrects that.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raydist.shared.errors import LaunchError

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""The SHA-256 of horovod-0.28.1.tar.gz on PyPI."""
REVISION = 4
"""The version of PATCHES: another version makes another wheel."""
TOOLS = ("cmake==3.31.6", "ninja==1.13.0", "setuptools==80.9.0", "wheel==0.45.1", "packaging==25.0")
"""The build tools, installed into a separate folder.

CMake 4 refuses the old CMake files of gloo.
"""

PATCHES = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    (
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
    ),
    # GCC 13 headers no longer include <cstdint>.
    ("third_party/gloo/CMakeLists.txt", "-std=c++11 -fPIC", "-include cstdint -fPIC"),
    # Use CUDA only if it was requested, not because an nvcc is on the PATH.
    (
        "CMakeLists.txt",
        "check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)",
        "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS})\n    check_language(CUDA)\nendif()\n"
        "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS} AND NOT CMAKE_CUDA_COMPILER)",
    ),
    (
        "cmake/Modules/FindPytorch.cmake",
        "and (CUDA_HOME is not None)) else False)",
        "and (__import__('os').environ.get('HOROVOD_GPU_OPERATIONS'))) else False)",
    ),
    # Python 3.12 has no distutils.
    (
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
    ),
    (
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
    ),
    # init() after shutdown() crashed if both the fusion threshold and the cycle time were set.
    (
        "horovod/common/parameter_manager.cc",
        "  } else {\n    Eigen::VectorXd v = TunableParameter::BestValue();",
        "  } else if (fixed_values_.count(variable) == 0) {\n    Eigen::VectorXd v = "
        "TunableParameter::BestValue();",
    ),
    # reserve() adds no elements: the stall check examined an empty list of ranks.
    (
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
    ),
    # Every collective uses a process set, and process sets ignored HOROVOD_GLOO_IFACE: they used
    # the host name's address, which is 127.0.1.1 on Debian.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        "  device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
    ),
    # The path of the cache may contain a space. (The wheel is the same.)
    (
        "CMakeLists.txt",
        "-Wl,--version-script=${CMAKE_SOURCE_DIR}/horovod.lds",
        "-Wl,--version-script='${CMAKE_SOURCE_DIR}/horovod.lds'",
    ),
    # setup.py downloads nothing; Horovod does not use cffi since 0.20.
    ("setup.py", "setup_requires=require_list if is_build_action() else []", "setup_requires=[]"),
    ("setup.py", "require_list.append('cffi>=1.4.0')", "pass"),
)
"""(file, text, replacement).

If a text is missing, the source is not the one that these patches expect.
"""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """The options of a build."""

    torch: str
    """The version of torch, such as 2.15.0+cu132."""
    cuda: str = ""
    """The folder of the CUDA toolkit; empty for a build for CPUs."""
    nccl: str = ""
    """The folder with include/ and lib/ of NCCL."""
    mpi: bool = False

    @property
    def stamp(self) -> str:
        """The local part of the built version. It names the torch and the options of the build."""
        words = [
            f"raydist{REVISION}",
            "torch" + self.torch.replace("+", "."),
            "nccl" if self.cuda else "cpu",
        ]
        return ".".join([*words, "mpi"] if self.mpi else words)

    @property
    def version(self) -> str:
        return f"{VERSION}+{self.stamp}"

    def environment(self) -> dict[str, str]:
        """Return the variables that Horovod's setup.py and CMake read."""
        chosen = {
            "HOROVOD_LOCAL_VERSION": self.stamp,
            "HOROVOD_WITH_PYTORCH": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITHOUT_NVTX": "1",
            "HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI": "1",
        }
        if self.cuda:
            chosen |= {
                "HOROVOD_GPU_OPERATIONS": "NCCL",
                "HOROVOD_CUDA_HOME": self.cuda,
                "CUDA_HOME": self.cuda,
                "HOROVOD_NCCL_INCLUDE": f"{self.nccl}/include",
                "HOROVOD_NCCL_LINK": "shared",
            }
        return chosen


def build_wheel(recipe: Recipe, folder: Path, jobs: int, tell: Tell) -> Path:
    """Build the wheel in an empty `folder`.

    LaunchError: it failed; the text has the errors of the compiler.
    """
    tools = folder / "tools"
    tell("fetching cmake, ninja and the source")
    pip("install", "--target", str(tools), *TOOLS)
    source = unpack_source(fetch(folder, tools), folder)
    patch(source)
    unwanted = ("HOROVOD_", "CMAKE_", "MAKEFLAGS", "CUDA_HOME", "CUDACXX")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(unwanted)},
        **recipe.environment(),
        **(
            {"HOROVOD_NCCL_LIB": str(link_nccl(Path(recipe.nccl), folder / "nccl"))}
            if recipe.cuda
            else {}
        ),
        "PYTHONPATH": str(tools),
        "PATH": os.pathsep.join(
            [str(tools / "bin"), os.path.dirname(sys.executable), os.environ.get("PATH", "")]
        ),
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        # Whatever its value, its presence keeps setup.py from passing -j8 to ninja.
        "MAKEFLAGS": "-j",
    }
    compile_wheel(source, env, folder / "build.log", tell)
    return next((source / "dist").glob("*.whl"))


def nccl_libraries(root: Path) -> list[Path]:
    """Return the shared libraries of NCCL below `root`, libnccl.so first if it exists."""
    return sorted(
        found for pattern in ("lib*", "lib*/*") for found in root.glob(f"{pattern}/libnccl.so*")
    )


def link_nccl(root: Path, folder: Path) -> Path:
    """Create and return a folder with libnccl.so.

    The NCCL that torch installs has only libnccl.so.2, which a linker does not find.
    """
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(nccl_libraries(root)[0])
    return folder


def pip(*arguments: str, path: Path | None = None) -> None:
    """Run pip of this Python; print its output only if it fails.

    `path`: a folder of packages for its PYTHONPATH.
    """
    quiet = {
        "PIP_QUIET": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env={**os.environ, **quiet, **({"PYTHONPATH": str(path)} if path else {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LaunchError(f"pip {' '.join(arguments)} failed:\n{done.stdout.strip()[-1500:]}")


def fetch(folder: Path, tools: Path) -> Path:
    """Download Horovod's source distribution from the package index that pip uses."""
    only_source = ("--no-deps", "--no-binary=:all:", "--no-build-isolation")
    pip("download", *only_source, f"horovod=={VERSION}", "--dest", str(folder), path=tools)
    return folder / f"horovod-{VERSION}.tar.gz"


def unpack_source(archive: Path, folder: Path) -> Path:
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise LaunchError(
            f"{archive} is not Horovod {VERSION}: its sha256 is {found}, not {SHA256}"
        )
    with tarfile.open(archive) as tar:
        # Python 3.10 and 3.11 have filters from 3.10.12 and 3.11.4 on; Debian 12 has 3.11.2.
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        tar.extractall(folder)
    return folder / f"horovod-{VERSION}"


def patch(source: Path) -> None:
    """Apply PATCHES to the unpacked source."""
    for name, old, new in PATCHES:
        text = (source / name).read_text(encoding="utf-8")
        if old not in text:
            raise LaunchError(
                f"{source / name} does not contain {old!r}: this is not the source of "
                f"Horovod {VERSION}"
            )
        (source / name).write_text(text.replace(old, new), encoding="utf-8")


def compile_wheel(source: Path, env: Mapping[str, str], log: Path, tell: Tell) -> None:
    """Run setup.py, write its output to `log`, and report ninja's [n/m] as progress."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=source,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with process, log.open("w", encoding="utf-8") as kept:
        for line in process.stdout:
            kept.write(line)
            if step := re.match(r"\[(\d+)/(\d+)\]", line):
                tell(f"compiling {step[1]} of {step[2]} files, {time.monotonic() - began:.0f} s")
    if process.returncode:
        raise LaunchError(f"Horovod did not compile; all of it is in {log}:\n{complaint(log)}")


def complaint(log: Path) -> str:
    """Return the first errors in the log of a build, or its last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    wrong = [
        line
        for line in lines
        if re.search(r"\b(fatal )?error\b|CMake Error|not found", line, re.IGNORECASE)
    ]
    return "\n".join(f"  {line}" for line in (wrong[:12] or lines[-20:]))
