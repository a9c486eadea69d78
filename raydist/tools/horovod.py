"""`python -m raydist.tools.horovod build`: Horovod for the torch that is installed; `check`: does it work? (driver)"""

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

from raydist.errors import ConfigError, LaunchError, RaydistError
from raydist.tools import horovod_build
from raydist.tools.horovod_build import Recipe

COMMAND = "python -m raydist.tools.horovod build"
"""What a person types to get Horovod."""

FACTS = """
import json, os, torch
from importlib.util import find_spec
try:
    nccl = list(find_spec("nvidia.nccl").submodule_search_locations)[0]
except (ImportError, AttributeError):
    nccl = ""
found = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpu": torch.cuda.is_available(), "nccl": nccl}
print(json.dumps(found))
"""
"""Asked in a process of its own: the driver imports no torch."""

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
"""What each of two ranks runs; rank 0 says what was built in."""


@dataclass(frozen=True)
class Facts:
    """The torch that is installed here."""

    torch: str
    cuda: str
    """The CUDA version that it was built with; empty: none."""
    gpu: bool
    nccl: str
    """The folder of the NCCL that came with it."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if it did not work, 2 if it can't work here."""
    asked = parse(sys.argv[1:] if words is None else words)
    try:
        print(check() if asked.do == "check" else build(asked))
        return 0
    except RaydistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m raydist.tools.horovod", description=__doc__.split(" (")[0])
    todo = parser.add_subparsers(dest="do", required=True)
    todo.add_parser("check", help="run an all-reduce on two ranks of this machine")
    make = todo.add_parser("build", help="build and install it, unless that is done already; then check it")
    where = make.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="for CPUs, whatever is here")
    where.add_argument("--cuda", action="store_true", help="with NCCL, also where no GPU is to be seen")
    make.add_argument("--mpi", action="store_true", help="with MPI too (needs mpicxx)")
    make.add_argument("--jobs", type=int, default=jobs(), help="files compiled at a time (%(default)s)")
    make.add_argument("--again", action="store_true", help="build even if there is a wheel in the cache")
    return parser.parse_args(words)


def build(asked: argparse.Namespace) -> str:
    """Build, or take from the cache, and install, and check. What was done, for a person."""
    recipe = choose(look(), cpu=asked.cpu, cuda=asked.cuda, mpi=asked.mpi)
    if installed() == recipe.version and not asked.again:
        return f"Horovod {recipe.version} is installed already: {check()}"
    shelf = cache() / "horovod" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{recipe.stamp}"
    if asked.again or not (wheel := next(iter(shelf.glob("*.whl")), None)):
        wheel = make(recipe, shelf, asked.jobs)
    horovod_build.pip("install", "--no-deps", "--force-reinstall", str(wheel))
    return f"Horovod {recipe.version}: {check()}\nthe wheel is {wheel}"


def make(recipe: Recipe, shelf: Path, jobs: int) -> Path:
    """Build a wheel and put it on the shelf. A failed build stays where it is, to be looked at."""
    if lacking := missing(recipe):
        raise ConfigError("Horovod can't be built here: " + "; ".join(lacking))
    shelf.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="build-", dir=shelf))
    tell = Progress(f"Horovod {recipe.version}")
    tell(f"building in {folder}")
    built = horovod_build.build(recipe, folder, jobs, tell)
    tell.end()
    built.replace(wheel := shelf / built.name)  # another build may be at work: whoever is last wins, whole
    shutil.rmtree(folder)
    return wheel


def look() -> Facts:
    """Ask the torch of this environment."""
    asked = subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"Horovod is built against torch, and {sys.executable} can't import it: {' '.join(said)}")
    return Facts(**json.loads(asked.stdout.splitlines()[-1]))


def choose(facts: Facts, *, cpu: bool, cuda: bool, mpi: bool) -> Recipe:
    """What to build. Without a word: with NCCL where there are a GPU and all that it takes, else for CPUs."""
    plain = Recipe(torch=facts.torch, mpi=mpi)
    if cpu or not (cuda or facts.gpu):
        return plain
    home = toolkit()
    nccl = next((folder for folder in (facts.nccl, home, "/usr") if has_nccl(folder)), "")
    lacking = [] if facts.cuda else [f"a torch with CUDA (this is {facts.torch})"]
    lacking += [] if home else ["a CUDA toolkit with nvcc, cuda_runtime.h and libcudart (CUDA_HOME says where)"]
    lacking += [] if nccl else ["NCCL's nccl.h and libnccl.so"]
    if home and facts.cuda and (found := release(home)).split(".")[0] != facts.cuda.split(".")[0]:
        lacking.append(f"a CUDA toolkit {facts.cuda}, as torch has ({home} is {found})")
    if not lacking:
        return Recipe(torch=facts.torch, cuda=home, nccl=nccl, mpi=mpi)
    if cuda:
        raise ConfigError(f"--cuda needs {' and '.join(lacking)}; --cpu builds for CPUs")
    print(f"for CPUs only, although there is a GPU: {' and '.join(lacking)} would be needed", file=sys.stderr)
    return plain


def toolkit() -> str:
    """The folder of a whole CUDA toolkit; empty if there is none. An nvcc alone is not one."""
    on_path = shutil.which("nvcc")
    beside = str(Path(on_path).resolve().parent.parent) if on_path else ""
    for home in filter(None, (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", beside)):
        root = Path(home)
        parts = ("bin/nvcc", "include/cuda_runtime.h", "lib*/libcudart.so*")
        if all(any(root.glob(part)) for part in parts):
            return home
    return ""


def release(home: str) -> str:
    """The version of a CUDA toolkit, as its nvcc tells it."""
    told = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else "unknown"


def has_nccl(folder: str) -> bool:
    root = Path(folder or "/nowhere")
    return (root / "include" / "nccl.h").exists() and bool(horovod_build.nccl_libraries(root))


def missing(recipe: Recipe) -> list[str]:
    """What a build needs and this machine lacks, each with how to get it."""
    needs = {
        "a C++20 compiler (apt-get install g++)": shutil.which(os.environ.get("CXX", "c++")),
        f"Python's own headers (apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev)": Path(
            sysconfig.get_path("include"), "Python.h"
        ).exists(),
        f"pip in this environment ({sys.executable} -m ensurepip)": metadata_of("pip"),
    }
    if recipe.mpi:
        needs["mpicxx for --mpi (apt-get install libopenmpi-dev openmpi-bin)"] = shutil.which("mpicxx")
    return [f"it needs {what}" for what, there in needs.items() if not there]


def metadata_of(package: str) -> str:
    """The installed version of a package; empty if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def installed() -> str:
    """The version of Horovod that is installed; ours says in it what it was built against."""
    return metadata_of("horovod")


def cache() -> Path:
    """Where wheels are kept: RAYDIST_CACHE, or ~/.cache/raydist."""
    return Path(os.environ.get("RAYDIST_CACHE") or Path.home() / ".cache" / "raydist")


def jobs() -> int:
    """Compilers at a time: one needs up to 2 GiB for torch's headers."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory / 2)))


def check() -> str:
    """An all-reduce of two ranks here; what this Horovod can do, or a LaunchError with what it said."""
    from raydist.node.rendezvous_http import serving

    if not installed():
        raise ConfigError(f"Horovod is not installed: {COMMAND}")
    with serving("127.0.0.1") as door:
        host, _, rest = door.partition(":")
        same = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")},
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": door, "HOROVOD_GLOO_RENDEZVOUS_PORT": rest.partition("/")[0],
            "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_HOSTNAME": host, "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", CHECK],
                env={**same, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        return judge(ranks)


def judge(ranks: Sequence[subprocess.Popen[str]], patience: float = 120.0) -> str:
    """What rank 0 printed, once all have ended well."""
    until = time.monotonic() + patience
    try:
        said = [rank.communicate(timeout=max(1.0, until - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Horovod's check did not end within {patience:g} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, words) in zip(ranks, said, strict=True):
        if rank.returncode:
            end = "\n".join(words.strip().splitlines()[-12:])
            raise LaunchError(f"Horovod {installed()} does not work here; build it again: {COMMAND} --again\n{end}")
    return f"two ranks added up 1 + 2 = 3 ({said[0][0].strip()})"


class Progress:
    """One line that changes in a terminal; elsewhere a line every ten seconds."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.live = sys.stderr.isatty()
        self.told = -10.0

    def __call__(self, text: str) -> None:
        if self.live:
            print(f"\r\033[K{self.title}: {text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.told >= 10:
            self.told = time.monotonic()
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
