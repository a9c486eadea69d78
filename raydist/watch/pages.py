"""A page for each failure, in the run folder: blame-1.txt for a person, blame-1.json for a program. (driver)"""

from __future__ import annotations

import json
from pathlib import Path

from raydist.events import Event
from raydist.failures import Failure, Failures
from raydist.watch.page import page


class Pages:
    """A reader of events. A page is written when a failure is known, and again when it is known what became of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failures = Failures()

    def __call__(self, happened: Event) -> None:
        if (failure := self._failures.add(happened)) is not None:
            self._write(failure)

    def _write(self, failure: Failure) -> None:
        path = self._folder / failure.page
        made = json.dumps(failure.to_json(), indent=2, default=str)
        path.with_suffix(".json").write_text(made + "\n", encoding="utf-8")
        path.write_text(page(failure, str(self._folder)), encoding="utf-8")


def there(folder: Path) -> int:
    """The highest number of a page in this folder: of runs that used it before."""
    found = (path.stem.partition("-")[2] for path in folder.glob("blame-*.json"))
    return max((int(number) for number in found if number.isdigit()), default=0)
