"""The pages in a real browser: many tabs, folders that are made anew, keys, stacks, the curves of a
sweep."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from raydist.shared import kinds
from raydist.shared.events import Events
from tests.browser import PATIENCE_S, Browser, needs_chromium
from tests.records import event
from tests.scenarios.test_watch_page import DRAWN, LOSS, assert_only_local, watching
from tests.watch.test_web_sweep import record, sweep_json

pytestmark = needs_chromium
AHEAD = "const before = Date.now; Date.now = () => before() + 3600e3;"
"""A browser whose clock is an hour ahead."""
ACCURACY = 'data: {"name":"accuracy"'
"""How a line begins that has curves of the accuracy."""


def write_run(
    folder: Path, name: str, metric: str = "loss", steps: int = 100, **facts: str
) -> Path:
    """Return the folder of a run of two ranks that still runs, with events of just now."""
    (folder / "logs").mkdir(parents=True)
    slots = [{"rank": rank, "host": "h", "ip": "10.0.0.1", "node": "n"} for rank in range(2)]
    with Events(folder / "events.jsonl") as events:
        events.add(kinds.Run(name=name, dir=str(folder), target="x", pages=0))
        events.add(event("plan", backend="gloo", world_size=2, slots=slots))
        report(events, *range(1, steps + 1), metric=metric)
    (folder / "logs/rank-0.log").write_text(f"{name} begins\n" + "a line\n" * 30)
    for file, text in facts.items():
        (folder / f"logs/rank-1.{file}").write_text(text)
    return folder


def report(events: Events, *steps: int, metric: str = "loss") -> None:
    for step in steps:
        events.add(
            kinds.Report(rank=0, step=step, values={metric: 1 / step, "accuracy": step / 1000})
        )


def see_log(browser: Browser, text: str) -> None:
    """Scroll to the log, and wait until it has this text."""
    browser.value("document.querySelector('#log').scrollIntoView()")
    browser.wait_until(f"document.querySelector('#log').innerText.includes({json.dumps(text)})")


def streams(link: str) -> int:
    """Return the connections that the server of a page holds."""
    port = int(link.split(":")[2].split("/")[0])
    (server,) = [
        each for each in psutil.Process().children() if "raydist.tools.watch" in each.cmdline()
    ]
    connections = server.net_connections("tcp")
    return sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in connections)


def test_seven_tabs_each_with_a_log(tmp_path: Path) -> None:
    """A browser opens six connections to a server. The title of a hidden tab follows its run all
    the same."""
    run = write_run(tmp_path / "runs/job/one", "one")
    with (
        watching(tmp_path, str(run)) as link,
        Browser() as browser,
        Events(run / "events.jsonl") as events,
    ):
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=AHEAD)
        for number in range(7):
            if number:
                browser.new_tab(link)
            else:
                browser.open(link)
            browser.wait_until(DRAWN)
            see_log(browser, "one begins")
            assert browser.value("fetch('search?text=BEGINS').then((reply) => reply.json())")[
                "lines"
            ] == [[0, 1, "one begins"]]
        assert streams(link) <= 6
        browser.value("document.querySelector('#follow').click()")
        browser.value("document.querySelector('#log').scrollTop = 7")
        report(events, 101, 102)
        with (run / "logs/rank-0.log").open("a") as log:
            log.write("one goes on\n")
        browser.show_tab(0)
        browser.wait_until(f"{LOSS}.at(-1) == 102")
        see_log(browser, "one goes on")
        assert (
            browser.value("document.querySelector('#log').innerText.split('one begins').length")
            == 2
        )
        assert browser.text("#status") == "running"  # in spite of its clock
        assert_only_local(browser)
        with (run / "logs/rank-0.log").open("a") as log:
            log.write("one ends\n")
        browser.show_tab(6)
        browser.wait_until(
            "document.querySelector('#log').innerText.endsWith('one goes on\\none ends\\n')"
        )
        assert (
            browser.value("document.querySelector('#log').innerText.split('one begins').length")
            == 2
        )
        assert (
            browser.value("document.querySelector('#log').scrollTop") == 7
        )  # where the reader was
        events.add(kinds.Result(status="failed", failure="it broke", metrics={}))
        browser.drive_tab(3)
        assert browser.value("document.visibilityState") == "hidden"
        browser.wait_until("document.title == 'one · failed'")


def test_a_folder_that_is_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/job/one", "old", "old_loss")
    with watching(tmp_path, str(run)) as link, Browser() as browser:
        browser.open(link)
        browser.wait_until("raydist.charts.old_loss")
        see_log(browser, "old begins")
        for name, steps in (("shorter", 50), ("longer", 300)):
            shutil.rmtree(run)
            write_run(run, name, f"{name}_loss", steps)
            browser.wait_until(f"document.title == '{name} · running'")
            browser.wait_until(f"Array.from(raydist.curves.{name}_loss.steps).at(-1) == {steps}")
            browser.wait_until(
                f"Object.keys(raydist.charts).sort().join() == 'accuracy,{name}_loss'"
            )
            see_log(browser, f"{name} begins")
            assert browser.value("raydist.curves.accuracy.steps.length") == steps
            assert (
                browser.value("document.querySelector('#log').innerText.split('begins').length")
                == 2
            )
        assert_only_local(browser)


def test_keys_can_be_switched_off_for_all_pages(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/job/one", "one")
    by = "document.querySelector('[name=by]:checked').value"
    with Browser() as browser:
        with watching(tmp_path, str(run)) as link:
            browser.open(link)
            browser.wait_until(DRAWN)
            browser.press("x")
            assert browser.value(by) == "time"
            browser.value("document.querySelector('#keys').click()")
            browser.value("document.activeElement.blur()")
            for key in ("x", "/", "7"):
                browser.press(key)
            assert (browser.value(by), browser.value("scrollY")) == ("time", 0)
            assert browser.value("document.activeElement.id") == ""
            browser.value("document.querySelector('[data-name=loss] div').focus()")
            browser.press("+")  # of what has the focus
            browser.wait_until(
                "(({ min, max }) => max - min < 60)(raydist.charts.loss.plot.scales.x)"
            )
        with watching(tmp_path, str(run)) as link:  # at another port
            browser.open(link)
            browser.wait_until(DRAWN)
            browser.press("x")
            assert browser.value(by) == "step"
            browser.value("document.querySelector('#keys').click()")
            browser.value("document.activeElement.blur()")
            browser.press("x")
            assert browser.value(by) == "time"


def test_the_stacks_of_a_hang_are_a_click_away(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/job/one", "one", stacks="all_reduce <here>\n", nccl="NET/IB\n")
    shown = "document.querySelector('dialog[open] pre').innerText"
    with (
        watching(tmp_path, str(run)) as link,
        Browser() as browser,
        Events(run / "events.jsonl") as events,
    ):
        browser.open(link)
        browser.wait_until("document.querySelectorAll('#ranks tbody tr').length == 2")
        events.add(kinds.Hang(text="rank 1 sleeps", ranks=[1], certain=False, s=9.0))
        browser.wait_until("document.querySelector('#ranks button[title=\"stacks of rank 1\"]')")
        browser.value("document.querySelector('#ranks button[title=\"stacks of rank 1\"]').click()")
        browser.wait_until(f"{shown} == 'all_reduce <here>\\n'")
        browser.value("document.querySelector('dialog button').click()")
        browser.value("document.querySelector('#nccl').click()")
        browser.wait_until(f"{shown}.includes('rank-0.nccl is not there: fabric.debug=true')")
        browser.value("document.querySelector('dialog button').click()")
        browser.value("document.querySelector('#rank').value = 1")
        browser.value("document.querySelector('#nccl').click()")
        browser.wait_until(f"{shown} == 'NET/IB\\n'")
        assert [error for error in browser.errors if "404" not in error] == []


def test_the_page_of_a_sweep_gets_one_curve_of_each_trial_and_then_what_is_new(
    tmp_path: Path,
) -> None:
    states = ["finished", "running", "running"]
    trials = [record(n, state, {}, lr=str(n)) for n, state in enumerate(states)]
    sweep = sweep_json(tmp_path / "runs/job/many", trials, {"lr": "0,1,2"})
    for n in range(3):
        write_run(sweep / str(n), f"trial {n}")
    data = "raydist.plot.data.map((column) => Array.from(column).at(-1))"
    with (
        watching(tmp_path, str(sweep)) as link,
        Browser() as browser,
        Events(sweep / "1/events.jsonl") as events,
    ):
        with urllib.request.urlopen(f"{link}trials?name=accuracy", timeout=PATIENCE_S) as reply:

            def news() -> dict[str, Any]:
                """Return what the next event has of the trials' curves."""
                while not (line := reply.readline().decode()).startswith(ACCURACY):
                    pass
                return dict(json.loads(line[6:])["trials"])

            found = news()
            # A busy server sends the curves that it has read so far.
            while {n: values[-1] for n, (_, values) in found.items()} != dict.fromkeys("012", 0.1):
                found |= news()
            report(events, 101)
            assert list(news()) == ["1"]
        browser.open(link)
        browser.wait_until("document.body.dataset.drawn == 3")
        assert browser.value("document.querySelector('#metric').value") == "loss"
        assert browser.value("Object.keys(raydist.curves)") == ["loss"]
        browser.value("document.querySelector('#metric').value = 'accuracy'")
        browser.value("document.querySelector('#metric').dispatchEvent(new Event('change'))")
        browser.wait_until(f"{data}[0] == 101 && {data}.includes(.101)")
        browser.new_tab("about:blank")
        report(events, 102)
        browser.show_tab(0)
        browser.wait_until(f"{data}[0] == 102 && {data}.includes(.102)")
        assert browser.value("document.querySelector('#metric').value") == "accuracy"
        assert_only_local(browser)


def test_a_screen_reader_hears_of_a_sweep_only_what_has_changed(tmp_path: Path) -> None:
    """Each new sweep.json draws the page again, up to twice a second."""

    def write(step: int, state: str = "running") -> None:
        trials = [record(n, "running", {}, step=step, lr=str(n)) for n in range(2)]
        new = sweep_json(tmp_path / "new", trials, {"lr": "0,1"}, state=state) / "sweep.json"
        new.replace(sweep / "sweep.json")

    sweep = write_run(tmp_path / "runs/job/many/0", "trial 0").parent
    write(10)
    with watching(tmp_path, str(sweep)) as link, Browser() as browser:
        browser.open(link)
        browser.wait_until("document.body.dataset.drawn == 1")
        browser.value(
            "document.querySelector('#trials tbody tr').dispatchEvent(new Event('mouseenter'))"
        )
        told = "['#link', '#chosen'].map((id) => document.querySelector(id).innerText)"
        assert browser.value(told) == ["live", "trial 0: lr=0"]
        browser.value(
            "void (window.changes = 0, document.querySelectorAll('[role=status]').forEach((region) =>"
            " new MutationObserver((seen) => { window.changes += seen.length; })"
            ".observe(region, {childList: true, subtree: true, characterData: true})))"
        )
        for step in (20, 30):
            write(step)
            browser.wait_until(f"raydist.sweep.trials.some((trial) => trial.step == {step})")
        assert browser.value("window.changes") == 0
        write(40, "finished")
        browser.wait_until("raydist.sweep.state == 'finished'")
        assert browser.value(told) == ["", "trial 0: lr=0"]
        assert browser.value("window.changes") > 0
        assert_only_local(browser)
