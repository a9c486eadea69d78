"""Token files on disk as a data set: cut into sequences, read by mmap. (rank side)"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from raydist.shared.errors import ConfigError

TYPES = ("uint16", "uint32")
HEADER_BYTES = 1024
"""The header of a .bin file of llm.c and modded-nanogpt: 256 int32, the first of them one of
HEADERS."""
HEADERS = {20240520: "uint16", 20240801: "uint32"}
"""The first number of a header -> the type of the tokens (llm.c, dev/data/data_common.py)."""


class TokenFiles(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A map-style Dataset of packed tokens in files.

    Example: `fit(train=data.TokenFiles("tokens", length=1024), …)`.

    - `files`: a folder, whose `*.bin` and `*.npy` are taken in order of their names; or a file, or
      a list of files.
    - `length`: tokens of a sequence, L.
    - `dtype`: of the tokens in `.bin` files without a header, "uint16" or "uint32". A file of llm.c
      has a header, and a `.npy` says it itself.

    Sample i is (input, target), both int64 of shape [L]: L tokens, and the same shifted by one. The
    samples follow each other without a gap in a file, and never cross the end of one: the last
    tokens of a file that fill no sequence are left out. Nothing is read into memory but the
    sequences of a batch. raydist.fit shuffles their numbers (8 bytes for each sequence in each
    rank), so all promises of a map-style Dataset hold.

    ConfigError: there is no such file, a file has another type or a size that does not fit, or all
    files are too short.
    """

    def __init__(
        self, files: str | Path | Sequence[str | Path], length: int, dtype: str = "uint16"
    ) -> None:
        if length < 1 or dtype not in TYPES:
            wrong = f"length={length}" if length < 1 else f"dtype={dtype}"
            raise ConfigError(
                f"TokenFiles({wrong}): length must be at least 1, dtype one of {', '.join(TYPES)}"
            )
        self.length = length
        self.dtype = dtype
        self.files = [file.absolute() for file in token_files(files)]
        self._maps: dict[int, Any] = {}
        counts = ((len(self._tokens(number)) - 1) // length for number in range(len(self.files)))
        self._ends = [0, *accumulate(max(0, count) for count in counts)]
        if not len(self):
            raise refusal(
                files, f"no file in it has the {length + 1:,} tokens of a sequence and its target"
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        begin = (index - self._ends[number]) * self.length
        part = torch.from_numpy(
            self._tokens(number)[begin : begin + self.length + 1].astype(np.int64)
        )
        return part[:-1], part[1:]

    def _tokens(self, number: int) -> Any:
        """Return the tokens of a file, a memory-mapped numpy array.

        Each process opens the file at first use.
        """
        if number not in self._maps:
            self._maps[number] = opened(self.files[number], self.dtype)
        return self._maps[number]

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker would otherwise get the tokens themselves.
        return {**self.__dict__, "_maps": {}}


def token_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that the argument names. ConfigError: there are none."""
    if not isinstance(files, str | Path):
        found = [Path(file) for file in files]
    elif Path(files).is_dir():
        found = sorted(file for file in Path(files).iterdir() if file.suffix in (".bin", ".npy"))
    else:
        found = [Path(files)]
    missing: Iterable[Path] = [file for file in found if not file.is_file()]
    if not found or missing:
        raise refusal(
            files, f"{', '.join(map(str, missing)) or '*.bin or *.npy'} not found on this node"
        )
    return found


def opened(file: Path, dtype: str) -> Any:
    """Return the tokens of a file by mmap. ConfigError: it holds something else."""
    if file.suffix == ".npy":
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.name not in TYPES:
            raise refusal(
                file,
                f"it holds {tokens.dtype.name} of shape {list(tokens.shape)}, not tokens in one "
                "row",
            )
        return tokens
    size = os.path.getsize(file)
    first = int.from_bytes(file.open("rb").read(4), "little")
    begin, kind = (
        (HEADER_BYTES, HEADERS[first]) if first in HEADERS and size >= HEADER_BYTES else (0, dtype)
    )
    if (size - begin) % np.dtype(kind).itemsize:
        raise refusal(file, f"its {size:,} bytes are no whole number of tokens in {kind}")
    return (
        np.memmap(file, np.dtype(kind).newbyteorder("<"), "r", begin)
        if size > begin
        else np.empty(0, kind)
    )


def refusal(files: Any, cause: str) -> ConfigError:
    """Return the error for these files."""
    named = files if isinstance(files, str | Path) else "[…]"
    return ConfigError(
        f"TokenFiles({named}): {cause}; it needs files of {' or '.join(TYPES)} tokens (*.bin, "
        "*.npy)"
    )
