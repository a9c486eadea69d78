"""NCCL's log of one rank: forwarded for fabric.debug, checked for fabric.strict. (actor)"""

from __future__ import annotations

from pathlib import Path

from raydist.network import nccl_log

CHUNK = 1 << 20
"""Maximum bytes in one reply, and at the beginning of the log that are searched for the network."""
MAX_BYTES = 16 << 20
"""Maximum bytes that are read at the end of a run: NCCL names its transports at the beginning."""


class NcclLog:
    """NCCL's log file of one attempt of a rank."""

    def __init__(self, path: Path, aloud: bool, strict: bool) -> None:
        """`aloud`: forward it (fabric.debug). `strict`: require RDMA (fabric.strict)."""
        self._path = path
        self._aloud = aloud
        self._undecided = strict
        self._sent = 0
        path.unlink(missing_ok=True)

    def news(self) -> bytes:
        """Return the bytes since the last call; none without fabric.debug."""
        if not self._aloud:
            return b""
        data = read_bytes(self._path, CHUNK, self._sent)
        self._sent += len(data)
        return data

    def refusal(self) -> str:
        """Return why the rank must end, which is that NCCL uses sockets; empty otherwise.

        The log is not read again once NCCL has chosen.
        """
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
    """Return NCCL's log.

    It is in its own file or, if there is none, in the rank's log, mixed with the rank's output.
    """
    return read_bytes(nccl_file if nccl_file.exists() else rank_log, MAX_BYTES).decode(
        errors="replace"
    )


def read_bytes(path: Path, most: int, offset: int = 0) -> bytes:
    """Return at most `most` bytes of a file from `offset`; none if the file is missing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(most)
    except OSError:
        return b""
