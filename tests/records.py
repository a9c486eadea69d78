"""Events of a run as plain JSON, as a user's own program reads them from events.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raydist.shared import kinds
from raydist.shared.events import whole_lines
from raydist.shared.kinds import Event, EventJson


def read_events(path: Path, kind: str = "") -> Iterator[EventJson]:
    """The whole lines of a file; `kind`: only events of this kind."""
    for each in whole_lines(path):
        found = json.loads(each)
        if kind in ("", found["kind"]):
            yield found


EMPTY = {"str": "", "int": 0, "float": 0.0, "bool": False, "bytes": b""}


def event(kind: str, **fields: Any) -> Event:
    """An event of this kind with these fields; other fields that it must have are empty.

    TypeError: no such event has a field of this name. An unknown kind gives an Other.
    """
    if kind not in kinds.KINDS:
        return kinds.from_json({"t": time.time(), "kind": kind, **fields})
    made = kinds.KINDS[kind]
    for each in made.__mro__:
        for name, of in vars(each).get("__annotations__", {}).items():
            if name in made._required:
                fields.setdefault(name, EMPTY.get(of.partition(" |")[0], [] if "Seq" in of else {}))
    return made(**fields)


def line(happened: Event) -> str:
    """The line of the event in events.jsonl."""
    return json.dumps(happened.to_json()) + "\n"


def changed(happened: Event, **fields: Any) -> Event:
    """The event with other values of these fields."""
    return type(happened)(**{**vars(happened), **fields})


class Seen(list[EventJson]):
    """A live reader that keeps each event as JSON."""

    def __call__(self, happened: Event) -> None:
        self.append(happened.to_json())

    def kind(self, *kinds: str) -> list[EventJson]:
        """The events of these kinds."""
        return [each for each in self if each["kind"] in kinds]
