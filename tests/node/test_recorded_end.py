"""How a rank ended, in a file for a driver that cannot ask its agent."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from raydist.node.recorded_end import record_end
from raydist.worker.heartbeat import BEAT_PAGE


def test_an_end_is_recorded_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (beat := tmp_path / "beat").write_bytes(bytes(BEAT_PAGE))
    (run := tmp_path / "run").mkdir()

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def record(code: int) -> None:
        with beat.open("rb") as page:
            record_end(str(run / "rank-0.value"), code, 9, page.fileno())

    record(0)
    monkeypatch.setattr(os, "replace", full)
    record(1)
    assert [each.name for each in run.iterdir()] == ["rank-0.value.end"]
    assert json.loads((run / "rank-0.value.end").read_text())[:2] == [0, 9]
