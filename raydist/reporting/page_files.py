"""Write a page for each failure into the run folder, as text and as JSON. (driver)

blame-1.txt is for people, blame-1.json for programs.
"""

from __future__ import annotations

import json
from pathlib import Path

from raydist.reporting.failures import Failure, Failures
from raydist.reporting.page import page
from raydist.shared.kinds import Event
from raydist.shared.whole_file import write_at_once


class Pages:
    """A reader of events that writes the pages.

    It writes a page when a failure is known, and again when its consequences are.
    """

    def __init__(self, folder: Path, failures: Failures) -> None:
        """Set the folder of the pages.

        `failures`: reads each event before this reader does.
        """
        self._folder = folder
        self._failures = failures

    def __call__(self, event: Event) -> None:
        if (failure := self._failures.changed_failure) is not None:
            self._write(failure)

    def _write(self, failure: Failure) -> None:
        path = self._folder / failure.page
        text = json.dumps(failure.to_json(), indent=2, default=str)
        write_at_once(path.with_suffix(".json"), f"{text}\n".encode())
        write_at_once(path, page(failure, str(self._folder)).encode())


def last_page(folder: Path) -> int:
    """Return the highest number of a page in this folder, from earlier runs; 0 without one."""
    numbers = (path.stem.partition("-")[2] for path in folder.glob("blame-*.json"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)
