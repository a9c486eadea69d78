"""What a fork server imports: its ranks end without work that only helps a longer life."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys, weakref
from types import SimpleNamespace
from raydist.node import warm_imports

if sys.argv[1] == "missing":
    warm_imports.weakref = SimpleNamespace(finalize=object)
warm = warm_imports.import_modules(("torch",))
assert not warm.failed
finalizers = [each for each in weakref.finalize._registry if each.atexit]
print(len([each for each in finalizers if each.peek()[1].__module__ == "torch.library"]))
"""


@pytest.mark.parametrize("registry", ["there", "missing"])
def test_ranks_do_not_deregister_torchs_operators_at_their_end(registry: str) -> None:
    """`weakref.finalize._registry` is private: without it they do, and all else is the same."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, registry],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (int(done.stdout) > 0) == (registry == "missing")
