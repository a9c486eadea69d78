"""`raydist --help`: every group with its choices, every setting with type, default and docstring. (driver)

The text under a setting is read from the source of config.py, so that it can't drift from it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from raydist import config
from raydist.words.choices import torchvision_models
from raydist.words.translate import SETTINGS

if TYPE_CHECKING:
    from raydist.words.compose import Loader

BEGINNING = """\
raydist runs a training program on every GPU of a Ray cluster.

    raydist [FLAG …] [GROUP=CHOICE …] [SETTING=VALUE …]

    raydist                                     the digits job on this machine
    raydist scale=2x8 backend=nccl job=train.py     a file of yours on 2 nodes with 8 GPUs each
    raydist scale=2x8 script=train.py args='--lr 0.1'   a program as it is, as under torchrun
    raydist --multirun optim.lr=0.1,0.01 scale=1x1,1x2
"""
ALSO = {
    "job": "path/to/file.py, path/to/file.py:function, package.module:function, any file in ./jobs",
    "model": "any of torchvision's {models} image models, as model=resnet18",
    "scale": "NODESxRANKS, as scale=2x8; LEAST..MOST nodes, as scale=2..8x8",
}
"""What a group takes besides the files in conf/."""


def manual(loader: Loader, flags: Sequence[tuple[str, str]]) -> str:
    """The whole text. `flags`: each flag with its help."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [BEGINNING, "Flags", *columns(flags, width), "", "Groups"]
    lines += [*columns(list(groups(loader)), width), "", "Settings, each as NAME=VALUE"]
    for part, entries in by_part().items():
        lines += ["", *([f"  {part}: {purpose(part)}"] if part else []), *entries_text(entries, width)]
    return "\n".join(lines)


def columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Two columns, the right one wrapped."""
    left = max(len(name) for name, _ in rows) + 4
    for name, text in rows:
        yield from textwrap.wrap(text, width, initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left)


def groups(loader: Loader) -> Iterator[tuple[str, str]]:
    """Each group with the choices that have a file, and what else it takes."""
    files = [source for source in loader.get_sources() if source.scheme() == "file"]
    for group in sorted(loader.groups):
        if group.partition("/")[0] == "hydra":
            continue
        names = {name for source in files if source.is_group(group) for name in source.list(group, None)}
        also = [ALSO[group].format(models=len(torchvision_models()))] if group in ALSO else []
        yield f"{group}=", "; ".join([", ".join(sorted(names)), *also])


def by_part() -> dict[str, list[tuple[str, Field[Any]]]]:
    """The settings under the name of their part; those of no part first."""
    parts: dict[str, list[tuple[str, Field[Any]]]] = {"": []}
    for name, field in SETTINGS.items():
        parts.setdefault(name.partition(".")[0] if "." in name else "", []).append((name, field))
    return parts


def entries_text(entries: Sequence[tuple[str, Field[Any]]], width: int) -> Iterator[str]:
    """Each setting with its type and default, and its docstring below."""
    for name, field in entries:
        yield f"    {name}  ({kind(field)} = {default(field)})"
        yield from textwrap.wrap(doc(name), width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def kind(field: Field[Any]) -> str:
    """The type, or the words that there are."""
    words = field.metadata.get("words")
    return "|".join(words) if words else str(field.type).replace(" | None", " or null")


def default(field: Field[Any]) -> str:
    """The default as one would type it."""
    if field.default is MISSING:
        assert field.default_factory is not MISSING, field.name  # all settings have a default
        return str(field.default_factory())
    match field.default:
        case None:
            return "null"
        case bool():
            return str(field.default).lower()
        case "":
            return "''"
    return str(field.default)


@functools.cache
def docs() -> dict[str, dict[str, str]]:
    """The text under each field of each dataclass of config.py, and under its own name (key "") the class's."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: {"": ast.get_docstring(node) or "", **dict(_fields(node))} for node in classes}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())


def _home(name: str) -> type:
    """The dataclass that a part of the settings is, or that a setting stands in."""
    kind: type = config.Job
    for step in name.split("."):
        inner: type = get_type_hints(kind)[step]
        if not dataclasses.is_dataclass(inner):
            break
        kind = inner
    return kind


def doc(name: str) -> str:
    """The text under one setting."""
    return docs()[_home(name).__name__].get(name.rpartition(".")[2], "")


def purpose(part: str) -> str:
    """What a part of the settings is about."""
    return docs()[_home(part).__name__][""]
