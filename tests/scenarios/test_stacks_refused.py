"""A machine that refuses ptrace: the hang, `raydist stacks` and `raydist doctor` give one reason."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raydist.node.tracing import find_py_spy
from tests.conftest import ROOT
from tests.programs import Program
from tests.tracing import CALLS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed"),
    pytest.mark.skipif(platform.machine() not in CALLS, reason="no filter for this machine"),
]
PATIENCE_S = 600.0
REASON = "the container's seccomp profile forbids ptrace"
JOB = """
    import ctypes, time
    import torch
    import torch.distributed as dist
    import raydist

    def job(config):
        for step in range(1, 1_000_000):
            time.sleep(0.01)
            while step == 60 and raydist.rank().rank == 1:  # a signal ends sleep(3)
                ctypes.PyDLL(None).sleep(3600)
            dist.all_reduce(torch.ones(3))
            raydist.report(step=step)
"""


def test_frames_of_c_code_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "held.py").write_text(textwrap.dedent(JOB))
    python, where = [sys.executable, "-m"], ["group=inline", "scale=1x2"]
    refused = [*python, "tests.tracing", *python]
    run = Program(
        tmp_path, *python, "raydist.train", "job=held.py", "hang.after_s=1",
        "watch.progress=lines", *where, module="tests.tracing", alone=True,
    )  # fmt: skip
    try:
        run.wait_until(lambda: bool(notes(run)), "the reason", PATIENCE_S)
        note = notes(run)[0]
        assert note.startswith("no frames of C code of rank 1 on ")
        assert REASON in note
        run.wait_until(
            lambda: f"hang  {note}" in run.screen, "the reason on the screen", PATIENCE_S
        )
        stacks = subprocess.run(
            [*python, "raydist.cli", "stacks", "rank=1", "--native"],
            cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert f"no frames of C code: {REASON}" in stacks.stdout, stacks.stderr
        assert "in job" in stacks.stdout
    finally:
        run.process.kill()
        run.process.wait()
    assert run.leftovers() == []
    doctor = subprocess.run(
        [*refused, "raydist.cli", "doctor", "--json", *where],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    found = [each for each in json.loads(doctor.stdout)["findings"] if each["check"] == "stacks"]
    assert [each["level"] for each in found] == ["warn"], doctor.stderr
    assert found[0]["text"].endswith(REASON)
    assert "SYS_PTRACE" in found[0]["fix"]


def notes(run: Program) -> list[str]:
    """Return what is noted of the hangs of rank 1 so far; nothing before there is a run folder.

    On a busy machine another rank may be silent for a moment.
    """
    if not list(run.folder.glob("runs/*/*/events.jsonl")):
        return []
    hangs = [event for event in run.events("hang") if event["ranks"] == [1]]
    return [note for event in hangs for note in event["notes"]]
