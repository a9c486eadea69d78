"""A list of runs and a sweep as files that somebody opens from a disk, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.tools.note import main as note
from raydist.tools.watch import main
from raydist.watch.web import export
from raydist.watch.web.saved_settings import CONFIG
from tests.browser import PATIENCE_S, Browser, needs_chromium
from tests.scenarios.test_watch_page import DRAWN, LOSS
from tests.waiting import wait_until
from tests.watch.test_web_sweep import record, sweep_json
from tests.watch.test_web_tabs import write_run

ROWS = "[...document.querySelectorAll('#runs tbody tr')]"
NAMES = f"{ROWS}.map((row) => row.cells[0].innerText).join()"
SECRET = "hf_this-must-not-be-in-a-page"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and a sweep of two trials, the second of which has not begun."""
    folder = tmp_path_factory.mktemp("export")
    for name, lr in (("a #1?", "0.1"), ("two", "0.01")):
        run = write_run(folder / "runs/job" / name, name, steps=20)
        (run / ".hydra").mkdir()
        (run / CONFIG).write_text(f"optim:\n  lr: {lr}\nenv:\n  HF_TOKEN: {SECRET}\n")
        answer = run / "operate/stacks-1.txt"
        answer.parent.mkdir()
        answer.write_text("all ranks wait in <b>step</b>")
        with Events(run / "events.jsonl") as events:
            told = "2 ranks in one place"
            events.add(kinds.Operated(command="stacks", text=told, file="operate/stacks-1.txt"))
            events.add(kinds.Saved(rank=0, step=20, path="/far/step-20", s=0.5))
    assert note([str(folder / "runs/job/two"), "the <i>lower</i> one", "--tag", "baseline"]) == 0
    trials = [record(0, "finished", {"loss": 0.05}, lr="1"), record(1, "waiting", {}, lr="2")]
    sweep = sweep_json(folder / "runs/job/many", trials, {"lr": "1,2"}, best=[0], state="stopped")
    write_run(sweep / "0", "trial", steps=20)
    assert note([str(sweep), "both", "--tag", "grid"]) == 0
    return folder


@pytest.fixture
def offline(tmp_path: Path, browser: Browser) -> Browser:
    """A browser without a network, whose downloads are in the test's folder."""
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.requests.clear()
    browser.errors.clear()
    return browser


def assert_only_pages(browser: Browser, folder: Path) -> None:
    """The browser has read the opened pages, and nothing else."""
    urls = {url.partition("#")[0] for url in browser.requests.values()}
    files = {
        unquote(url.removeprefix("file://")) for url in urls if url[:5] not in ("data:", "blob:")
    }
    assert files <= {str(path) for path in folder.rglob("*.html")}
    assert browser.errors == []


@needs_chromium
@pytest.mark.slow
def test_the_list_as_one_file_has_no_links(
    folder: Path, tmp_path: Path, offline: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "runs"), "--export", str(tmp_path / "list.html")]) == 0
    assert "list.html (0." in capsys.readouterr().out
    offline.open(f"file://{tmp_path}/list.html")
    offline.wait_until(f"{ROWS}.length == 3")
    assert offline.value("document.querySelectorAll('#runs tbody :is(a, input)').length") == 0
    assert offline.text("#link") == f"a copy of {folder / 'runs'}"
    head = "[...document.querySelectorAll('#runs th button')].find((one) => one.innerText == 'optim.lr')"
    for order in ("job/two,job/a #1?,job/many", "job/a #1?,job/two,job/many"):
        offline.value(f"{head}.click()")
        offline.wait_until(f"{NAMES} == {json.dumps(order)}")
    find = "document.querySelector('#wanted')"
    for typed, found in (("lr<0.05", "job/two"), ("tag=baseline", "job/two"), ("grid", "job/many")):
        offline.value(f"void ({find}.value = {json.dumps(typed)})")
        offline.value(f"{find}.dispatchEvent(new Event('input'))")
        offline.wait_until(f"{NAMES} == {json.dumps(found)}")
    assert_only_pages(offline, tmp_path)


@needs_chromium
@pytest.mark.slow
def test_a_folder_of_pages_has_all_that_the_server_shows(
    folder: Path, tmp_path: Path, offline: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "runs"), "--export", f"{tmp_path}/all/"]) == 0
    assert "all/index.html (5 pages, " in capsys.readouterr().out
    pages = {str(path.relative_to(tmp_path / "all")): path for path in tmp_path.rglob("*.html")}
    assert pages.keys() == {
        "index.html",
        *(f"runs/job/{name}.html" for name in ("a #1?", "two", "many", "many/0")),
    }
    for path in pages.values():
        assert SECRET not in path.read_text()
    offline.open(f"file://{tmp_path}/all/index.html")
    offline.wait_until(f"{ROWS}.length == 3")
    follow(offline, "job/a #1?")
    offline.wait_until(f"{DRAWN} && {LOSS}.at(-1) == 20")
    offline.value("document.querySelector('#operated button').click()")
    offline.wait_until("document.querySelector('dialog[open] pre')?.innerText.includes('<b>step')")
    assert "/far/step-20" in offline.text("#checkpoints")
    offline.value("document.querySelector('#trace').click()")
    name = "a_1_"
    trace = tmp_path / f"{name}-trace.json"
    wait_until(lambda: trace.exists() and trace.read_text().endswith("}"), "it", PATIENCE_S)
    assert "checkpoints" in trace.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    offline.value("document.querySelector('[data-name=loss] button').click()")
    csv = tmp_path / f"{name}-loss.csv"
    wait_until(lambda: csv.exists() and csv.read_text().count("\n") == 21, "it", PATIENCE_S)
    assert re.match(r"step,time,value\n1,\d+(\.\d+)?,1\n", csv.read_text())
    follow(offline, "all runs")
    offline.wait_until(f"{ROWS}.length == 3")
    follow(offline, "job/two")
    offline.wait_until(f"{DRAWN} && document.querySelector('#note')")
    assert offline.text("#note") == "baselinethe <i>lower</i> one"
    follow(offline, "all runs")
    offline.wait_until(f"{ROWS}.length == 3")
    follow(offline, "job/many")
    offline.wait_until(f"{DRAWN} && raydist.sweep?.trials.length == 2")
    assert offline.text("#note") == "gridboth"
    assert offline.value("document.querySelectorAll('#trials a').length") == 1
    follow(offline, "0")
    offline.wait_until(f"{DRAWN} && {LOSS}.at(-1) == 20")
    follow(offline, "the sweep")
    offline.wait_until(f"{DRAWN} && raydist.sweep?.trials.length == 2")
    follow(offline, "all runs")
    offline.wait_until(f"{ROWS}.length == 3")
    assert_only_pages(offline, tmp_path)


def follow(browser: Browser, text: str) -> None:
    """Click on a link, by its text."""
    links = "[...document.querySelectorAll('a')]"
    browser.value(f"{links}.find((one) => one.innerText == {json.dumps(text)}).click()")


def test_a_page_has_no_file_from_outside_of_the_run_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs/job/theirs", "theirs", steps=3)
    (tmp_path / "mine.txt").write_text(SECRET)
    with Events(run / "events.jsonl") as events:
        for file in (str(tmp_path / "mine.txt"), "../../../mine.txt"):
            events.add(kinds.Operated(command="stacks", text="theirs", file=file))
    assert main([str(run), "--export", str(tmp_path / "page.html")]) == 0
    assert SECRET not in (tmp_path / "page.html").read_text()


def test_a_trace_that_is_too_long_is_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert export.packed_trace(folder / "runs/job/two")
    monkeypatch.setattr(export, "TRACE", 100)
    assert export.packed_trace(folder / "runs/job/two") == ""
    assert export.packed_trace(tmp_path) == ""


def test_the_page_of_one_run_is_not_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder / "runs/job/two"), "--export", str(tmp_path)]) == 2
    assert f"--export {tmp_path}/run.html" in capsys.readouterr().err
    assert main([str(folder / "runs"), "--trace", str(tmp_path / "a.json")]) == 2
    assert "a trace is that of one run" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == []


def test_a_port_that_cannot_be_is_refused_with_the_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--port", "70000"]) == 2
    says = "--port 70000: must be a whole number from 0 to 65535; use --port 0"
    assert says in capsys.readouterr().err
