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


BROKEN = """
from pathlib import Path
Path(__file__).with_name("runs").open("a").write("x")
raise OSError("no licence")
"""


def test_what_a_package_imports_for_a_name_is_imported_before_the_ranks_start(
    tmp_path: Path,
) -> None:
    """As transformers does. A submodule is left to the ranks: it may read which rank it is in."""
    for name, text in {
        "lazy/__init__.py": LAZY,
        "lazy/models.py": "class Model: ...\n",
        "lazy/data.py": "",
        "company/__init__.py": "",
        "company/ranks.py": "import os\nLOCAL_RANK = os.environ.get('LOCAL_RANK')\n",
        "broken/__init__.py": BROKEN,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = """
import sys
from raydist.node import warm_imports
names = ("lazy", "lazy:Model", "lazy:data", "lazy:missing", "company", "company:ranks")
warm = warm_imports.import_modules((*names, "broken", "broken:One", "broken:Other"))
assert all(map(warm_imports.is_imported, ("lazy", "company", "company:ranks")))
inside = [name for name in sys.modules if name.startswith(("lazy.", "company."))]
print(*warm.failed, *inside)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["broken", "lazy.models"]
    assert (tmp_path / "broken/runs").read_text() == "x"  # once, not for each name
