"""Token files: sequences that follow each other, from files as others write them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist.shared.errors import ConfigError
from raydist.training.data import TokenFiles


def written(folder: Path) -> list[Path]:
    """Tokens 0 … 40 in three files: raw, with llm.c's header, of numpy."""
    raw, headed, array = folder / "a.bin", folder / "b.bin", folder / "c.npy"
    raw.write_bytes(np.arange(0, 17, dtype="<u2").tobytes())
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 13
    headed.write_bytes(header.tobytes() + np.arange(17, 30, dtype="<u4").tobytes())
    np.save(array, np.arange(30, 41, dtype=np.uint16))
    (folder / "readme.txt").write_text("no tokens")
    return [raw, headed, array]


def test_sequences_follow_each_other_and_never_cross_files(tmp_path: Path) -> None:
    written(tmp_path)
    sequences = TokenFiles(tmp_path, 4)
    begins = [0, 4, 8, 12, 17, 21, 25, 30, 34]
    assert len(sequences) == len(begins)
    for (tokens, target), begin in zip(
        (sequences[index] for index in range(len(sequences))), begins, strict=True
    ):
        assert tokens.tolist() == list(range(begin, begin + 4))
        assert target.tolist() == list(range(begin + 1, begin + 5))
        assert tokens.dtype == target.dtype == torch.int64


def test_files_are_taken_in_the_given_order_and_pickled_without_their_tokens(
    tmp_path: Path,
) -> None:
    files = written(tmp_path)
    sequences = TokenFiles([files[2], files[0]], 5)
    assert [sequences[index][0][0].item() for index in range(len(sequences))] == [30, 35, 0, 5, 10]
    packed = pickle.dumps(sequences)
    assert len(packed) < 1000
    assert pickle.loads(packed)[1][1].tolist() == sequences[1][1].tolist()
    with pytest.raises(IndexError, match="sequence 5 of 5"):
        sequences[5]


def test_the_whole_range_of_uint32(tmp_path: Path) -> None:
    file = tmp_path / "big.bin"
    file.write_bytes(np.array([2**32 - 1, 2**31, 7], dtype="<u4").tobytes())
    assert TokenFiles(file, 2, "uint32")[0][0].tolist() == [2**32 - 1, 2**31]


@pytest.mark.parametrize(
    ("make", "length", "dtype", "say"),
    [
        (lambda folder: folder / "none", 4, "uint16", "not found on this node"),
        (
            lambda folder: [folder / "a.bin", folder / "z.bin"],
            4,
            "uint16",
            "z.bin not found on this node",
        ),
        (lambda folder: folder / "a.bin", 17, "uint16", "no file in it has the 18 tokens"),
        (
            lambda folder: folder / "a.bin",
            4,
            "uint32",
            "its 34 bytes are no whole number of tokens in uint32",
        ),
        (lambda folder: folder / "two.npy", 4, "uint16", r"it holds float64 of shape \[2, 2\]"),
        (lambda folder: folder / "a.bin", 4, "int8", "dtype=int8"),
        (lambda folder: folder / "a.bin", 0, "uint16", "length=0"),
    ],
)
def test_what_holds_no_tokens_is_refused(
    make: Any, length: int, dtype: str, say: str, tmp_path: Path
) -> None:
    written(tmp_path)
    np.save(tmp_path / "two.npy", np.zeros((2, 2)))
    with pytest.raises(ConfigError, match=say):
        TokenFiles(make(tmp_path), length, dtype)
