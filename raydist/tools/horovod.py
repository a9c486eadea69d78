"""`raydist horovod`: `build` builds Horovod for the installed torch, `check` tests it. (driver)"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from raydist.shared import cgroup, env_names
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.home import user_cache
from raydist.tools import horovod_build
from raydist.tools.command_line import run_tool
from raydist.tools.horovod_build import Recipe
from raydist.train import Parser

COMMAND = "raydist horovod build"
"""The command that installs Horovod."""

FACTS = """
import json, os, torch
from importlib.util import find_spec
try:
    nccl = list(find_spec("nvidia.nccl").submodule_search_locations)[0]
except (ImportError, AttributeError):
    nccl = ""
cuda, gpu = torch.version.cuda or "", torch.cuda.is_available()
print(json.dumps({"torch": torch.__version__, "cuda": cuda, "gpu": gpu, "nccl": nccl}))
"""
"""The program that reads these facts in its own process, because the driver does not import
torch."""

CHECK = """
import sys, torch
import horovod.torch as hvd
hvd.init()
assert hvd.gloo_built(), "this Horovod was built without gloo"
total = hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item()
assert total == 3.0, f"1 + 2 = {total}"
if hvd.rank() == 0:
    print("gloo" + (", NCCL" if hvd.nccl_built() else "") + (", MPI" if hvd.mpi_built() else ""))
hvd.shutdown()
"""
"""The program of each of two ranks; rank 0 prints what Horovod was built with."""


@dataclass(frozen=True)
class Installed:
    """The installed torch."""

    torch: str
    cuda: str
    """The CUDA version that torch was built with; empty: none."""
    gpu: bool
    nccl: str
    """The folder of torch's NCCL."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build or check Horovod. The exit code: 0, 1 if that failed, 2 if it is impossible here."""

    def horovod() -> int:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        print(check_command() if arguments.do == "check" else build_command(arguments))
        return 0

    return run_tool(horovod)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the subcommand and its flags."""
    parser = Parser(prog="raydist horovod", description=__doc__.split(" (")[0])
    commands = parser.add_subparsers(dest="do", required=True)
    commands.add_parser("check", help="run an all-reduce on two ranks of this machine")
    build = commands.add_parser(
        "build", help="build and install Horovod unless it is installed, then check it"
    )
    device = build.add_mutually_exclusive_group()
    device.add_argument(
        "--cpu", action="store_true", help="for CPUs, even if this machine has GPUs"
    )
    device.add_argument(
        "--cuda", action="store_true", help="with NCCL, even if this machine has no GPU"
    )
    build.add_argument("--mpi", action="store_true", help="with MPI too (needs mpicxx)")
    build.add_argument(
        "--jobs", type=int, default=jobs(), help="files compiled at a time (%(default)s)"
    )
    build.add_argument("--again", action="store_true", help="build even if the cache has a wheel")
    return parser.parse_args(argv)


def build_command(arguments: argparse.Namespace) -> str:
    """Build a wheel or take it from the cache, install and check it; return the result as text."""
    recipe = choose_recipe(
        installed_versions(), cpu=arguments.cpu, cuda=arguments.cuda, mpi=arguments.mpi
    )
    if installed() == recipe.version and not arguments.again:
        return f"Horovod {recipe.version} is installed already: {check_command()}"
    shelf = (
        cache()
        / "horovod"
        / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{recipe.stamp}"
    )
    if arguments.again or not (wheel := next(iter(shelf.glob("*.whl")), None)):
        wheel = make(recipe, shelf, arguments.jobs)
    horovod_build.pip("install", "--no-deps", "--force-reinstall", str(wheel))
    return f"Horovod {recipe.version}: {check_command()}\nthe wheel is {wheel}"


def make(recipe: Recipe, shelf: Path, jobs: int) -> Path:
    """Build a wheel and move it to `shelf`. A failed build leaves its folder for inspection."""
    if missing := missing_programs(recipe):
        raise ConfigError("Horovod can't be built here: " + "; ".join(missing))
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="build-", dir=shelf))
    except OSError as error:
        raise ConfigError(
            f"{shelf} can't be written ({error.strerror}); set RAYDIST_CACHE to a folder that "
            "you can write"
        ) from error
    show = BuildProgress(f"Horovod {recipe.version}")
    show(f"building in {folder}")
    built = horovod_build.build_wheel(recipe, folder, jobs, show)
    show.end()
    # This is atomic: of two builds at once, the wheel of the last one stays.
    built.replace(wheel := shelf / built.name)
    shutil.rmtree(folder)
    return wheel


def installed_versions() -> Installed:
    """Return facts about the torch of this environment."""
    done = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        error = " ".join(done.stderr.strip().splitlines()[-1:])
        raise ConfigError(
            f"{sys.executable} can't import torch, which Horovod is built against: {error}"
        )
    return Installed(**json.loads(done.stdout.splitlines()[-1]))


def choose_recipe(facts: Installed, *, cpu: bool, cuda: bool, mpi: bool) -> Recipe:
    """Return the build to make.

    By default it has NCCL if this machine has a GPU and all build tools for it, else it is for
    CPUs.
    """
    plain = Recipe(torch=facts.torch, mpi=mpi)
    if cpu or not (cuda or facts.gpu):
        return plain
    home = toolkit()
    nccl = next((folder for folder in (facts.nccl, home, "/usr") if has_nccl(folder)), "")
    lacking = [] if facts.cuda else [f"a torch with CUDA (this is {facts.torch})"]
    lacking += (
        []
        if home
        else ["a CUDA toolkit with nvcc, cuda_runtime.h and libcudart (CUDA_HOME says where)"]
    )
    lacking += [] if nccl else ["NCCL's nccl.h and libnccl.so"]
    if home and facts.cuda and (found := release(home)).split(".")[0] != facts.cuda.split(".")[0]:
        lacking.append(f"a CUDA toolkit {facts.cuda}, as torch has ({home} is {found})")
    if not lacking:
        return Recipe(torch=facts.torch, cuda=home, nccl=nccl, mpi=mpi)
    if cuda:
        raise ConfigError(
            f"--cuda needs {' and '.join(lacking)}; --cpu builds for CPUs", "--cuda", None, "--cpu"
        )
    print(
        f"builds for CPUs only, although this machine has a GPU: NCCL needs "
        f"{' and '.join(lacking)}",
        file=sys.stderr,
    )
    return plain


def toolkit() -> str:
    """Return the folder of a complete CUDA toolkit (more than nvcc); empty without one."""
    on_path = shutil.which("nvcc")
    toolkit = str(Path(on_path).resolve().parent.parent) if on_path else ""
    for home in filter(None, (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", toolkit)):
        root = Path(home)
        parts = ("bin/nvcc", "include/cuda_runtime.h", "lib*/libcudart.so*")
        if all(any(root.glob(part)) for part in parts):
            return home
    return ""


def release(home: str) -> str:
    """Return the version of a CUDA toolkit, from its nvcc."""
    text = subprocess.run(
        [f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=False
    ).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else "unknown"


def has_nccl(folder: str) -> bool:
    root = Path(folder or "/nowhere")
    return (root / "include" / "nccl.h").exists() and bool(horovod_build.nccl_libraries(root))


def missing_programs(recipe: Recipe) -> list[str]:
    """Return tools that the build needs and this machine lacks, each with its install command."""
    needs = {
        "a C++20 compiler (apt-get install g++)": shutil.which(os.environ.get("CXX", "c++")),
        f"Python's own headers (apt-get install "
        f"python{sys.version_info[0]}.{sys.version_info[1]}-dev)": Path(
            sysconfig.get_path("include"), "Python.h"
        ).exists(),
        f"pip in this environment ({sys.executable} -m ensurepip)": metadata_of("pip"),
    }
    if recipe.mpi:
        needs["mpicxx for --mpi (apt-get install libopenmpi-dev openmpi-bin)"] = shutil.which(
            "mpicxx"
        )
    return [f"it needs {tool}" for tool, found in needs.items() if not found]


def metadata_of(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def installed() -> str:
    """Return the installed version of Horovod.

    A build of raydist names in it the torch that it was built against.
    """
    return metadata_of("horovod")


def cache() -> Path:
    """Return the folder for wheels: RAYDIST_CACHE, or raydist in the user's cache.

    ConfigError: neither is known.
    """
    if named := os.environ.get(env_names.CACHE):
        return Path(named)
    if (of_user := user_cache()) is None:
        cause = "this user has no home folder to keep wheels in"
        raise ConfigError.of(env_names.CACHE, "", cause, f"{env_names.CACHE}=/FULL/PATH")
    return of_user / "raydist"


def jobs() -> int:
    """Return the number of parallel compilers: each needs up to 2 GiB for torch's headers.

    A container may have a part of the machine's memory and CPUs.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min(physical, cgroup.memory_left()) / 2**30
    has_own = hasattr(os, "sched_getaffinity")
    cpus = len(os.sched_getaffinity(0)) if has_own else os.cpu_count() or 1
    return max(1, min(cpus, int(memory / 2)))


def check_command() -> str:
    """Run an all-reduce on two ranks of this machine; return Horovod's features as text.

    LaunchError: it failed.
    """
    from raydist.node.rendezvous_http import serving

    if not installed():
        raise ConfigError(f"Horovod is not installed: {COMMAND}")
    with serving("127.0.0.1") as door:
        host, _, rest = door.partition(":")
        same = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")
            },
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": door,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": rest.partition("/")[0],
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_SIZE": "2",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", CHECK],
                env={**same, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        return judge(ranks)


def judge(ranks: Sequence[subprocess.Popen[str]], patience: float = 120.0) -> str:
    """Return the output of rank 0 once all ranks have ended without an error.

    `patience`: seconds.
    """
    until = time.monotonic() + patience
    try:
        outputs = [rank.communicate(timeout=max(1.0, until - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Horovod's check did not end within {patience:g} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            end = "\n".join(errors.strip().splitlines()[-12:])
            raise LaunchError(
                f"Horovod {installed()} does not work here; build it again: {COMMAND} "
                f"--again\n{end}"
            )
    return f"two ranks added up 1 + 2 = 3 ({outputs[0][0].strip()})"


class BuildProgress:
    """The progress of a build: a line that changes on a terminal, else a line every 10 s."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.shown_at = -10.0

    def __call__(self, text: str) -> None:
        if self.live:
            print(f"\r\033[K{self.title}: {text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.shown_at >= 10:
            self.shown_at = time.monotonic()
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
