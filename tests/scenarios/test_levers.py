"""What speeds up a program as it is, seen from its ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.programs import Program


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_ranks_of_a_program_are_bound_and_collect_together(tmp_path: Path) -> None:
    script = str(ROOT / "tests/scripts/levers.py")
    words = ("--nproc-per-node", "2", "--numa-binding", "exclusive", "train.gc=5", script)
    program = Program(tmp_path, *words, module="raydist.tools.launch")
    assert program.wait() == 0, program.screen
    first, second = (json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in range(2))
    assert not {*first["cpus"]} & {*second["cpus"]}
    assert {*first["cpus"], *second["cpus"]} <= os.sched_getaffinity(0)
    for rank in (first, second):
        assert rank["enabled"]
        assert [step for step in rank["full"] if step > 3] == [5, 10, 15, 20]
    status = os.lstat(Path(first["inductor"]).parent)
    # filelock, which inductor uses, may set the sticky bit
    assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.getuid())
    assert second["inductor"] == first["inductor"]
