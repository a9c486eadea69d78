"""The listing is the way of a job: packages in order, sides, shape, names and the cost of
importing, held by a test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "raydist"

PACKAGES = (
    "shared state settings cluster network messages worker training node launch recovery "
    "reporting watch"
    " flow background sweeps train tools cli raydist"
)
"""From the ground up: a package imports only from those to its left. The last is the package's own
`__init__`."""
SIDES = ("driver", "pure", "actor", "rank side", "either side")
FORBIDDEN = {
    "driver": {"torch", "horovod", "torchvision"},
    "pure": {"torch", "horovod", "ray", "omegaconf", "hydra"},
    "actor": {"omegaconf", "hydra"},
    "rank side": {"ray"},
    "either side": {"ray", "torch", "omegaconf", "hydra"},
}
TWICE = {
    "main": "of each command",
    "entry_point": "of `raydist` and of `python -m raydist.train`",
    "parse_arguments": "of each command",
    "join": "of each backend: it joins the other ranks, and leaves with them",
    "submit": "raydist.submit runs in the background, `raydist submit` sends a job to a cluster",
    "load": "raydist.checkpoint.load gives a state, raydist.sharded.load fills one",
    "save": "raydist.checkpoint.save is of rank 0, raydist.sharded.save of all ranks",
}
"""Public names that more than one file defines, and why."""


@cache
def modules() -> dict[str, Path]:
    """Return every module by its name below `raydist.`; the `__init__` of the package is
    `raydist`."""
    result = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ("conf", "jobs"):
            result[".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "raydist"] = path
    return result


def package(name: str) -> str:
    """Return the package of a module; for a file at the root the file itself."""
    return name.partition(".")[0]


def imported(path: Path) -> list[tuple[str, bool]]:
    """(module, deferred?) of every import in a file; those under TYPE_CHECKING count too."""
    tree = ast.parse(path.read_text())
    inside = {
        id(n)
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(f)
    }
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result += [(alias.name, id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            result += [(f"{node.module}.{alias.name}", id(node) in inside) for alias in node.names]
    return result


def own(name: str) -> str | None:
    """`raydist.a.b.c` as the module of ours that it is or that holds it; None for another
    library's."""
    first, *parts = name.split(".")
    if first != "raydist":
        return None
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts) or "raydist"


def needs(name: str) -> set[str]:
    """Return the modules of raydist that a module imports, anywhere in the file."""
    return {module for target, _ in imported(modules()[name]) if (module := own(target))} - {name}


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the first cycle in a graph; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def summary(path: Path) -> str:
    """Return the first paragraph of a file's docstring, as one line."""
    paragraph, _, _ = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    return " ".join(paragraph.split())


def side(path: Path) -> str:
    match = re.search(r"\(([^()]*)\)$", summary(path))
    assert match, f"{path}: the first paragraph does not end with a side: {summary(path)!r}"
    return match.group(1).split(";")[0]


def test_the_root_is_the_way_of_a_job() -> None:
    entries = {
        path.name
        for path in PACKAGE.iterdir()
        if path.name not in ("conf", "jobs", "__pycache__", "py.typed")
    }
    expected = {
        name if (PACKAGE / name).is_dir() else f"{name}.py" for name in PACKAGES.split()[:-1]
    }
    assert entries == expected | {"__init__.py"}


@pytest.mark.parametrize("name", modules())
def test_imports_point_to_the_left_only(name: str) -> None:
    order = PACKAGES.split()
    for module in needs(name):
        assert order.index(package(module)) <= order.index(package(name)), (
            f"raydist.{name} imports raydist.{module}"
        )


def test_no_cycles() -> None:
    files = {name: needs(name) for name in modules()}
    assert cycle(files) == []
    packages: dict[str, set[str]] = defaultdict(set)
    for name, needed in files.items():
        packages[package(name)] |= {package(each) for each in needed} - {package(name)}
    assert cycle(packages) == []


@pytest.mark.parametrize("name", modules())
def test_each_file_keeps_to_its_side(name: str) -> None:
    path = modules()[name]
    where = side(path)
    assert where in SIDES, f"{path}: unknown side {where!r}"
    for target, deferred in imported(path):
        top = target.split(".")[0]
        # What a function imports when it is called does not come with the file; ray in a rank would
        # still be wrong.
        if not deferred or where in ("rank side", "pure"):
            guarded = where == "either side" and is_typing_only(path, target)
            assert guarded or top not in FORBIDDEN[where] or is_typing_only(path, target), (
                f"{path} imports {target}"
            )


def is_typing_only(path: Path, target: str) -> bool:
    for node in ast.parse(path.read_text()).body:
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            return any(
                target
                in (
                    f"{line.module}.{alias.name}"
                    if isinstance(line, ast.ImportFrom)
                    else alias.name
                )
                for line in node.body
                if isinstance(line, ast.Import | ast.ImportFrom)
                for alias in line.names
            )
    return False


def listing(folder: Path) -> str:
    """Return the files of a package, each with the first sentence of its docstring, as its own
    docstring lists them."""
    lines = []
    for path in sorted(folder.iterdir()):
        file = path / "__init__.py" if path.is_dir() else path
        if path.name not in ("__init__.py", "__pycache__") and file.exists():
            what = re.sub(r"[.]? [(][^()]*[)]$", "", summary(file))
            name = f"    {path.name + '/' * path.is_dir():<22}"
            lines += textwrap.wrap(
                what, 100, initial_indent=name, subsequent_indent=" " * len(name)
            )
    return "\n".join(lines)


@pytest.mark.parametrize(
    "name", [name for name in PACKAGES.split()[:-1] if (PACKAGE / name).is_dir()]
)
def test_each_package_lists_its_files(name: str) -> None:
    text = modules()[name].read_text()
    expected = listing(modules()[name].parent)
    assert expected in text, (
        f"put this into {modules()[name]} (python -m tests.test_structure does):\n{expected}"
    )


def public(path: Path) -> Iterator[str]:
    """Yield the public classes and functions of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and not node.name.startswith("_"):
            yield node.name


def test_a_name_is_one_thing() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    for name, path in modules().items():
        # A class of shared/kinds.py is named after its kind. Other files write `kinds.Saved`.
        for each in set(public(path)) if name != "shared.kinds" else ():
            defined[each].append(name)
    twice = {each: where for each, where in defined.items() if len(where) > 1}
    assert set(twice) == set(TWICE), twice


ATTRIBUTES, PARAMETERS = 12, 6
"""Maximum of attributes that the methods of a class assign, and of parameters of a function."""
LARGER = {
    # The cluster, the rules for replacing nodes, and the state of each bundle decide together.
    "launch.standby:StandbyNodes": 14,
    # One for each thing in which servers differ; all but three by keyword.
    "node.fork_launcher:ForkServer.launch": 7,
    # Public: one for each thing that a job has; all but the first by keyword.
    "training.fit:fit": 10,
}
"""What is larger, by how much, and why. Nothing is added here: divide it instead."""


def assigned(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the methods of a class assign."""
    methods = [
        each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        each.attr
        for method in methods
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def larger(module: str, node: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """Yield the classes and functions in a part of a file that have more than the maximum."""
    for each in ast.iter_child_nodes(node):
        name = inside
        if isinstance(each, ast.ClassDef):
            name = f"{inside}{each.name}."
            if (count := len(assigned(each))) > ATTRIBUTES:
                yield f"{module}:{inside}{each.name}", count
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = each.args.posonlyargs + each.args.args + each.args.kwonlyargs
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            if count > PARAMETERS:
                yield f"{module}:{inside}{each.name}", count
        yield from larger(module, each, name)


def test_classes_and_functions_keep_their_shape() -> None:
    files = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    actual = dict(each for name, tree in files.items() for each in larger(name, tree))
    assert actual == LARGER


def test_no_line_is_packed_by_hand() -> None:
    """The formatter decides, so that a line has one thing in it."""
    assert [name for name, path in modules().items() if "# fmt:" in path.read_text()] == []


def test_names_of_variables_stand_in_one_file() -> None:
    """Of raydist's own. mpi_child.py runs without this package; an `-m` of a shell has no names."""
    apart = {"shared/env_names.py", "node/mpi_child.py", "node/mpi_agent.py", "network/mpi.py"}
    files = [path for path in modules().values() if str(path.relative_to(PACKAGE)) not in apart]
    assert [path for path in files if re.search(r"""["']RAYDIST_\w+["']""", path.read_text())] == []


def test_names_of_tests_have_at_most_80_characters() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 80] == []


def test_the_public_face_is_sorted_and_complete() -> None:
    import raydist

    assert raydist.__all__ == sorted(raydist.__all__)
    for name in raydist.__all__:
        assert getattr(raydist, name) is not None


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.stem)
def test_jobs_import_the_public_face_only(path: Path) -> None:
    """What they need of raydist, a user's job can import, too."""
    import raydist

    public = {"raydist", *(f"raydist.{name}" for name in raydist.__all__)}
    ours = {name for name, _ in imported(path) if name.partition(".")[0] == "raydist"}
    assert ours <= public


def after(statement: str) -> set[str]:
    """Return the top-level modules that are loaded after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.split()
    )


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        (
            "import raydist",
            {"torch", "ray", "horovod", "omegaconf", "hydra", "numpy", "rich", "psutil"},
        ),
        ("import raydist.flow", {"torch", "ray", "numpy", "torchvision"}),
        ("import raydist.train", {"torch", "ray", "numpy"}),
        ("import raydist.node.actor", {"torch", "omegaconf", "hydra", "psutil", "rich"}),
    ],
)
def test_importing_is_cheap(statement: str, unwanted: set[str]) -> None:
    assert not after(statement) & unwanted


def test_a_public_name_that_is_not_there_says_which_are() -> None:
    import raydist

    with pytest.raises(AttributeError, match="rank, report, run, sharded, submit"):
        raydist.runn  # noqa: B018


if __name__ == "__main__":
    for file in (PACKAGE / name / "__init__.py" for name in PACKAGES.split()[:-1]):
        if file.exists():
            head, _, _ = file.read_text().partition("\n\n    ")
            file.write_text(f'{head}\n\n{listing(file.parent)}\n"""\n')
