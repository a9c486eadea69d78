"""The output of a rank on its node."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from raydist.node.nccl_output import MAX_BYTES
from raydist.node.output_file import FREED_AT_ONCE, OutputFile


def test_what_was_read_is_freed_but_for_the_beginning(tmp_path: Path) -> None:
    """A rank that prints for weeks filled its node's TMPDIR, though its log is in the run
    folder."""
    path, piece = tmp_path / "rank-0.log", 1 << 20
    output = OutputFile(path)
    rank = os.open(path, os.O_WRONLY | os.O_APPEND)
    pieces = (MAX_BYTES + 3 * FREED_AT_ONCE) // piece
    for number in range(pieces):
        written = bytes([number % 256]) * piece
        os.write(rank, written)
        assert output.read(2 * piece) == written
    os.write(rank, b"end")
    assert output.read(piece) == b"end"
    assert path.stat().st_size == pieces * piece + 3
    assert path.stat().st_blocks * 512 < MAX_BYTES + FREED_AT_ONCE
    with path.open("rb") as file:
        assert [file.read(piece)[:1] for _ in range(3)] == [b"\0", b"\1", b"\2"]
    os.close(rank)


def test_a_file_system_that_frees_no_parts_keeps_the_file(tmp_path: Path) -> None:
    class Whole(OutputFile):
        def _map(self) -> mmap.mmap:
            raise OSError("not supported")

    path = tmp_path / "rank-0.log"
    output = Whole(path)
    path.write_bytes(bytes(MAX_BYTES + 2 * FREED_AT_ONCE))
    assert len(output.read(1 << 26)) == MAX_BYTES + 2 * FREED_AT_ONCE
    assert output.read(10) == b""


def test_a_rank_that_empties_its_log_is_read_on_from_the_beginning(tmp_path: Path) -> None:
    """As `echo > /dev/stderr` in a shell script does."""
    path = tmp_path / "rank-0.log"
    output = OutputFile(path)
    path.write_bytes(b"before\n")
    assert output.read(100) == b"before\n"
    path.write_bytes(b"a\n")
    assert output.read(100) == b"a\n"
    assert output.read(100) == b""
