"""The program that mpirun starts in place of ssh and of the user's program. (rank side)

    python -IS mpi_child.py agent HOST WORD…    requests this daemon on HOST, and ends as it
    python -IS mpi_child.py rank                passes its MPI variables to the rank

Both send one message to the agent of their node, and wait for its reply. The rank itself is forked
from the node's fork server: MPI's process manager identifies its clients by their environment, not
by their pid.
"""

import json
import os
import re
import signal
import socket
import sys

MPI_VARIABLES = re.compile(
    r"(OMPI|OPAL|PMIX|PMI|PRTE|HYDI?|HYDRA|MPI|MPIR|MPICH|I_MPI)_\w+|LD_LIBRARY_PATH"
)
"""The variables that MPI's process manager sets for a rank; the rest of the environment belongs to
another machine."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
PACKET = 1 << 17


def agent(argv: list[str]) -> tuple[int, dict[str, object], list[int]]:
    """Return the message to rank 0's agent, which runs mpirun.

    Hydra puts options of ssh (-x) before the host.
    """
    while argv and argv[0].startswith("-"):
        argv.pop(0)
    return 0, {"host": argv[0], "argv": argv[1:]}, []


def mpi_rank() -> tuple[int, dict[str, object], list[int]]:
    """Return the message to this rank's agent, with the descriptor of MPICH's process manager."""
    rank = next(int(os.environ[name]) for name in RANKS if name in os.environ)
    env = {name: value for name, value in os.environ.items() if MPI_VARIABLES.fullmatch(name)}
    pmi_fd = env.pop("PMI_FD", None)
    return (
        rank,
        {"env": env, "cpus": sorted(os.sched_getaffinity(0))},
        [int(pmi_fd)] if pmi_fd else [],
    )


def main(kind: str, *argv: str) -> int:
    """Send the message, wait for the reply, and end as it specifies."""
    rank, message, descriptors = agent(list(argv)) if kind == "agent" else mpi_rank()
    message["secret"] = os.environ["RAYDIST_MPI_SECRET"]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(os.path.join(os.environ["RAYDIST_MPI_FOLDER"], f"mpi-{rank}"))
    socket.send_fds(sock, [json.dumps(message).encode()], descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    end = json.loads(sock.recv(PACKET) or "{}")
    sys.stderr.write(end.get("output", ""))
    sys.stderr.flush()
    if end.get("signal"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), end["signal"])
    return int(end.get("code", 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
