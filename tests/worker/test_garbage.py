"""The pauses of Python's collector, and its collections at the same step; in a process of its
own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LOOP = """
import gc, json, time
import torch
from raydist.worker import garbage

notes, full, at = [], [], 0
gc.callbacks.append(lambda phase, info: full.append(at) if phase == "stop" and info["generation"] == 2 else None)
garbage.measure_pauses(notes.append)
garbage.collect_together(10)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
kept = [[i] for i in range(200_000)]
before = gc.get_threshold()
for at in range(1, 33):
    optimizer.step()
    if at == 3:
        frozen = gc.get_freeze_count()
    if at > 16:
        gc.collect()
print(json.dumps([notes, full[: full.index(17)], frozen, before[:2] == gc.get_threshold()[:2], gc.isenabled()]))
"""


def run_loop() -> Any:
    done = subprocess.run([sys.executable, "-c", LOOP], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_collections_are_made_at_the_steps_and_pauses_are_a_share() -> None:
    notes, full, frozen, young, enabled = run_loop()
    assert [at for at in full if at] == [3, 10]
    assert frozen > 200_000  # so that a later collection does not look at them
    assert young  # the young are collected as ever
    assert enabled
    assert len(notes) == 4  # after 8, 16, 24, 32 steps
    assert all(0 <= share <= 1 for share in notes)
    assert notes[-1] > 0
