"""Byte pairs: one vocabulary for all ranks, any bytes there and back, the same when a run
continues."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from raydist.settings.config import Backend, Job
from raydist.shared.errors import ConfigError
from raydist.training import tokenizer
from tests.ranks import run_ranks

JOB = Job(backend=Backend("gloo"))
NOISE = random.Random(0).randbytes(3000)
TEXT = (
    b"\0".join(
        [b"def first(value):\n    return value + 1\n" * 40, NOISE, "höher, 更高\n".encode() * 30]
    )
    + b"\0end"
)
OTHER = b"class Other:\n    pass\n" * 200


def encoded(text: bytes, size: int = 400) -> Any:
    def call(job: Job) -> Any:
        pairs = tokenizer.byte_pairs(text, size)
        tokens = tokenizer.encode_together(pairs, TEXT)
        return pairs.vocabulary, tokens.tolist(), pairs.decode(tokens.tolist())

    return call


def test_ranks_share_a_vocabulary_and_any_bytes_come_back(tmp_path: Path) -> None:
    two = run_ranks(2, JOB, encoded(TEXT), tmp_path / "run")
    (one,) = run_ranks(1, JOB, encoded(TEXT), tmp_path / "alone")
    assert [result.error for result in (*two, one)] == [""] * 3
    assert (
        two[0].value == two[1].value == one.value
    )  # also of another number of ranks, trained anew
    vocabulary, tokens, back = one.value
    assert back == TEXT
    assert len(tokens) < len(TEXT) * 0.8
    assert 256 < max(tokens) < 400
    assert (tmp_path / "run" / tokenizer.FILE).read_text() == vocabulary
    assert len([*(tmp_path / "run").glob("tokens-*.npy")]) == 1


def test_a_run_that_continues_keeps_its_vocabulary(tmp_path: Path) -> None:
    (first,) = run_ranks(1, JOB, encoded(TEXT), tmp_path / "first")
    saved = str(tmp_path / "first" / "checkpoints" / "step-00000010")
    resumed = run_ranks(2, JOB, encoded(OTHER), tmp_path / "second", {"RAYDIST_RESUME": saved})
    assert [result.value for result in resumed] == [first.value] * 2
    (restarted,) = run_ranks(
        1, JOB, encoded(OTHER), tmp_path / "second", {"TORCHELASTIC_RESTART_COUNT": "1"}
    )
    assert restarted.value == first.value
    (fresh,) = run_ranks(1, JOB, encoded(OTHER), tmp_path / "second")
    assert fresh.value[0] != first.value[0]
    (smaller,) = run_ranks(
        1, JOB, encoded(OTHER, 300), tmp_path / "third", {"RAYDIST_RESUME": saved}
    )
    assert (
        "model.vocab=300: the run that is continued has a vocabulary of 400 tokens; set "
        "model.vocab=400" in (smaller.error)
    )


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab=256: .* set model\.vocab=4096"):
        tokenizer.byte_pairs(TEXT, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'raydist\[text\]'"):
        tokenizer.byte_pairs(TEXT, 400)
