"""What mpirun starts in place of ssh and of the program: both only speak to the seat of their node. (rank side)

    python -IS mpi_child.py agent HOST WORD…    asks for this daemon on HOST; ends as the daemon ends
    python -IS mpi_child.py rank                hands this place in MPI to the rank; ends as the rank ends

The rank itself is forked from the node's warm server. MPI's process manager knows its clients by what it gave to their
environment, not by their pid, so the rank can stand where mpirun's own child would.
"""

import json
import os
import re
import signal
import socket
import sys

OURS = re.compile(r"(OMPI|OPAL|PMIX|PMI|PRTE|HYDI?|HYDRA|MPI|MPIR|MPICH|I_MPI)_\w+|LD_LIBRARY_PATH")
"""What MPI's process manager sets for a rank; the rest of the environment is another machine's."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
PACKET = 1 << 17


def agent(words: list[str]) -> tuple[int, dict[str, object], list[int]]:
    """mpirun sits on the node of rank 0. Hydra puts ssh's own options (-x) before the host."""
    while words and words[0].startswith("-"):
        words.pop(0)
    return 0, {"host": words[0], "words": words[1:]}, []


def rank() -> tuple[int, dict[str, object], list[int]]:
    """MPICH's process manager is spoken to over a descriptor: it travels to the rank."""
    mine = next(int(os.environ[name]) for name in RANKS if name in os.environ)
    env = {name: value for name, value in os.environ.items() if OURS.fullmatch(name)}
    door = env.pop("PMI_FD", None)
    return mine, {"env": env, "cpus": sorted(os.sched_getaffinity(0))}, [int(door)] if door else []


def main(what: str, *words: str) -> int:
    """Say it to the seat, wait for the end."""
    to, told, descriptors = agent(list(words)) if what == "agent" else rank()
    told["secret"] = os.environ["RAYDIST_MPI_SECRET"]
    seat = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    seat.connect(os.path.join(os.environ["RAYDIST_MPI_FOLDER"], f"mpi-{to}"))
    socket.send_fds(seat, [json.dumps(told).encode()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    end = json.loads(seat.recv(PACKET) or "{}")
    sys.stderr.write(end.get("said", ""))
    sys.stderr.flush()
    if end.get("signal"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), end["signal"])
    return int(end.get("code", 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
