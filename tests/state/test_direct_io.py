"""A file that goes past the page cache: the same bytes as any other, on whatever file system."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128

from raydist.state.direct_io import BLOCK, DirectFile


@pytest.mark.parametrize("size", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 4097])
@pytest.mark.parametrize("knows", ["direct", "refused when opened", "refused when written"])
def test_what_is_written_is_there_in_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, knows: str
) -> None:
    if knows != "direct":
        refuse(monkeypatch, "open" if knows == "refused when opened" else "write")
    data, drawn = random.Random(size).randbytes(size), random.Random(1)
    file, at = DirectFile(tmp_path / "state"), 0
    while at < size:
        at += file.write(data[at : at + drawn.choice([1, 64, 5000, BLOCK, 3 * BLOCK])])
    file.end()
    file.close()
    assert (tmp_path / "state").read_bytes() == data
    assert (file.bytes, file.checksum) == (size, xxh3_128(data).hexdigest())


def refuse(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A file system without such writes: EINVAL, as open(2) and write(2) say it."""
    real: Any = getattr(os, call)

    def refused(target: Any, *words: Any) -> Any:
        flags = words[0] if call == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(target, *words)

    monkeypatch.setattr(os, call, refused)


def test_it_goes_past_the_cache_where_it_can(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system knows no such writes")
    file = DirectFile(tmp_path / "state")
    assert fcntl.fcntl(file._descriptor, fcntl.F_GETFL) & os.O_DIRECT
    file.close()
