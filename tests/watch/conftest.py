"""One browser and one server of pages for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.scenarios.test_watch_page import watching


@pytest.fixture(scope="module")
def link(folder: Path) -> Iterator[str]:
    """The link of `raydist watch runs/job`, typed in the file's `folder`."""
    with watching(folder, "runs/job") as link:
        yield link


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser
