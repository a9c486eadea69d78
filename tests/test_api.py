"""docs/api.md is made of the docstrings of the public names, and of nothing else.

`python -m tests.test_api` writes the page anew. The source is read, not imported: the page is the
same for every version of Python and of torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache

import pytest

import raydist
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "api.md"
HEAD = """# API

Every name that `import raydist` gives. The text is that of the docstrings: `help(raydist.fit)` shows the same.
[Jobs](jobs.md) is the guide. `python -m tests.test_api` writes this page.

"ConfigError: …" begins what a function raises and when. Times are in seconds.
"""
MEMBERS = {
    "checkpoint": ("save", "latest", "load", "Saved"),
    "sharded": ("keep", "load"),
    "events": ("Event", "from_json"),
    "data": ("on_disk", "TokenFiles", "byte_pairs", "encode_together", "BytePairs"),
    "models": (
        "MLP",
        "SmallCNN",
        "GPT",
        "build_model",
        "utilization",
        "samples_per_s",
        "save_weights",
        "chunked_loss",
    ),
}
"""What users call of the public modules."""
RETURNED = {"Rank": "worker.context", "End": "shared.outcome"}
"""Types that public functions return and that have no public name."""
GROUPS = {
    "Run a job": ("run", "submit", "Run", "sweep", "main", "Result", "End", "events", "Job"),
    "Inside a job": (
        "fit",
        "Recoverable",
        "rank",
        "Rank",
        "report",
        "mesh",
        "models",
        "data",
        "accuracy",
        "sum_over_ranks",
        "process_set",
    ),
    "Keep a state": ("checkpoint", "sharded"),
    "Errors": (
        "RaydistError",
        "ConfigError",
        "NonFiniteError",
        "LaunchError",
        "RunFailed",
        "Stopped",
    ),
}
Node = ast.FunctionDef | ast.ClassDef


@cache
def source(module: str) -> ast.Module:
    """Return the syntax tree of a module below `raydist.`."""
    path = ROOT / "raydist" / module.replace(".", "/")
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def definition(module: str, name: str) -> Node:
    """Return a class or function of a module, or of the module from which it is imported; the last
    of several overloads."""
    nodes = [node for node in source(module).body if isinstance(node, Node) and node.name == name]
    if nodes:
        return nodes[-1]
    (origin,) = [
        node.module
        for node in source(module).body
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
    ]
    assert origin is not None, name
    return definition(origin.removeprefix("raydist."), name)


def text(node: Node | ast.Module) -> str:
    """Its docstring; of a module without the side at the end of the first line."""
    docstring = ast.get_docstring(node)
    assert docstring, f"{getattr(node, 'name', node)} has no docstring"
    return re.sub(
        r" \((rank side|either side|driver|pure|actor)\)$",
        "",
        docstring,
        count=1,
        flags=re.MULTILINE,
    )


def signature(name: str, node: Node) -> str:
    """As in the source, on one line, or with an argument to a line."""
    if isinstance(node, ast.ClassDef):
        arguments = [
            part
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        ]
        if not arguments or any(ast.unparse(base).endswith("Error") for base in node.bases):
            return f"class {name}"
        function = arguments[0]
    else:
        function = node
    own = [part for part in _arguments(function.args) if part != "self"]
    returns = (
        f" -> {ast.unparse(function.returns)}" if function.returns and function is node else ""
    )
    line = f"{name}({', '.join(own)}){returns}"
    return (
        line
        if len(line) <= 110
        else f"{name}(\n" + "".join(f"    {part},\n" for part in own) + f"){returns}"
    )


def _arguments(all_of: ast.arguments) -> Iterator[str]:
    plain: list[ast.expr | None] = [None] * (len(all_of.args) - len(all_of.defaults))
    yield from (
        _argument(*pair) for pair in zip(all_of.args, [*plain, *all_of.defaults], strict=True)
    )
    if all_of.vararg or all_of.kwonlyargs:
        yield "*" + (_argument(all_of.vararg) if all_of.vararg else "")
    yield from (
        _argument(*pair) for pair in zip(all_of.kwonlyargs, all_of.kw_defaults, strict=True)
    )
    if all_of.kwarg:
        yield "**" + _argument(all_of.kwarg)


def _argument(one: ast.arg, default: ast.expr | None = None) -> str:
    text = f"{one.arg}: {ast.unparse(one.annotation)}" if one.annotation else one.arg
    return text if default is None else f"{text} = {ast.unparse(default)}"


def fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the public fields and properties of a class, each with its own text."""
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            docstring = after.value if isinstance(after, ast.Expr) else None
            doc = (
                inspect.cleandoc(docstring.value)
                if isinstance(docstring, ast.Constant) and isinstance(docstring.value, str)
                else ""
            )
            yield _field(part.target.id, ast.unparse(part.annotation), doc)
        elif isinstance(part, ast.FunctionDef) and any(
            "property" in ast.unparse(d) for d in part.decorator_list
        ):
            kind = ast.unparse(part.returns) if part.returns else "Any"
            yield _field(part.name, kind, ast.get_docstring(part) or "")


def _field(name: str, kind: str, doc: str) -> str:
    return f"- `{name}`: `{kind}`" + (f". {' '.join(doc.split())}" if doc else "")


def entry(shown: str, module: str, name: str, level: int = 3) -> str:
    """Return the entry of a name: heading, signature, docstring, fields."""
    node = definition(module, name)
    lines = [
        f"{'#' * level} {shown}",
        "",
        "```python",
        signature(shown, node),
        "```",
        "",
        text(node),
    ]
    # the fields of Job are the settings, those of an error are in its text
    if (
        isinstance(node, ast.ClassDef)
        and name in ("Result", "Saved", *RETURNED)
        and (own := list(fields(node)))
    ):
        lines += ["", *own]
    if name == "Job":
        lines += ["", "Its fields are the settings: `raydist train --help` lists them."]
    return "\n".join(lines) + "\n"


def section(name: str) -> str:
    """Return the section of a public name; that of a module has its members too."""
    if name in RETURNED:
        return entry(name, RETURNED[name], name)
    module = raydist._HOME[name]
    if name not in MEMBERS:
        return entry(f"raydist.{name}", module, name)
    members = [entry(f"raydist.{name}.{each}", module, each, level=4) for each in MEMBERS[name]]
    return "\n".join([f"### raydist.{name}\n\n{text(source(module))}\n", *members])


def page() -> str:
    """docs/api.md as it should be."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", *map(section, names)]
    return "\n".join(parts)


def test_the_page_is_that_of_the_docstrings() -> None:
    assert PAGE.read_text() == page(), (
        "docs/api.md is not what the docstrings say: python -m tests.test_api writes it"
    )


def test_every_public_name_is_on_it() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(name for name in listed if name not in RETURNED) == raydist.__all__


@pytest.mark.parametrize(("module", "names"), MEMBERS.items())
def test_members_are_those_of_the_module(module: str, names: tuple[str, ...]) -> None:
    value = getattr(raydist, module)
    assert all(hasattr(value, name) for name in names)
    assert set(getattr(value, "__all__", names)) == set(names)


@pytest.mark.parametrize("name", ["run", "fit", "main", "report", "process_set", "accuracy"])
def test_a_docstring_names_every_argument(name: str) -> None:
    node = definition(raydist._HOME[name], name)
    assert isinstance(node, ast.FunctionDef)
    for each in (
        *node.args.args,
        *node.args.kwonlyargs,
        *filter(None, (node.args.vararg, node.args.kwarg)),
    ):
        assert f"`{each.arg}`" in text(node), f"raydist.{name} does not say what {each.arg} is"


if __name__ == "__main__":
    PAGE.write_text(page())
