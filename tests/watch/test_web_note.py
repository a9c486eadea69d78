"""A note and tags of a run, typed with `raydist note`, on the page and in the list of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raydist.shared.record_names import NOTE
from raydist.tools.note import folder_of, main
from raydist.watch.web.run_note import RunNote, changed_note, read_note
from raydist.watch.web.runs import list_rows
from tests.browser import Browser, needs_chromium
from tests.scenarios.test_watch_page import assert_only_local, watching
from tests.watch.test_web_sweep import record, sweep_json
from tests.watch.test_web_tabs import write_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs named `one` and `two`, below the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_run(tmp_path / "runs/job" / name, name)
    return tmp_path / "runs/job"


@pytest.mark.parametrize(
    ("text", "add", "remove", "after"),
    [
        (None, ["b"], [], RunNote("old", ["a", "b"])),
        (None, ["a"], [], RunNote("old", ["a"])),
        ("new", [], ["a"], RunNote("new", [])),
        ("", [], [], RunNote("", ["a"])),
    ],
)
def test_what_a_command_changes(
    text: str | None, add: list[str], remove: list[str], after: RunNote
) -> None:
    assert changed_note(RunNote("old", ["a"]), text, add, remove) == after


def test_a_note_is_written_shown_changed_and_cleared(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs/job/one", "lr too <b>high</b>", "--tag", "baseline", "--tag", "sgd"]) == 0
    assert main(["runs/job/one", "--untag", "sgd", "--tag", "v1.2"]) == 0
    assert main(["runs/job/one"]) == 0
    shown = f"run   {runs / 'one'}\nnote  lr too <b>high</b>\ntags  baseline v1.2\n"
    assert capsys.readouterr().out.endswith(shown)
    assert json.loads((runs / "one" / NOTE).read_text()) == {
        "text": "lr too <b>high</b>",
        "tags": ["baseline", "v1.2"],
    }
    rows = {row["run"]: row for row in list_rows(runs)}
    assert (rows["one"]["note"], rows["one"]["tags"]) == (
        "lr too <b>high</b>",
        ["baseline", "v1.2"],
    )
    assert (rows["two"]["note"], rows["two"]["tags"]) == ("", [])
    assert main(["runs/job/one", "--clear"]) == 0
    assert sorted(path.name for path in (runs / "one").iterdir()) == ["events.jsonl", "logs"]


def test_a_sweep_has_a_note_too(runs: Path) -> None:
    sweep = sweep_json(runs / "many", [record(0, "finished", {"loss": 1.0}, lr="1")], {"lr": "1"})
    write_run(sweep / "0", "trial")
    assert main(["runs/job/many", "--tag", "grid"]) == 0
    assert {row["run"]: row["tags"] for row in list_rows(runs)}["many"] == ["grid"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs/job/on"], "runs/job/one"),
        (["runs"], "a note belongs to one run"),
        (["s3://bucket/runs/one", "text"], "type newest"),
        (["newest", "two", "words"], '"two words"'),
        (["newest", "tag=baseline"], "--tag baseline"),
        (["newest", "--tag", "two words"], "--tag two-words"),
        (["newest", "--untag", "base"], "the run has no such tag"),
        (["newest", "x" * 10_001], "at most 10000 characters"),
        (["newest", *(f"--tag=t{n}" for n in range(51))], "at most 50 tags"),
    ],
    ids=lambda each: "-".join(each)[:40] if isinstance(each, list) else "",
)
def test_a_wrong_word_is_refused(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert not list(runs.glob(f"*/{NOTE}"))


def test_a_broken_file_is_no_note(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"text": 3}', '{"text": "a", "tags": 7}'):
        (tmp_path / NOTE).write_text(text)
        assert read_note(tmp_path) == RunNote()


@needs_chromium
@pytest.mark.slow
def test_a_note_on_the_page_of_a_run_that_continues_and_in_the_list(runs: Path) -> None:
    """In the list, a row that moves keeps the focus."""

    def note(*words: str) -> None:
        argv = [sys.executable, "-m", "raydist.tools.note", *words]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)

    names = "[...document.querySelectorAll('#runs tbody a')].map((one) => one.innerText).join()"
    find = "document.querySelector('#wanted')"
    with watching(runs.parents[1], "runs/job") as link, Browser() as browser:
        browser.open(f"{link}?run=one")
        browser.wait_until("document.body.dataset.drawn > 0")
        assert browser.text("#note") == ""
        note("runs/job/one", "lr too <b>high</b>", "--tag", "baseline", "--tag", "sgd")
        browser.wait_until("document.querySelector('#note b') === null")
        browser.wait_until(
            "document.querySelector('#note').innerText == 'baselinesgdlr too <b>high</b>'"
        )
        note("runs/job/two", "--tag", "sgd")
        browser.open(link)
        browser.wait_until("document.querySelectorAll('#runs tbody tr').length == 2")
        assert {"tags", "note"} <= set(browser.text("#runs thead").split())
        for typed, found in (("tag=baseline", "one"), ("tag=SGD too", "one"), ("tag=bas", "")):
            browser.value(f"void ({find}.value = {json.dumps(typed)})")
            browser.value(f"{find}.dispatchEvent(new Event('input'))")
            browser.wait_until(f"{names} == {json.dumps(found)}")
        browser.value(f"void ({find}.value = '')")
        head = "[...document.querySelectorAll('#runs th button')].find((one) => one.innerText == 'tags')"
        for order in ("one,two", "two,one"):
            browser.value(f"{head}.click()")
            browser.wait_until(f"{names} == '{order}'")
        link_of_two = "document.querySelector('#runs a[href*=two]')"
        browser.value(f"void (window.held = {link_of_two}, window.held.focus())")
        note("runs/job/two", "--untag", "sgd", "--tag", "above")
        browser.wait_until(f"{names} == 'one,two'")  # the list is read again every ten seconds
        assert browser.value(f"document.activeElement === window.held && {link_of_two} === held")
        argv = [sys.executable, "-m", "raydist.tools.watch", "runs/job/one", "--export", "one.html"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        browser.open(f"file://{runs.parents[1]}/one.html")
        browser.wait_until("document.querySelector('#note').innerText.includes('too <b>high')")
        assert_only_local(browser)


def test_a_command_finds_runs_below_the_home_as_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAYDIST_RUNS", "~/runs")
    write_run(tmp_path / "runs/a/b", "b")
    assert folder_of("newest") == tmp_path / "runs/a/b"
