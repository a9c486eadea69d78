"""What axe-core finds on the pages: the rules of WCAG that a program can check, by size and colours."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.watch.web.run_note import RunNote, write_note
from tests.browser import Browser, needs_chromium
from tests.records import event
from tests.scenarios.test_watch_page import DRAWN
from tests.watch.test_web_controls import write_run
from tests.watch.test_web_model import CAUSE
from tests.watch.test_web_nodes import load
from tests.watch.test_web_sweep import record, sweep_json
from tests.watch.test_web_tabs import write_run as write_running

AXE = find_spec("axe_core_python")
pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.skipif(AXE is None, reason="no axe-core-python on this machine"),
]
VIOLATIONS = """axe.run().then(({violations}) => violations.flatMap(({id, nodes}) =>
    nodes.map((node) => `${id}: ${node.html.slice(0, 200)} ${node.failureSummary}`)))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: two that have finished, one that hung, a sweep."""
    folder = tmp_path_factory.mktemp("axe")
    runs = folder / "runs/job"
    write_run(runs / "one", 60, "0.1")
    write_run(runs / "two", 50, "0.01")
    with Events(write_running(runs / "three", "three") / "events.jsonl") as events:
        for sent in (0, 9000):
            events.add(kinds.Nodes(nodes={f"n{n}": load(n / 9, sent, 8) for n in range(2)}))
        events.add(kinds.Saved(rank=0, step=9, path=str(runs / "three/logs"), s=0.25))
        events.add(kinds.Saved(rank=0, step=7, path="/nowhere", s=0.25))
        events.add(kinds.Hang(text="rank 1 sleeps", ranks=[1], certain=False, s=9.0))
        events.add(event("failure", cause=CAUSE, text="it hung", reason="it waited"))
        events.add(kinds.Result(status="failed", failure="rank 1 on h: hung", metrics={}))
    write_note(runs / "three", RunNote("the first one with <b>8</b> GPUs", ["baseline", "sgd"]))
    trials = [record(n, "finished", {"loss": n / 10}, lr=str(n), depth=str(n)) for n in range(3)]
    sweep = sweep_json(runs / "many", trials, {"lr": "0,1,2", "depth": "0,1,2"}, best=[0])
    for n in range(3):
        write_running(sweep / str(n), f"trial {n}")
    return folder


def violations(browser: Browser) -> Any:
    """Return what axe-core finds, on a large screen and a small one, light and dark."""
    assert AXE is not None
    assert AXE.origin is not None
    axe = Path(AXE.origin).with_name("axe.min.js").read_text(encoding="utf-8")
    browser.value(f"{axe}\n; true")
    found = []
    for width, dark in itertools.product((1280, 400), (False, True)):
        browser.resize(width, 1000)
        browser.set_dark(dark)
        found += [
            f"{width} {'dark' if dark else 'light'} {each}" for each in browser.value(VIOLATIONS)
        ]
    return found


@pytest.mark.parametrize(
    ("address", "shows"),
    [
        ("", "document.querySelectorAll('#runs tbody tr').length == 4"),
        (
            "?run=one&with=two&with=three",  # lines of three colours
            "raydist.charts.lr.plot.data.length == 4"
            " && document.querySelector('#settings tbody tr')"
            " && document.querySelectorAll('#runs tbody tr').length == 4",
        ),
        (
            "?run=three",
            f"{DRAWN} && document.querySelector('#failures article')"
            " && document.body.dataset.nodes > 0 && document.querySelector('#unsized').innerText",
        ),
        ("sweep.html?sweep=many", f"{DRAWN} && document.querySelector('#parallel polyline')"),
    ],
    ids=["list", "run", "failed", "sweep"],
)
def test_axe_finds_nothing(browser: Browser, link: str, address: str, shows: str) -> None:
    browser.open(link + address)
    browser.wait_until(shows)
    assert violations(browser) == []
