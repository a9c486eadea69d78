"""Byte-pair encoding: one rank trains the vocabulary, each encodes a part of the text. (rank side)

The text may contain any bytes.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.state.object_store import StoragePath, parse_path
from raydist.state.run_checkpoints import training_of
from raydist.worker import checkpoint, context
from raydist.worker.backends import Comm

FILE = "vocabulary.json"
"""The vocabulary's file, next to the folder of checkpoints, in the format of the library
`tokenizers`."""
WORDS = (
    r" ?[A-Za-z0-9_\x80-\xff]+| ?[^\sA-Za-z0-9_\x80-\xff]+|[ \t\n\r\f\v]+(?![^ "
    r"\t\n\r\f\v])|[ \t\n\r\f\v]+"
)
"""Pairs are merged only within these pieces, as in GPT-2 (Radford et al. 2019)."""
BYTES = 256


class BytePairs:
    """A trained vocabulary (Sennrich et al. 2016, arXiv:1508.07909), of `tokenizers`.

    It treats text as Latin-1, one character per byte: all bytes have a token, and decode to
    themselves.
    """

    def __init__(self, vocabulary: str) -> None:
        self.vocabulary = vocabulary
        self._library = library().Tokenizer.from_str(vocabulary)
        named = sorted((number, piece) for piece, number in self._library.get_vocab().items())
        self.pieces = [piece.encode("latin-1") for _, piece in named]

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, texts: Sequence[bytes]) -> np.ndarray[Any, Any]:
        """Return the tokens of all texts in one row, uint32."""
        found = self._library.encode_batch_fast([text.decode("latin-1") for text in texts])
        return np.concatenate(
            [np.asarray(each.ids, np.uint32) for each in found] or [np.empty(0, np.uint32)]
        )

    def decode(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)


def library() -> Any:
    """Return the module `tokenizers`. ConfigError: it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        cause = "it needs the package tokenizers: pip install 'raydist[text]'"
        raise ConfigError.of(
            "job.args.tokenizer", "bpe", cause, "job.args.tokenizer=bytes"
        ) from error
    return tokenizers


def train_vocabulary(text: bytes, size: int) -> str:
    """Train a vocabulary of at most `size` tokens, of which 256 are bytes.

    The same text and size give the same vocabulary.
    """
    kit = library()
    made = kit.Tokenizer(kit.models.BPE())
    made.pre_tokenizer = kit.pre_tokenizers.Split(kit.Regex(WORDS), "isolated")
    alphabet = [chr(each) for each in range(BYTES)]
    trainer = kit.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator((each.decode("latin-1") for each in parts_of(text)), trainer)
    return cast("str", made.to_str())


def parts_of(text: bytes) -> list[bytes]:
    """Split the text into parts that end at a zero byte."""
    return [each for each in re.split(rb"(?<=\0)", text) if each]


def byte_pairs(text: bytes, size: int) -> BytePairs:
    """Return the run's vocabulary, which rank 0 finds or trains and sends to all.

    - `text`: what it is trained on.
    - `size`: number of tokens. ConfigError: it is not larger than the number of bytes.

    All ranks must call it. The vocabulary is stored next to the checkpoints. A run that continues
    takes that of its checkpoint; a new run trains it.
    """
    if size <= BYTES:
        raise ConfigError.of(
            "model.vocab", size, "a BPE has more tokens than the 256 bytes", "model.vocab=4096"
        )
    library()
    me, made = context.rank(), b""
    if me.rank == 0:
        home = checkpoint.home().parent
        vocabulary = kept_vocabulary(home) or train_vocabulary(text, size)
        made = vocabulary.encode()
        if isinstance(home, Path):
            write_whole(home / FILE, made)
        else:
            (home / FILE).write_text(vocabulary)
    row = rows_of_ranks(torch.tensor(np.frombuffer(made, np.uint8)))[0]
    found = BytePairs(row.numpy().tobytes().decode())
    if len(found) > size:
        cause = f"the run that is continued has a vocabulary of {len(found)} tokens"
        raise ConfigError.of("model.vocab", size, cause, f"model.vocab={len(found)}")
    return found


def kept_vocabulary(home: StoragePath) -> str:
    """Return the vocabulary with which a restarted or resumed run began; empty if there is none."""
    places = [home] if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else []
    if named := os.environ.get(env_names.RESUME, ""):
        places.append(training_of(parse_path(named)).parent)
    for place in places:
        if (file := place / FILE).exists():
            return file.read_bytes().decode()
    return ""


def encode_together(pairs: BytePairs, text: bytes) -> torch.Tensor:
    """Return the tokens of a text, int32 of shape [tokens]; each rank encodes a part.

    All ranks must call it. The tokens are kept in the run folder, so that a restart need not encode
    again.
    """
    me, parts = context.rank(), parts_of(text)
    file = me.run_dir / f"tokens-{zlib.crc32(text, zlib.crc32(pairs.vocabulary.encode())):08x}.npy"
    if min(int(each) for each in rows_of_ranks(torch.tensor([file.is_file()]))):
        return torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False))
    ends = [0, *itertools.accumulate(map(len, parts))]
    begin, end = (rank * len(text) // me.world_size for rank in (me.rank, me.rank + 1))
    mine = [part for part, at in zip(parts, ends, strict=False) if begin <= at < end]
    tokens = torch.cat(rows_of_ranks(torch.from_numpy(pairs.encode(mine).astype(np.int32))))
    if me.local_rank == 0:
        write_whole(file, npy(tokens))
    return tokens


def npy(tokens: torch.Tensor) -> bytes:
    """Return a tensor as the bytes of an .npy file."""
    packed = io.BytesIO()
    np.save(packed, tokens.numpy(), allow_pickle=False)
    return packed.getvalue()


def write_whole(file: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that readers find all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{context.rank().rank}")
    temporary.write_bytes(content)
    temporary.replace(file)


def rows_of_ranks(own: torch.Tensor) -> list[torch.Tensor]:
    """Gather the row of each rank, of any length, on all ranks."""
    comm = cast("Comm", context.current().comm)
    lengths = [int(each) for each in comm.gather(torch.tensor([len(own)]))]
    padded = torch.zeros(max(lengths), dtype=own.dtype)
    padded[: len(own)] = own
    return [row[:length] for row, length in zip(comm.gather(padded), lengths, strict=True)]
