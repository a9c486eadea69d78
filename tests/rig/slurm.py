"""A Slurm on hosts of a rig: Debian's munged, slurmctld and slurmd. (driver)

    with hosts(4, nics=("eth0",)) as rig:
        slurm = Slurm(rig)
        slurm.up()
        number = slurm.submit("sbatch --nodes=3 deploy/slurm/train.sbatch job=mine.py")

The first host is the login node: slurmctld runs there, and lines are typed there. The others are
nodes. The home and the project in it are shared; each host has a separate /tmp.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig.host import Host
from tests.rig.network import Rig
from tests.rig.ssh import separate_tmp, write
from tests.waiting import wait_until

_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
requires_slurm = pytest.mark.skipif(
    not all(shutil.which(name, path=_PATH) for name in _PROGRAMS),
    reason="needs Slurm: apt-get install slurmctld slurmd slurm-client munge",
)

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
"""The states of a job that Slurm does not start again by itself."""

# Without cgroups, since a container may have none that it can write. Slurm waits for a lost node
# five minutes, and two before it starts a requeued job again (cred_expire): here seconds.
_CONFIG = """
ClusterName=rig
SlurmctldHost={login}({address})
SlurmUser=root
AuthInfo=cred_expire=5
StateSaveLocation={state}
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmdTimeout=15
KillWait=15
MinJobAge=3600
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
{nodes}
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} OverSubscribe=YES
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """A Slurm whose nodes have one CPU each."""

    def __init__(self, rig: Rig, grace_s: int = 600) -> None:
        """`grace_s`: what a preempted job gets until it is killed, in seconds."""
        self.login, *self.nodes = rig.hosts
        self.home = self.login.folder.parent / "home"
        self.project = self.home / "project"
        self.project.mkdir(parents=True)
        (self.project / "deploy").symlink_to(ROOT / "deploy")
        python = Path(sys.executable).parent
        write(self.home / "setup.sh", f"export PATH={python}:$PATH\n")
        self._key = self.home / "munge.key"
        self._key.write_bytes(secrets.token_bytes(128))
        self._key.chmod(0o400)
        self._config = _CONFIG.format(
            login=self.login.name,
            address=self.login.address(),
            state=self.login.folder / "state",
            grace=grace_s,
            nodes="\n".join(
                f"NodeName={node.name} NodeAddr={node.address()} CPUs=1" for node in self.nodes
            ),
        )

    def up(self) -> None:
        """Start Slurm on all hosts."""
        for host in (self.login, *self.nodes):
            self.join(host)
        wait_until(lambda: self._node_states() == {"idle"}, self._logs, 240)

    def join(self, host: Host) -> None:
        """Start Slurm's daemon on a host that has just been booted."""
        separate_tmp(host, self.home)
        write(host.root / "etc/slurm/slurm.conf", self._config)
        # slurmd wants a version of cgroups, even if it uses none
        write(host.root / "etc/slurm/cgroup.conf", "CgroupPlugin=cgroup/v1\n")
        folders = ["/run/munge", "/run/slurmd", str(host.folder / "state")]
        host.run(["mkdir", "-p", *folders])
        socket = "/run/munge/munge.socket.2"
        files = [f"--{name}-file=/run/munge/{name}" for name in ("pid", "log", "seed")]
        self._start(host, "munged", "-F", f"--key-file={self._key}", f"--socket={socket}", *files)
        wait_until(lambda: (host.root / socket.lstrip("/")).exists(), self._logs)
        self._start(host, "slurmctld" if host is self.login else "slurmd", "-D")

    def _start(self, host: Host, *command: str) -> None:
        with (host.folder / "slurm.log").open("a") as log:
            host.popen(["env", "-i", f"PATH={_PATH}", *command], stdout=log, stderr=log)

    def _logs(self) -> str:
        files = [host.folder / "slurm.log" for host in (self.login, *self.nodes)]
        return "\n".join(f"{file}:\n{file.read_text()[-1000:]}" for file in files)

    def _node_states(self) -> set[str]:
        return set(self.type("sinfo --noheader --format=%T 2>&1").split())

    def type(self, line: str) -> str:
        """Type a line in the project on the login node; return its output and errors."""
        setup = f"RAYDIST_SETUP={self.home}/setup.sh"
        bare = ["env", "-i", f"HOME={self.home}", f"PATH={_PATH}", setup]
        done = self.login.run(
            [*bare, "bash", "-c", line],
            cwd=self.project,
            check=False,
            stderr=subprocess.STDOUT,
            timeout=400,
        )
        return done.stdout

    def submit(self, line: str) -> str:
        """Type an sbatch line; return the number of the job."""
        answer = self.type(line)
        assert answer.startswith("Submitted batch job "), answer
        return answer.split()[-1]

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.type(f"scontrol --oneliner show job {job}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, timeout: float = 300) -> None:
        """Wait until a job is in one of these states; fail if it ends in another."""

        def reached() -> bool:
            time.sleep(1)  # a question costs CPU time, and the job needs it
            state = self.show(job)["JobState"]
            assert state in states or state not in ENDED, f"{state}:\n{self.output(job)}"
            return state in states

        wait_until(reached, lambda: f"{states}: {self.show(job)}\n{self.output(job)}", timeout)

    def output(self, job: str) -> str:
        """Return what a job has written, and its Ray."""
        files = sorted(self.project.glob(f"slurm-{job}*.out"))
        return "\n".join(file.read_text() for file in files)

    def left(self) -> dict[str, list[str]]:
        """Return the processes and files on the nodes, but for Slurm's and torch's cache."""
        found = {}
        own = self.home.relative_to("/tmp").parts[0]  # the folder of the session of tests
        for node in self.nodes:
            lines = [line for line in node.processes().values() if line]
            folders = (node.root / "tmp", node.root / "dev/shm")
            files = [file.name for folder in folders for file in folder.iterdir()]
            found[node.name] = [
                *(line for line in lines if line.split()[0] not in ("munged", "slurmd")),
                *(name for name in files if name not in (own, "torchinductor_root")),
            ]
        return {name: each for name, each in found.items() if each}
