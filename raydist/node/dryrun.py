"""Which address gloo and NCCL would really take, with a rank's own variables, before there is any rank. (rank side)

    python -m raydist.node.dryrun gloo nccl    -> {"gloo": {"addresses": ["10.0.0.5"]}, "nccl": {"error": "..."}}

Each runs in a process of its own: what a library reads from the environment it reads once.
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
from typing import Any

LIMIT_S = 120.0
"""Longest time for one of them: torch on a cold network file system takes a minute."""
BOOTSTRAP = re.compile(r"NCCL INFO Bootstrap ?: Using ([^:\s]+):(.+?)<\d+>")
"""NCCL's word for the interface and address it meets others on; the blank went away in 2.24."""
REFUSAL = re.compile(r"NCCL WARN (.+)")
ENFORCE = re.compile(r"^\w*Error: (\[enforce fail at [^\]]*\] )?")
"""Where in gloo's source it says so is of no use to a person."""
UNIQUE_ID_BYTES = 128


def gloo() -> dict[str, Any]:
    """Open gloo's device as a process group does, and see where it listens."""
    from datetime import timedelta

    import psutil
    from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

    group = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=10))
    listening = [own for own in psutil.Process().net_connections("tcp") if own.status == psutil.CONN_LISTEN]
    found = sorted({own.laddr.ip for own in listening})
    del group
    return {"addresses": found}


def nccl() -> dict[str, Any]:
    """Let NCCL choose its interface: ncclGetUniqueId opens the socket that the others would call, GPU or not."""
    path = nccl_library()
    library = ctypes.CDLL(path)
    made = (ctypes.c_char * UNIQUE_ID_BYTES)()
    status = library.ncclGetUniqueId(ctypes.byref(made))
    return {"status": status, "addresses": [address] if not status and (address := address_in(made.raw)) else []}


def nccl_library() -> str:
    """The NCCL that torch loads: the wheel's own, else the system's."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((str(found) for place in places for found in place.glob("nccl/lib/libnccl.so.*")), "libnccl.so.2")


def address_in(unique_id: bytes) -> str | None:
    """The address in an ncclUniqueId: 8 bytes of magic, then a sockaddr (NCCL 2.30 src/include/bootstrap.h)."""
    family = int.from_bytes(unique_id[8:10], sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, unique_id[12:16])
    return socket.inet_ntop(socket.AF_INET6, unique_id[16:32]) if family == socket.AF_INET6 else None


def try_out(name: str) -> dict[str, Any]:
    """Run one of them in a process of its own; what it found, or the library's own word on why not."""
    # apart from what is printed: the two would run into each other in the middle of a line
    log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET", "NCCL_DEBUG_FILE": "/dev/stderr"}
    command = [sys.executable, "-m", "raydist.node.dryrun", "--in-here", name]
    try:
        ended = subprocess.run(
            command, env={**os.environ, **log}, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S:g} s"}
    return read_output(ended.stdout, ended.stderr, ended.returncode)


def read_output(out: str, log: str, code: int) -> dict[str, Any]:
    """What a try found, by the JSON that it printed and by NCCL's log."""
    found: dict[str, Any] = json.loads(out) if code == 0 else {}
    if code or found.pop("status", 0):
        refused = REFUSAL.findall(log)
        last = (refused or log.strip().splitlines() or [f"it ended with code {code}"])[-1]
        return {"error": ENFORCE.sub("", last).strip()}
    if using := BOOTSTRAP.search(log):
        found |= {"interface": using[1], "addresses": [using[2].strip("[]").partition("%")[0]]}
    return found


def main(*words: str) -> None:
    """Print what the named libraries would do, as one line of JSON."""
    if words[:1] == ("--in-here",):
        print(json.dumps({"gloo": gloo, "nccl": nccl}[words[1]]()), flush=True)
        os._exit(0)  # gloo's threads and NCCL's have nothing to say at the end
    print(json.dumps({name: try_out(name) for name in words}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
