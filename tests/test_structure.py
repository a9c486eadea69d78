"""The listing is the flow: layers, sides, sizes and the cost of importing, held by a test."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "raydist"

# From the ground up: a file may import only from lines above its own.
LAYERS = """
    errors script node.wire findings node.facts node.sysfs
    config storage direct writing events check transport traffic node.counters
    inventory shortage placement sight node.nics node.hca node.machine node.probe blame pace stuck straggler
    failures remedy goodput
    fabric_horovod fabric_mpi fabric_network fabric fabric_site fabric_across fabric_findings result restart
    context parcel signals shipping snapshot apart
    loop.random_state backends checkpoint sharded
    backends.ddp backends.horovod
    loop.data loop.optim loop.models loop.evaluation loop.step loop.keeping loop.fit loop
    words.translate words.lookup words.script words.env_file words.choices words.refusals words.compose words.manual
    words.torchrun words
    target standalone preload
    node.rendezvous node.rendezvous_http node.insight node.channel node.program
    node.entry node.oom node.processes node.parts node.memory node.forkserver node.server node.fork_client node.dryrun
    node.peers node.checkup node.sight node.nccl_log node.seat
    node.mpi_child node.mpi_install node.mpi_segments node.mpi_seat node.place node
    places reserve rescue group records inline notice sentry lookout vigil mpi attempts ledger lifetime gcs autoscaler
    cluster home
    watch.progress watch.wording watch.output watch.terminal watch.lines watch.page watch.pages watch.metadata
    watch.console watch
    run
    train tools tools.launch tools.submit tools.plan tools.horovod_build tools.horovod
    tools.bandwidth_figures tools.bandwidth_plot tools.bandwidth_ranks tools.bandwidth
    tools.doctor_findings tools.doctor_report tools.doctor_rounds tools.doctor
"""
FOLDERS = ("watch", "backends", "tools", "node", "loop", "words")
SIDES = ("driver", "pure", "actor", "rank side", "either side")
FORBIDDEN = {
    "driver": {"torch", "horovod", "torchvision"},
    "pure": {"torch", "horovod", "ray", "omegaconf", "hydra"},
    "actor": {"omegaconf", "hydra"},
    "rank side": {"ray"},
    "either side": {"ray", "torch", "omegaconf", "hydra"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `raydist.`; the package itself is left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and parts[0] not in ("conf", "jobs"):
            found[name] = path
    return found


def imported(path: Path) -> list[tuple[str, bool]]:
    """(module, deferred?) of every import in a file; those under TYPE_CHECKING count too."""
    tree = ast.parse(path.read_text())
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module in ("raydist", *(f"raydist.{folder}" for folder in FOLDERS)):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name, id(node) in inside) for name in names]
    return found


def side(path: Path) -> str:
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    match = re.search(r"\(([^()]*)\)$", first)
    assert match, f"{path}: the first docstring line does not end with a side: {first!r}"
    return match.group(1).split(";")[0]


def below(name: str) -> set[str]:
    """The modules that `name` may import: those of the lines above its own, and of its own line to its left."""
    seen: set[str] = set()
    for line in LAYERS.strip().splitlines():
        row = line.split()
        if name in row:
            return seen | set(row[: row.index(name)])
        seen |= set(row)
    raise AssertionError(f"{name} is in no layer: give it its line in LAYERS")


def own(name: str, known: dict[str, Path]) -> str | None:
    """`raydist.a.b` as the module of ours that it is, or that holds it."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or None


@pytest.mark.parametrize("name", modules())
def test_imports_point_downwards_only(name: str) -> None:
    known, allowed = modules(), below(name)
    for target, _ in imported(known[name]):
        if target.split(".")[0] == "raydist" and (found := own(target, known)) is not None:
            assert found in allowed, f"raydist.{name} imports raydist.{found}, which is not below it"


@pytest.mark.parametrize("name", modules())
def test_each_file_keeps_to_its_side(name: str) -> None:
    path = modules()[name]
    where = side(path)
    assert where in SIDES, f"{path}: unknown side {where!r}"
    for target, deferred in imported(path):
        top = target.split(".")[0]
        # What a function imports when it is called does not come with the file; ray in a rank would still be wrong.
        if not deferred or where in ("rank side", "pure"):
            guarded = where == "either side" and is_typing_only(path, target)
            assert guarded or top not in FORBIDDEN[where] or is_typing_only(path, target), f"{path} imports {target}"


def is_typing_only(path: Path, target: str) -> bool:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return any(target in ast.unparse(line) for line in node.body)
    return False


def functions() -> list[tuple[str, int]]:
    """(name, code lines) of every function: lines without docstring, comments and blanks."""
    found = []
    for path in modules().values():
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                code = lines[body[0].lineno - 1 : node.end_lineno]
                found.append(
                    (f"{path.name}:{node.name}", sum(bool(t.strip()) and not t.strip().startswith("#") for t in code))
                )
    return found


def test_sizes() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in modules().values()}
    assert max(sizes.values()) <= 350, max(sizes.items(), key=lambda item: item[1])
    longest = sorted(functions(), key=lambda item: item[1])
    counts = [count for _, count in longest]
    assert longest[-1][1] <= 60, longest[-1]
    assert statistics.median(counts) <= 7
    assert counts[int(len(counts) * 0.9)] <= 25
    screen = (PACKAGE / "run.py").read_text().splitlines()
    assert len(screen) <= 110, "run.py is the flow: it fits one screen"


def test_the_public_face_is_small_and_complete() -> None:
    import raydist

    assert raydist.__all__ == sorted(raydist.__all__)
    assert len(raydist.__all__) <= 12
    for name in raydist.__all__:
        assert getattr(raydist, name) is not None


def after(statement: str) -> set[str]:
    """Top-level modules that are there after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import raydist", {"torch", "ray", "horovod", "omegaconf", "hydra", "numpy", "rich", "psutil"}),
        ("import raydist.run", {"torch", "ray", "numpy", "torchvision"}),
        ("import raydist.train", {"torch", "ray", "numpy"}),
        ("import raydist.node.place", {"torch", "omegaconf", "hydra", "psutil", "rich"}),
    ],
)
def test_importing_is_cheap(statement: str, unwanted: set[str]) -> None:
    assert not after(statement) & unwanted


def test_raydist_run_stays_a_function_whatever_was_imported_before() -> None:
    code = "import raydist.run, raydist; from raydist.run import run_job; assert callable(raydist.run), raydist.run"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_public_name_that_is_not_there_says_which_are() -> None:
    import raydist

    with pytest.raises(AttributeError, match="rank, report, run"):
        raydist.runn  # noqa: B018
