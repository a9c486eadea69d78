"""Whether the training that saved the newest checkpoint of a run folder has finished."""

from __future__ import annotations

import json
from pathlib import Path

from raydist.shared import kinds
from raydist.shared.record_names import EVENTS, RESULT
from raydist.state.run_checkpoints import finished
from tests.records import line


def test_a_new_start_that_failed_at_once_does_not_undo_an_end(tmp_path: Path) -> None:
    """The next run with `resume=auto` took the finished training for one that goes on, made no
    step, and finished."""
    last = tmp_path / "checkpoints" / "step-00000100"
    ended = kinds.Result(t=1.0, status="finished", checkpoint=str(last))
    failed = kinds.Result(t=2.0, status="failed")
    (tmp_path / RESULT).write_text(json.dumps({"status": "failed", "checkpoint": None}))
    (tmp_path / EVENTS).write_text(line(failed) + line(ended) + line(failed))
    assert finished(tmp_path, last)
    assert not finished(tmp_path, last.with_name("step-00000090"))
    (tmp_path / EVENTS).write_text(line(failed))
    assert not finished(tmp_path, last)
