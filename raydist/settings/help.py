"""`raydist --help`: every group and its choices; each setting's type, default, docstring. (driver)

The docstring of a setting is read from the source of config.py.
"""

from __future__ import annotations

import ast
import functools
import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from raydist.settings import config
from raydist.settings.choices import torchvision_models
from raydist.settings.overrides import SETTINGS

if TYPE_CHECKING:
    from raydist.settings.compose import Loader

BEGINNING = """\
raydist runs a training program on every GPU of a Ray cluster.

    raydist train [FLAG …] [GROUP=CHOICE …] [SETTING=VALUE …]

    raydist train                                               the digits job on this machine
    raydist train scale=2x8 backend=nccl job=train.py           your file on 2 nodes with 8 GPUs each
    raydist train scale=2x8 script=train.py args='--lr 0.1'     a program that runs under torchrun, unmodified
    raydist train --multirun optim.lr=0.1,0.01 scale=1x1,1x2
"""
ALSO = {
    "job": "path/to/file.py, path/to/file.py:function, package.module:function, any file in ./jobs",
    "model": "any of torchvision's {models} image models, as in model=resnet18",
    "optim": "any class of torch.optim.Optimizer, as in optim=torch.optim.NAdam",
    "scale": "NODESxRANKS, as in scale=2x8; MIN..MAX nodes, as in scale=2..8x8",
}
"""What a group accepts besides the files in conf/."""


def manual(loader: Loader, flags: Sequence[tuple[str, str]]) -> str:
    """Return the whole help text. `flags`: each flag with its help."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines = [BEGINNING, "Flags", *columns(flags, width), "", "Groups"]
    lines += [*columns(list(config_groups(loader)), width), "", "Settings, each as NAME=VALUE"]
    for part, entries in by_part().items():
        lines += ["", *([f"  {part}: {texts()[part]}"] if part else [])]
        for name, field in entries:
            lines.append(f"    {name}  ({type_text(field)} = {default_text(field)})")
            lines += textwrap.wrap(
                texts()[name], width, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    return "\n".join(lines)


def columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield the lines of a table with two columns, the right one wrapped."""
    left = max(len(name) for name, _ in rows) + 4
    for name, text in rows:
        yield from textwrap.wrap(
            text, width, initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left
        )


def config_groups(loader: Loader) -> Iterator[tuple[str, str]]:
    """Yield each group with the choices that have a file, and what else it accepts."""
    files = [source for source in loader.get_sources() if source.scheme() == "file"]
    for group in sorted(loader.groups):
        if group.partition("/")[0] == "hydra":
            continue
        names = {
            name for source in files if source.is_group(group) for name in source.list(group, None)
        }
        also = [ALSO[group].format(models=len(torchvision_models()))] if group in ALSO else []
        yield f"{group}=", "; ".join([", ".join(sorted(names)), *also])


def by_part() -> dict[str, list[tuple[str, Field[Any]]]]:
    """Return the settings by the first part of their name, those without a part first."""
    parts: dict[str, list[tuple[str, Field[Any]]]] = {"": []}
    for name, field in SETTINGS.items():
        parts.setdefault(name.partition(".")[0] if "." in name else "", []).append((name, field))
    return parts


def type_text(field: Field[Any]) -> str:
    """Return the type of a setting, or its values if there are only a few."""
    values = (
        each if isinstance(each, str) else json.dumps(each)
        for each in field.metadata.get("choices", ())
    )
    return "|".join(values) or str(field.type).replace(" | None", " or null")


def default_text(field: Field[Any]) -> str:
    """Return the default as a person would type it."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return (value or "''") if isinstance(value, str) else json.dumps(value)


@functools.cache
def texts() -> dict[str, str]:
    """Return the docstring of each setting and of each part, by full name."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    return dict(
        _texts(
            {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}, config.Job
        )
    )


def _texts(
    classes: dict[str, ast.ClassDef], kind: type, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    body, hints = classes[kind.__name__].body, get_type_hints(kind)
    for field, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        name = ast.unparse(field.target)
        if isinstance(inner := hints[name], type) and is_dataclass(inner):
            yield prefix + name, inner.__doc__ or ""
            yield from _texts(classes, inner, f"{prefix}{name}.")
        elif isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield prefix + name, " ".join(str(below.value.value).split())
