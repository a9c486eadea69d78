"""What NCCL writes of one rank, in a file of its own: passed on as it comes, and held against fabric.strict. (actor)"""

from __future__ import annotations

from pathlib import Path

from raydist import transport

CHUNK = 1 << 20
"""Most bytes of it in one answer, and most of its beginning that is searched for the network."""
WHOLE = 16 << 20
"""Most bytes that are read at the end of a run: NCCL names its transports in the first."""


class NcclLog:
    """The file of one attempt of a rank."""

    def __init__(self, path: Path, aloud: bool, strict: bool) -> None:
        """`aloud`: a person asked for it (fabric.debug). `strict`: RDMA or an error (fabric.strict)."""
        self._path = path
        self._aloud = aloud
        self._undecided = strict
        self._told = 0
        path.unlink(missing_ok=True)

    def news(self) -> bytes:
        """What has come since the last call; nothing where nobody asked for it."""
        if not self._aloud:
            return b""
        found = head(self._path, CHUNK, self._told)
        self._told += len(found)
        return found

    def refusal(self) -> str:
        """Why the rank must not go on: NCCL took its sockets. Once NCCL has chosen, nobody looks again."""
        if not self._undecided:
            return ""
        found = transport.parse(head(self._path, CHUNK).decode(errors="replace"))
        self._undecided = not found.network
        if not found.network or found.network != transport.SOCKET:
            return ""
        return f"fabric.strict: NCCL took NET/{transport.SOCKET}" + (f": {found.why_not}" if found.why_not else "")


def read(own: Path, shared: Path) -> str:
    """NCCL's words: from its own file; where it has none, from the rank's log, mixed with the rank's output."""
    return head(own if own.exists() else shared, WHOLE).decode(errors="replace")


def head(path: Path, most: int, begin: int = 0) -> bytes:
    """So many bytes of a file from a place on; nothing if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(most)
    except OSError:
        return b""
