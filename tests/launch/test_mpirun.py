"""backend=mpi through the whole of raydist on this machine: real programs, how they end, what they
leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.flow import run_job
from raydist.launch import mpi
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import ProcessEnd
from raydist.messages.mpirun import MpirunEnded, NextDaemons, RunMpirun
from raydist.node.probe import Facts
from raydist.reporting.result import Result
from raydist.settings.compose import compose
from raydist.settings.config import Backend, Job
from raydist.shared.errors import ConfigError, LaunchError, RunFailed
from raydist.shared.events import Events
from tests.launch.test_worker_group import FakeHosts, silent, two_nodes
from tests.mpi_programs import (
    HOROVOD_MPI,
    HYDRA,
    MPICH,
    SUM,
    requires_daemons,
    requires_horovod_mpi,
    requires_mpich,
    requires_openmpi,
)
from tests.programs import Program

OPENMPI: tuple[str, ...] = ()
WORDS = ("backend=mpi", "group=inline", "scale=1x3", "watch.progress=none")
both = pytest.mark.parametrize(
    "mpi_words",
    [
        pytest.param(OPENMPI, id="openmpi", marks=requires_openmpi),
        pytest.param(HYDRA, id="mpich", marks=requires_mpich),
    ],
)
FAIL = """
import os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:
    if sys.argv[1] == "raise":
        raise ValueError("the third bolt is loose")
    if sys.argv[1] == "exit":
        sys.exit(7)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), 9)
    world.Abort(9)
world.Barrier()
"""
C = """
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    int rank, size, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("%d %d %d %s %s\\n", rank, size, sum, argv[1], getenv("RANK"));
    MPI_Finalize();
    return 0;
}
"""
SPAWN = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
if len(sys.argv) > 1:
    MPI.Comm.Get_parent().gather(os.getcwd(), root=0)
    time.sleep(600)
children = world.Spawn(sys.executable, [__file__, "child"], maxprocs=2)
folders = children.gather(None, root=MPI.ROOT if world.rank == 0 else MPI.PROC_NULL)
if world.rank == 0:
    print(len(folders), "children at work in", *set(folders), flush=True)
world.Barrier()
if world.rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "fail.py").write_text(FAIL)
    return tmp_path


def run(*words: str) -> Result[None]:
    return run_job(compose([*WORDS, *words], claim=True))


def segments() -> set[str]:
    return {
        path.name
        for path in Path("/dev/shm").glob("*")
        if path.name.startswith(("mpich_shm", "sm_segment"))
    }


def log(done: Result[None], rank: int) -> str:
    return (done.dir / "logs" / f"rank-{rank}.log").read_text()


@both
def test_collectives_and_torchruns_variables(mpi_words: tuple[str, ...]) -> None:
    done = run("script=sum.py", *mpi_words)
    assert [log(done, rank).split()[:3] for rank in range(3)] == [
        [str(rank), "3", "3"] for rank in range(3)
    ]
    assert [log(done, rank).split()[4] for rank in range(3)] == ["0", "1", "2"]
    mpirun_log = done.dir / "logs" / "mpirun.log"
    words = mpirun_log.read_text() if mpirun_log.exists() else ""
    assert "BAD TERMINATION" not in words
    assert "has exited due to" not in words


@both
@pytest.mark.parametrize(
    ("way", "how", "code", "number"),
    [
        ("raise", "raised", 1, 0),
        ("exit", "exited", 7, 0),
        ("kill", "killed", 0, 9),
        ("abort", "exited", 9, 0),
    ],
)
def test_the_failed_rank_is_the_cause(
    mpi_words: tuple[str, ...], way: str, how: str, code: int, number: int
) -> None:
    before = segments()
    with pytest.raises(RunFailed) as failed:
        run("script=fail.py", f"args=[{way}]", *mpi_words)
    cause = failed.value.result.cause
    assert (cause.rank, cause.how, cause.code, cause.signal) == (1, how, code, number), failed.value
    assert segments() <= before


@requires_openmpi
def test_mpirun_starts_inside_a_schedulers_job(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI took the job's nodes, among which there is no node0: "not included in the current
    allocation"."""
    (own_folder / "nodes").write_text("host1\nhost2\n")
    slurm = {
        "JOBID": "7", "JOB_ID": "7", "JOB_NUM_NODES": "2", "NODELIST": "host[1-2]", "JOB_NODELIST": "host[1-2]",
        "TASKS_PER_NODE": "1(x2)", "JOB_CPUS_PER_NODE": "8(x2)", "NODEID": "0", "PROCID": "0",
    }  # fmt: skip
    pbs = {"JOBID": "7.host0", "ENVIRONMENT": "PBS_BATCH", "NODEFILE": str(own_folder / "nodes")}
    for scheduler, variables in (("SLURM", slurm), ("PBS", pbs)):
        for name, value in variables.items():
            monkeypatch.setenv(f"{scheduler}_{name}", value)
    (own_folder / "job.py").write_text(
        "from mpi4py import MPI\nimport os\n"
        "print(MPI.COMM_WORLD.size, os.environ['SLURM_JOB_ID'], os.environ['PBS_JOBID'])\n"
    )
    done = run("script=job.py")
    assert [log(done, rank).split() for rank in range(3)] == [["3", "7", "7.host0"]] * 3


@both
def test_a_c_program(own_folder: Path, mpi_words: tuple[str, ...]) -> None:
    folder = Path(sys.executable).parent if mpi_words is OPENMPI else MPICH / "bin"
    compiler = folder / "mpicc"
    if not compiler.exists() or shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    (own_folder / "sum.c").write_text(C)
    library = folder.parent / "lib"
    # the wheels' wrappers name the folder that they were built in
    subprocess.run(
        [
            "gcc",
            "sum.c",
            "-o",
            "sum",
            f"-I{folder.parent}/include",
            f"-L{library}",
            f"-Wl,-rpath,{library}",
            "-lmpi",
        ],
        check=True,
    )
    done = run("script=./sum", "args=[hello]", *mpi_words)
    assert [log(done, rank).strip() for rank in range(3)] == [
        f"{rank} 3 3 hello {rank}" for rank in range(3)
    ]


@requires_openmpi
def test_processes_that_ranks_spawn_run_beside_them_and_end_with_them(own_folder: Path) -> None:
    (own_folder / "spawn.py").write_text(SPAWN)
    program = Program(own_folder, *WORDS, "script=spawn.py")
    assert program.wait() == 1, program.screen
    result = program.result()
    assert (result["cause"]["rank"], result["cause"]["signal"]) == (1, signal.SIGKILL), (
        program.screen
    )
    assert (program.run_dir / "logs" / "rank-0.log").read_text().splitlines() == [
        f"2 children at work in {own_folder}"
    ]
    assert program.leftovers() == []


@requires_openmpi
def test_torch_joins_a_process_group_beside_mpi(own_folder: Path) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are there too, and a store behind them."""
    (own_folder / "both.py").write_text(
        "from mpi4py import MPI\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1) * MPI.COMM_WORLD.rank\n"
        "dist.all_reduce(one)\n"
        "print(dist.get_rank() == MPI.COMM_WORLD.rank, float(one))\n"
        "dist.destroy_process_group()\n"
    )
    done = run("script=both.py")
    assert [log(done, rank).splitlines()[-1] for rank in range(3)] == ["True 3.0"] * 3


@requires_openmpi
@requires_horovod_mpi
def test_horovod_built_with_mpi(own_folder: Path) -> None:
    (own_folder / "both.py").write_text(
        "import horovod.torch as hvd\nimport torch\nhvd.init()\n"
        "print(hvd.mpi_enabled(), hvd.gloo_enabled(), float(hvd.allreduce(torch.ones(1) * "
        "hvd.rank(), op=hvd.Sum)))\n"
    )
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ["PATH"]]
    )  # where mpirun is
    command = [HOROVOD_MPI, "-m", "raydist.train", *WORDS, "script=both.py"]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, timeout=120)
    for rank in range(3):
        (text,) = own_folder.glob(f"runs/*/*/logs/rank-{rank}.log")
        assert text.read_text().split() == ["True", "False", "3.0"]


@requires_openmpi
def test_further_arguments_go_to_mpirun() -> None:
    """A rank stands where mpirun's child stood: on the cores that mpirun bound it to."""
    Path("cores.py").write_text(
        "from mpi4py import MPI\nimport os\nprint(sorted(os.sched_getaffinity(0)))\n"
    )
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    done = run("script=cores.py", "scale.per_node=2", "backend.mpi.args=[--bind-to,core]")
    cores = [json.loads(log(done, rank)) for rank in range(2)]
    assert cores[0] != cores[1]
    with pytest.raises(LaunchError, match="mpirun ended with code"):
        run("script=sum.py", "backend.mpi.args=[--no-such-word]")


@requires_openmpi
def test_a_program_without_mpi_runs() -> None:
    done = run("script=hostname")
    assert len({log(done, rank) for rank in range(3)}) == 1


@requires_openmpi
def test_a_missing_program_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no file .*/summ.py; did you mean script=sum.py\?"
    ):
        run("script=summ.py")
    with pytest.raises(RunFailed, match="there is no program no_such_command on "):
        run("script=no_such_command")


def test_a_missing_or_unknown_mpirun_is_refused(own_folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"backend.mpi.mpirun=/no/mpirun: no such program on .*openmpi"
    ):
        run("script=sum.py", "backend.mpi.mpirun=/no/mpirun")
    with pytest.raises(ConfigError, match="neither Open MPI nor MPICH nor Intel MPI"):
        run("script=sum.py", "backend.mpi.mpirun=/bin/true")
    assert not list(own_folder.glob("runs/*/*/logs/rank-*"))


def test_hosts_with_different_mpis_are_refused(tmp_path: Path) -> None:
    from raydist.cluster.nodes import Node, ResourceRequest
    from raydist.cluster.placement import assign_ranks

    there = [
        Node(id=name, ip="10.0.0.1", host=name, total={}, free={}) for name in ("host0", "host1")
    ]
    plan = assign_ranks(ResourceRequest("mpi", 2, ({},) * 2, 1, "PACK", {}, {}), there)
    mpis = [
        {"kind": "openmpi", "version": version, "mpirun": "/usr/bin/mpirun"}
        for version in ("5.0.11", "4.1.6")
    ]
    group = WorkerGroup(plan, FakeHosts(), Events(tmp_path / "events.jsonl"))
    group.facts = tuple(Facts("a", "10.0.0.1", "eth0", "10.0.0.1", mpi=own) for own in mpis)
    with pytest.raises(
        ConfigError,
        match=r"host1 has openmpi 4.1.6 \(/usr/bin/mpirun\), and host0 has openmpi 5.0.11",
    ):
        mpi.check_same_mpi(group)


def test_a_full_disk_does_not_end_a_run_that_mpirun_has_finished(tmp_path: Path) -> None:
    """It had no values, and exit code 1."""
    (tmp_path / "logs").touch()  # so that nothing can be written below it
    hosts = FakeHosts()
    hosts.replies[RunMpirun] = lambda rank, request: ProcessEnd(0, 0, 1.0, output="done")
    hosts.replies[NextDaemons] = silent
    with Events(tmp_path / "events.jsonl") as events:
        group = WorkerGroup(two_nodes(), hosts, events)
        own = {"kind": "openmpi", "version": "5.0.11", "mpirun": "/usr/bin/mpirun"}
        group.facts = (Facts("a", "10.0.0.1", "eth0", "10.0.0.1", mpi=own),) * 4
        with mpi.launching(Job(backend=Backend(name="mpi"), dir=str(tmp_path)), group):
            pass
    assert [request.why for _, request in hosts.sent(MpirunEnded)] == [
        "mpirun ended with code 0: done"
    ] * 4


@requires_openmpi
@requires_daemons
@pytest.mark.ray
def test_a_run_on_ray_leaves_nothing(ray_address: str, own_folder: Path) -> None:
    words = ("backend=mpi", "scale=1x3", "watch.progress=none")
    good = Program(own_folder, *words, "script=sum.py", address=ray_address)
    assert good.wait() == 0, good.screen
    assert good.leftovers() == []
    bad = Program(own_folder, *words, "script=fail.py", "args=[kill]", address=ray_address)
    assert bad.wait() == 1, bad.screen
    assert bad.result()["cause"]["signal"] == signal.SIGKILL
    assert bad.leftovers() == []


@requires_openmpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_stopped_or_killed_leaves_nothing(
    own_folder: Path, number: signal.Signals
) -> None:
    before = segments()
    program = Program(own_folder, *WORDS, "script=sum.py", "args=[0,wait]")
    logs = [f"runs/sum/*/logs/rank-{rank}.log" for rank in range(3)]
    program.wait_until(
        lambda: all(any(path.read_text() for path in own_folder.glob(each)) for each in logs),
        "output of all ranks",
    )
    program.signal(number)
    assert program.wait() == (130 if number == signal.SIGINT else -9)
    assert program.leftovers() == []
    assert segments() <= before


@requires_openmpi
def test_ranks_end_with_an_mpirun_that_dies() -> None:
    Path("orphan.py").write_text(
        "import os, signal, time, psutil\n"
        "from mpi4py import MPI\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if MPI.COMM_WORLD.rank == 0:\n"
        "    mark = os.environ['PMIX_NAMESPACE'].partition('@')[0].rpartition('-')[2]\n"
        "    os.kill(int(mark), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(RunFailed, match="ended by mpirun; mpirun was killed by signal 9"):
        run("script=orphan.py")
