"""Imports are not interrupted by the garbage collector, which resumes afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEARN = """
import gc, sys
from raydist.shared.imports import uncollected
collected = []
gc.callbacks.append(lambda when, info: collected.append(when))
class Node: pass
def garbage():
    for _ in range(20_000):
        node = Node(); node.itself = node
"""


@pytest.mark.parametrize(
    ("block", "collections"), [("uncollected()", False), ("open('/dev/null')", True)]
)
def test_nothing_is_collected_in_the_block(block: str, collections: bool) -> None:
    code = f"{LEARN}\nwith {block}:\n    garbage()\n    print(bool(collected))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{collections}\n"


@pytest.mark.parametrize("collects", [True, False])
def test_afterwards_it_is_as_before_and_what_was_imported_is_left_out(collects: bool) -> None:
    code = f"""{LEARN}
if not {collects}: gc.disable()
try:
    with uncollected():
        kept = [[] for _ in range(20_000)]
        raise ImportError
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 20_000, len(gc.get_objects()) < 20_000)
"""
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True)
        == f"{collects} True True\n"
    )


def test_a_command_leaves_out_what_it_has_imported() -> None:
    code = """
import gc, sys
from raydist.train import main
code = main(["--cfg", "job", "job=digits"])
print(code, gc.isenabled(), gc.get_freeze_count() > 10_000, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "0 True True\n"
