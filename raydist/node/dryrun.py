"""Tries a rank's variables before any rank starts: the addresses of gloo and NCCL. (rank side)

    python -m raydist.node.dryrun gloo nccl
    -> {"gloo": {"addresses": ["10.0.0.5"]}, "nccl": {"error": "..."}}

Each library runs in a separate process, because a library reads the environment only once.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from raydist.messages.checkup import LibraryTrial

LIMIT_S = 240.0
"""Time limit for one library: importing torch takes a minute from a cold network file system, and
longer on a busy machine, because Ray gives its workers the least share of the CPUs."""
BOOTSTRAP = re.compile(r"NCCL INFO Bootstrap ?: Using ([^:\s]+):(.+?)<\d+>")
"""NCCL's line for its bootstrap interface and address; since 2.24 without the blank before the
colon."""
WARNING = re.compile(r"NCCL WARN (.+)")
ENFORCE = re.compile(r"^\w*Error: (\[enforce fail at [^\]]*\] )?")
"""The position in gloo's source, which is cut off."""
UNIQUE_ID_BYTES = 128


def gloo() -> LibraryTrial:
    """Open gloo's device as a process group does, and return the address on which it listens."""
    from datetime import timedelta

    import psutil
    from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

    group = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    connections = psutil.Process().net_connections("tcp")
    addresses = sorted({each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN})
    del group
    return {"addresses": addresses}


def nccl() -> LibraryTrial:
    """Let NCCL choose its interface, and return the address.

    ncclGetUniqueId opens the bootstrap socket, with or without a GPU.
    """
    unique_id = (ctypes.c_char * UNIQUE_ID_BYTES)()
    status: int = ctypes.CDLL(nccl_library()).ncclGetUniqueId(ctypes.byref(unique_id))
    address = None if status else address_in(unique_id.raw)
    return {"status": status, "addresses": [address] if address else []}


def nccl_library() -> str:
    """Return the path of the NCCL that torch loads: NVIDIA's wheel, else the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return next(
        (str(path) for folder in folders for path in folder.glob("nccl/lib/libnccl.so.*")),
        "libnccl.so.2",
    )


def address_in(unique_id: bytes) -> str | None:
    """Return the address in an ncclUniqueId.

    It is 8 bytes of magic, then a sockaddr (NCCL 2.30 src/include/bootstrap.h).
    """
    family = int.from_bytes(unique_id[8:10], sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, unique_id[12:16])
    return (
        socket.inet_ntop(socket.AF_INET6, unique_id[16:32]) if family == socket.AF_INET6 else None
    )


def try_library(name: str) -> LibraryTrial:
    """Run one library in a separate process; return the addresses that it chose, or its error."""
    # NCCL's log goes to stderr: on stdout it would mix with the JSON in the middle of a line.
    log = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET",
        "NCCL_DEBUG_FILE": "/dev/stderr",
    }
    command = [sys.executable, "-m", "raydist.node.dryrun", "--in-here", name]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **log},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S:g} s"}
    return read_output(done.stdout, done.stderr, done.returncode)


def read_output(out: str, log: str, code: int) -> LibraryTrial:
    """Return the result of one library, from the JSON that it printed and NCCL's log."""
    # Only the last line: the gloo of torch 2.8 also prints that it is connected.
    trial: LibraryTrial = json.loads(out.splitlines()[-1]) if code == 0 else {}
    if code or trial.pop("status", 0):
        lines = WARNING.findall(log) or log.strip().splitlines() or [f"it ended with code {code}"]
        return {"error": ENFORCE.sub("", lines[-1]).strip()}
    if bootstrap := BOOTSTRAP.search(log):
        trial["interface"] = bootstrap[1]
        trial["addresses"] = [bootstrap[2].strip("[]").partition("%")[0]]
    return trial


def main(*args: str) -> None:
    """Print the result of each named library as one line of JSON."""
    if args[:1] == ("--in-here",):
        print(json.dumps({"gloo": gloo, "nccl": nccl}[args[1]]()), flush=True)
        os._exit(0)  # the threads of gloo and NCCL need no tear-down
    print(json.dumps({name: try_library(name) for name in args}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
