"""Who may press the buttons of a page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raydist.shared.own_path import machine_id
from raydist.watch.operate.connection import DriverAddress
from raydist.watch.web.buttons import is_same_origin, offer

HOST = "127.0.0.1:8700"
NETWORK = os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, True),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://hub"}, True),  # behind a proxy
        ({"Sec-Fetch-Site": "same-site", "Origin": f"http://{HOST}"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"Origin": f"http://{HOST}"}, True),
        ({"Origin": "http://127.0.0.1:8701"}, False),
        ({"Origin": "http://127.0.0.1"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": f"file://{HOST}"}, False),
        ({}, False),
    ],
)
def test_only_a_page_of_the_server_may_press(headers: dict[str, str], own: bool) -> None:
    assert is_same_origin(headers, HOST) == own


@pytest.mark.parametrize(
    ("here", "alive", "buttons", "shown", "why"),
    [
        (True, True, True, True, ""),
        (True, True, False, False, ""),
        (False, True, True, True, "is on far; type raydist stacks"),
        (True, False, True, False, ""),
    ],
)
def test_buttons_are_offered_where_they_do_something(
    tmp_path: Path, here: bool, alive: bool, buttons: bool, shown: bool, why: str
) -> None:
    """`here`, `alive`: whether the driver is on this machine, and was not killed."""
    machine, pid = machine_id() if here else "another", os.getpid() if alive else 2**22 + 1
    DriverAddress("raydist-0", pid, "far", machine, NETWORK, "", buttons).write(tmp_path)
    found = offer(tmp_path)
    assert found["shown"] == shown
    assert why in str(found["why"])
    assert bool(why) == bool(found["why"])


def test_a_run_that_has_ended_has_no_buttons(tmp_path: Path) -> None:
    assert offer(tmp_path) == {"shown": False, "why": ""}
