"""The files of answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from raydist.watch.operate.records import new_file
from raydist.watch.web.follow import SHARED


@pytest.mark.parametrize("suffix", [".txt", ".json.gz"])
def test_two_answers_of_a_second_have_files_of_their_own(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "2026-11-25_23-10-11")
    files = [new_file(tmp_path, "profile", suffix) for _ in range(3)]
    assert len({*files}) == 3
    assert all(SHARED.fullmatch(str(file.relative_to(tmp_path))) for file in files)
