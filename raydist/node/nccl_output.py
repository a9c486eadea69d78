"""NCCL's log of one rank: passes it on for fabric.debug, and checks its network for fabric.strict.
(actor)"""

from __future__ import annotations

from pathlib import Path

from raydist.network import nccl_log

CHUNK = 1 << 20
"""Most bytes in one reply, and at the beginning that are searched for the network."""
MAX_BYTES = 16 << 20
"""Most bytes that are read at the end of a run: NCCL names its transports at the beginning."""


class NcclLog:
    """NCCL's log file of one attempt of a rank."""

    def __init__(self, path: Path, aloud: bool, strict: bool) -> None:
        """`aloud`: pass it on (fabric.debug). `strict`: require RDMA (fabric.strict)."""
        self._path = path
        self._aloud = aloud
        self._undecided = strict
        self._sent = 0
        path.unlink(missing_ok=True)

    def news(self) -> bytes:
        """The bytes since the last call; none without fabric.debug."""
        if not self._aloud:
            return b""
        data = read_bytes(self._path, CHUNK, self._sent)
        self._sent += len(data)
        return data

    def refusal(self) -> str:
        """Why the rank must end: NCCL uses sockets; empty otherwise. The log is not read again once
        NCCL has chosen."""
        if not self._undecided:
            return ""
        log = nccl_log.parse_nccl_log(read_bytes(self._path, CHUNK).decode(errors="replace"))
        self._undecided = not log.network
        if log.network != nccl_log.SOCKET:
            return ""
        return f"fabric.strict: NCCL took NET/{nccl_log.SOCKET}" + (
            f": {log.why_not}" if log.why_not else ""
        )


def read_nccl_output(nccl_file: Path, rank_log: Path) -> str:
    """NCCL's log: from its own file, or from the rank's log, mixed with the rank's output, if it
    has no file."""
    return read_bytes(nccl_file if nccl_file.exists() else rank_log, MAX_BYTES).decode(
        errors="replace"
    )


def read_bytes(path: Path, most: int, offset: int = 0) -> bytes:
    """At most `most` bytes of a file from `offset` on; none if the file is missing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(most)
    except OSError:
        return b""
