"""`make test` on each Python from 3.10 to 3.13 that this machine has, with the newest and the lowest
torch that it can have.

    python -m tests.matrix                    # `make matrix`
    python -m tests.matrix 3.10 3.13:2.8.0    # some of them, a torch behind the colon

The environments are .venv-matrix-*; those in which the tests passed are removed. The output of each
turn is in build/matrix/.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINORS = range(10, 14)
"""Of Python 3: those that pyproject.toml names and torch has wheels for."""
PLACES = ("~/.pyenv/versions/3.{minor}.*/bin", "~/.local/share/uv/python/cpython-3.{minor}*/bin")
"""Where version managers keep Pythons that are not on PATH."""


@dataclass(frozen=True)
class Turn:
    """One environment: a Python, and a torch; the newest if it is empty."""

    python: str
    torch: str = ""

    @property
    def name(self) -> str:
        return self.python + (f"-torch-{self.torch}" if self.torch else "")

    def command(self, interpreter: str) -> list[str]:
        words = ["make", "test", f"PYTHON={interpreter}", f"VENV=.venv-matrix-{self.name}"]
        # the type hints of older versions of torch differ
        return [*words, f"TORCH={self.torch}", "CHECKS=lint"] if self.torch else words


def interpreter(python: str) -> str | None:
    """Return the path of a Python that runs, for `3.10`; None if this machine has none.

    A shim of pyenv is on PATH for each version, but most of them refuse to run.
    """
    minor = python.partition(".")[2]
    folders = [
        folder
        for pattern in PLACES
        for folder in sorted(Path("/").glob(expand(pattern.format(minor=minor))), reverse=True)
    ]
    names = [f"python{python}", *(str(folder / f"python{python}") for folder in folders)]
    for name in names:
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def expand(pattern: str) -> str:
    """Return a pattern with `~` as one that starts from the root folder, as Path.glob wants it."""
    return str(Path(pattern).expanduser()).lstrip("/")


def lowest_torch() -> str:
    (version,) = re.findall(r"^torch==(\S+)", (ROOT / "tests/lowest.txt").read_text(), re.MULTILINE)
    return str(version)


def turns(words: list[str]) -> Iterator[Turn]:
    """Yield the turns that were asked for; without any word all."""
    for word in words or [f"3.{minor}" for minor in MINORS]:
        python, _, torch = word.partition(":")
        if python not in {f"3.{minor}" for minor in MINORS}:
            known = ", ".join(f"3.{minor}" for minor in MINORS)
            print(f"error: no Python {word}: type some of {known}", file=sys.stderr)
            sys.exit(2)
        yield Turn(python, torch)
        if not words:
            yield Turn(python, lowest_torch())


def run(turn: Turn, log: Path) -> str:
    """Run one turn; return its outcome as a line."""
    path = interpreter(turn.python)
    if path is None:
        return "not on this machine"
    began = time.monotonic()
    with log.open("w") as output:
        done = subprocess.run(turn.command(path), cwd=ROOT, stdout=output, stderr=output)
    took = f"in {(time.monotonic() - began) / 60:.0f} min"
    last = next((line for line in reversed(log.read_text().splitlines()) if " passed" in line), "")
    if done.returncode:
        return f"FAILED {took}: see {log.relative_to(ROOT)}  {last.strip('= ')}"
    shutil.rmtree(ROOT / f".venv-matrix-{turn.name}", ignore_errors=True)  # 7 GB each
    return f"passed {took}: {last.strip('= ')}"


def main(words: list[str]) -> None:
    logs = ROOT / "build/matrix"
    chosen = list(turns(words))
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for turn in chosen:
        outcomes.append(run(turn, logs / f"{turn.name}.txt"))
        print(f"{turn.name:22} {outcomes[-1]}", flush=True)
    if not any(outcome.startswith("passed") for outcome in outcomes):
        sys.exit(1)
    sys.exit(any(outcome.startswith("FAILED") for outcome in outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
