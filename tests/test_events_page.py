"""docs/events.md is made of the classes in shared/kinds.py, and of nothing else.

`python -m tests.test_events_page` writes the page anew.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import get_args

from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.outcome import EndKind
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "events.md"
HEAD = """# Events

Everything that happens in a run is an event: a line of JSON in `events.jsonl` in the run folder, and
an object for `raydist.run(…, on_event=f)` and `Run.events()`. Each kind has a class of
`raydist.events`; [jobs](jobs.md#from-python) has an example. Without raydist:

    jq -c 'select(.kind == "report" and .rank == 0) | [.step, .values.loss]' runs/mine/*/events.jsonl

Every event has `t`, seconds since the epoch on the driver's clock, and `kind`. The other fields
depend on the kind. An optional field may be absent from the JSON; the object then has its default.
A newer raydist may write further kinds and fields: a reader leaves out what it does not know, and
gets events of unknown kinds as `events.Other`.

In a run of weeks the file does not have every report; `on_event` gets all.
`python -m tests.test_events_page` writes this page.
"""
BASES = (kinds.OfRank, kinds.HasSlots, kinds.HasPlan, kinds.StartsAttempt)
"""The classes that a program may match on to have several kinds."""


def classes() -> dict[str, ast.ClassDef]:
    """The classes of the file, in their order."""
    tree = ast.parse(inspect.getsource(kinds))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def rows(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """(name, type, text) of the fields of a class itself."""
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            told = after.value if isinstance(after, ast.Expr) else None
            text = told.value if isinstance(told, ast.Constant) else ""
            yield part.target.id, ast.unparse(part.annotation), " ".join(str(text).split())


def fields(made: type[Event]) -> dict[str, tuple[str, str]]:
    """By name, (type, text) of all fields but `t`: those of the bases first."""
    found: dict[str, tuple[str, str]] = {}
    for each in reversed(made.__mro__):
        if issubclass(each, Event) and each is not Event:
            for name, kind, text in rows(classes()[each.__name__]):
                found[name] = kind, text or found.get(name, ("", ""))[1]
    return found


def cell(text: str) -> str:
    """The text as one cell of a table."""
    return text.replace("|", "\\|")


def section(made: type[Event]) -> Iterator[str]:
    """One kind: what it means, and its fields."""
    text = " ".join(inspect.cleandoc(made.__doc__ or "").split())
    yield from ("", f"### {made.kind}", "", f"`events.{made.__name__}`: {text}", "")
    yield from ("| field | type | |", "|---|---|---|")
    for name, (kind, told) in fields(made).items():
        shown = kind.replace("SlotJson", "dict").replace("SpareJson", "dict")
        optional = "" if name in made._required else ", optional"
        told = told if told.endswith((".", "")) else f"{told}."
        yield f"| `{name}` | `{cell(shown.replace('SlowRank', 'dict'))}`{optional} | {cell(told)} |"


def page() -> str:
    """The whole page."""
    shown = [kinds.KINDS[each] for each in sorted(kinds.KINDS)]
    shown = [each for each in shown if not issubclass(each, kinds.RankRequest)]
    lines = [HEAD, "## Several kinds at once", "", "| class | its kinds | |", "|---|---|---|"]
    for base in BASES:
        names = ", ".join(f"`{each.kind}`" for each in shown if issubclass(each, base))
        text = " ".join(inspect.cleandoc(base.__doc__ or "").split())
        lines.append(f"| `events.{base.__name__}` | {names} | {text} |")
    lines += ["", "## Every kind"]
    return "\n".join([*lines, *(line for each in shown for line in section(each)), ""])


def test_the_page_is_that_of_the_classes() -> None:
    assert PAGE.read_text() == page(), "python -m tests.test_events_page writes it anew"


def test_every_way_to_end_is_told() -> None:
    _, told = fields(kinds.Ended)["how"]
    assert {*get_args(EndKind)} <= {*re.findall(r"\w+", told)}


def test_every_class_has_a_text() -> None:
    assert [name for name, node in classes().items() if not ast.get_docstring(node)] == []


if __name__ == "__main__":
    PAGE.write_text(page())
