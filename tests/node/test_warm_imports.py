"""What a fork server imports: its ranks end without work that only helps a longer life."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


LAZY = """
import sys
from pathlib import Path

def __getattr__(name):
    if name == "Model":
        import lazy.models
        return lazy.models.Model
    raise AttributeError(name)
"""


def test_what_a_package_imports_for_a_name_is_imported_before_the_ranks_start(
    tmp_path: Path,
) -> None:
    """As transformers does, and as `from package import submodule` does."""
    (tmp_path / "lazy").mkdir()
    (tmp_path / "lazy/__init__.py").write_text(LAZY)
    (tmp_path / "lazy/models.py").write_text("class Model: ...\n")
    (tmp_path / "lazy/data.py").write_text("")
    code = """
import sys
from pathlib import Path
from raydist.node import warm_imports
warm = warm_imports.import_modules(("lazy", "lazy:Model", "lazy:data", "lazy:missing"))
print(*warm.failed, *(name for name in ("lazy.models", "lazy.data") if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["lazy.models", "lazy.data"]
