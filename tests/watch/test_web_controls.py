"""What a person sets on a run's page, in a real browser: which curves, how, as CSV, with which other
runs and their settings; and the list of runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from raydist.shared import kinds
from raydist.tools.watch import main
from raydist.watch.web.saved_settings import CONFIG, OVERRIDES
from tests.browser import PATIENCE_S, Browser, needs_chromium
from tests.records import event
from tests.scenarios.test_watch_page import assert_only_local, status_of, watching
from tests.waiting import wait_until

pytestmark = [needs_chromium, pytest.mark.slow]
STEPS = 2000
SPIKE = 101.0
TABLE = "[...document.querySelectorAll('#settings tbody tr')].map((row) => [...row.cells].map((one) => one.innerText).join())"
VISIBLE = "[...document.querySelectorAll('figure')].filter((one) => one.checkVisibility())"


def values(step: int) -> dict[str, float]:
    """Return what a run reports: spikes, a sign, no positive value, and a group."""
    rare = {"eval/accuracy": step / STEPS} if step % 100 == 0 else {}
    return {
        "train/loss": SPIKE if step % 97 == 0 else 1.0,
        "train/gain": step - 10.0,
        "train/debt": -1.0 * step,
        "lr": 0.1,
        **rare,
    }


def write_run(folder: Path, steps: int, lr: str, status: str = "finished") -> None:
    """Write a run of one rank that has ended, one step a second."""
    (folder / ".hydra").mkdir(parents=True)
    settings = f"name: <b>job</b>\noptim:\n  name: sgd\n  lr: {lr}\ndir: {folder}\n"
    (folder / CONFIG).write_text(settings)
    (folder / OVERRIDES).write_text(f"- optim.lr={lr}\n")
    slots = [{"rank": 0, "host": "h", "ip": "10.0.0.1", "node": "n"}]
    events = [
        event("run", name="job", dir=str(folder), target="x", pages=0),
        event("plan", backend="gloo", world_size=1, slots=slots),
        *(kinds.Report(rank=0, step=step, values=values(step)) for step in range(1, steps + 1)),
        kinds.Result(
            status=status,
            metrics={"train/gain": steps - 10.0},
            failure="it <i>broke</i>" if status == "failed" else "",
        ),
    ]
    lines = [json.dumps({**each.to_json(), "t": 1.7e9 + n}) for n, each in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


class Page(NamedTuple):
    folder: Path
    link: str
    browser: Browser

    def open(self, link: str = "") -> None:
        self.browser.open(link or f"{self.link}?run=one")
        # all of it: the page draws what has come so far
        self.browser.wait_until(f"raydist?.charts.lr?.plot.data[0].at(-1) == {STEPS}")

    def set(self, where: str, text: str | bool) -> None:
        """Type into a field, or tick it, as a person does."""
        box = f"document.querySelector({json.dumps(where)})"
        to = "checked" if isinstance(text, bool) else "value"
        self.browser.value(f"void ({box}.{to} = {json.dumps(text)})")
        for kind in ("input", "change"):
            self.browser.value(f"{box}.dispatchEvent(new Event('{kind}', {{bubbles: true}}))")

    def chart(self, name: str, what: str) -> Any:
        return self.browser.value(f"raydist.charts[{json.dumps(name)}].{what}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("curves")
    runs = folder / "runs/job"
    write_run(runs / "one", STEPS, "0.1")
    write_run(runs / "two", 50, "0.01")
    write_run(runs / "three", 300, "0.5", "failed")
    with watching(folder, "runs/job") as link, Browser() as browser:
        # Its server then has all points, so that a page gets a thinned curve. On a busy machine a
        # page gets what was read so far, and then each further point.
        assert status_of(f"{link}curves?run=one")[0] == 200
        yield Page(folder, link, browser)


def test_charts_are_found_by_name_and_closed_by_group(page: Page) -> None:
    page.open()
    browser = page.browser
    groups = "[...document.querySelectorAll('#charts details')].map((one) => one.dataset.group)"
    assert browser.value(groups) == ["eval", "train", ""]
    shown = f"{VISIBLE}.map((one) => one.dataset.name)"
    assert browser.value(shown)[:2] == ["eval/accuracy", "train/debt"]
    for typed, names in (
        ("TRAIN/", ["train/debt", "train/gain", "train/loss"]),
        ("^l|acc", ["eval/accuracy", "lr"]),
        ("(", []),
    ):
        page.set("#find", typed)
        browser.wait_until(
            f"JSON.stringify({shown}) == {json.dumps(json.dumps(names, separators=(',', ':')))}"
        )
        assert browser.text("#none") == ("" if names else "no curve has such a name")
    page.set("#find", "")
    browser.value("document.querySelector('#charts summary').click()")
    browser.wait_until(f"!{shown}.includes('eval/accuracy') && {shown}.includes('lr')")
    assert_only_local(browser)


def test_a_smoothed_curve_is_a_mean_and_a_logarithmic_one_is_above_zero(page: Page) -> None:
    page.open()
    browser = page.browser
    assert page.chart("train/loss", "plot.data.length") == 2
    page.set("#smoothing", "0.9")
    browser.wait_until("raydist.charts['train/loss'].plot.data.length == 3")
    assert page.chart("train/loss", "plot.data[0].length") < STEPS
    raw, smooth = page.chart("train/loss", "plot.data.slice(1)")
    assert max(raw) == SPIKE
    mean = 1 + (SPIKE - 1) / 97
    assert (
        mean / 1.5 < sum(smooth[len(smooth) // 2 :]) / (len(smooth) - len(smooth) // 2) < mean * 1.5
    )
    assert page.chart("lr", "plot.data[2].every((value) => Math.abs(value - 0.1) < 1e-9)")
    assert page.chart("eval/accuracy", "plot.data[2]") == pytest.approx(  # rare points: as they are
        page.chart("eval/accuracy", "plot.data[1]"), abs=0.02
    )
    browser.value("document.querySelector('[data-name=lr] div').focus()")
    browser.press("+")
    scale = "(({ min, max }) => [min, max])(raydist.charts.lr.plot.scales.x)"
    browser.wait_until(f"{scale}[1] - {scale}[0] < {0.6 * STEPS}")
    zoomed = browser.value(scale)
    page.set("#logarithmic", True)
    browser.wait_until("raydist.charts['train/loss'].plot.scales.y.distr == 3")
    browser.wait_until(f"{scale}.join() == '{','.join(f'{one:g}' for one in zoomed)}'")
    assert page.chart("train/debt", "plot.scales.y.distr") == 1  # nothing to show on such an axis
    assert min(one for one in page.chart("train/gain", "plot.data[1]") if one is not None) > 0
    page.set("#logarithmic", False)
    page.set("#smoothing", "0")
    browser.wait_until("raydist.charts['train/loss'].plot.data.length == 2")
    assert_only_local(browser)


def test_other_runs_in_the_same_charts_stay_in_the_address(page: Page) -> None:
    page.open()
    browser = page.browser
    browser.wait_until("document.querySelectorAll('#other option').length == 3")
    ends = "raydist.charts['train/gain'].plot.data.slice(1).map((one) => Math.max(...one.filter((v) => v !== undefined)))"
    for run in ("two", "three"):
        page.set("#other", run)
        browser.wait_until(f"document.querySelector('#others').innerText.includes('{run}')")
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},40,290'")
    page.open(browser.value("location.href"))
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},40,290'")
    browser.value("document.querySelector('#others button').click()")
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},290'")
    assert browser.value("location.search") == "?run=one&with=three"
    assert_only_local(browser)


def test_a_curve_as_csv_has_every_step_and_a_copy_has_what_it_shows(page: Page) -> None:
    browser, folder = page.browser, page.folder
    argv = [sys.executable, "-m", "raydist.tools.watch", "runs/job/one", "--export", "copy.html"]
    subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for name, link in (("live", ""), ("copy", f"file://{folder}/copy.html")):
        browser.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder / name)
        )
        page.open(link)
        browser.value("document.querySelector('[data-name=\"train/gain\"] button').click()")
        file = folder / name / "job-train_gain.csv"
        wait_until(file.exists, "a file", PATIENCE_S)
        wait_until(lambda file=file: file.read_text().endswith("\n"), "its end", PATIENCE_S)  # type: ignore[misc]
        head, *rows = file.read_text().splitlines()
        assert (head, rows[0], rows[-1]) == (
            "step,time,value",
            rows[0] if name == "copy" else "1,1700000002.0,-9.0",
            rows[-1] if name == "copy" else f"{STEPS},{1.7e9 + STEPS + 1},{STEPS - 10.0}",
        )
        assert len(rows) == STEPS if name == "live" else 300 < len(rows) < STEPS
        assert [float(row.split(",")[2]) for row in (rows[0], rows[-1])] == [-9, STEPS - 10]
        browser.wait_until(f"{TABLE}.join().includes('optim.lr,0.1')")
    assert_only_local(browser)


def test_a_copy_has_the_other_runs_that_were_named(page: Page) -> None:
    browser, folder = page.browser, page.folder
    shutil.copytree(folder / "runs/job/three", folder / "elsewhere/four")
    words = ["--with", "two", "--with", "elsewhere/four", "--export", "both.html"]
    argv = [sys.executable, "-m", "raydist.tools.watch", "runs/job/one", *words]
    subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    page.open(f"file://{folder}/both.html")
    ends = "raydist.charts['train/gain'].plot.data.slice(1).map((one) => Math.max(...one.filter((v) => v !== undefined)))"
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},40,290'")
    browser.wait_until(f"{TABLE}.join('|') == 'optim.lr,0.1,0.01,0.5'")
    browser.value("document.querySelector('#others button').click()")
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},290'")
    page.set("#other", "two")
    browser.wait_until(f"{ends}.join() == '{STEPS - 10},290,40'")
    assert_only_local(browser)


def test_a_page_begins_with_the_other_runs_that_were_named(page: Page) -> None:
    with watching(page.folder, "runs/job/one", "--with", "runs/job/two") as link:
        page.open(link)
        page.browser.wait_until("raydist.charts.lr.plot.data.length == 3")
        assert page.browser.value("location.search") == "?with=two"
        page.browser.open("about:blank")  # before its server ends


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["runs/job/one", "--with", "tow"], "--with two"),
        (["runs/job/one", "--with", "one"], "that is the run itself"),
        (["runs/job", "--with", "one"], "type a run as RUN"),
        (["runs/job/one", *(f"--with=r{n}" for n in range(7))], "at most 6 other runs"),
    ],
    ids=["unknown", "itself", "list", "many"],
)
def test_another_run_that_cannot_be_drawn_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_run(tmp_path / "runs/job" / name, 1, "0.1")
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_settings_and_how_they_differ_from_another_run(page: Page) -> None:
    browser = page.browser
    page.open(f"{page.link}?run=one&with=two")
    browser.wait_until(f"{TABLE}.join('|') == 'optim.lr,0.1,0.01'")
    assert browser.text("#overrides") == "optim.lr=0.1"
    page.set("#differing", False)
    browser.wait_until(f"{TABLE}.length == 4")
    assert browser.value(TABLE)[0] == "name,<b>job</b>,<b>job</b>"
    page.set("#setting", "SGD")
    browser.wait_until(f"{TABLE}.join('|') == 'optim.name,sgd,sgd'")
    page.set("#differing", True)
    browser.wait_until("document.querySelector('#same').innerText.includes('no setting has')")
    assert_only_local(browser)


def test_a_request_that_breaks_off_is_made_again(page: Page) -> None:
    """As Chromium breaks them off when the machine's network changes."""
    first_fails = """const real = fetch, seen = new Set();
        window.fetch = (address) => seen.has(address) ? real(address)
            : (seen.add(address), Promise.reject(new TypeError("Failed to fetch")));"""
    browser = page.browser
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=first_fails)
    try:
        page.open(f"{page.link}?run=one&with=two")
        browser.wait_until("raydist.charts.lr.plot.data.length == 3")
        browser.wait_until(f"{TABLE}.join('|') == 'optim.lr,0.1,0.01'")
        browser.wait_until("document.querySelectorAll('#runs tbody tr').length == 3")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    assert_only_local(browser)


def test_the_list_of_runs_is_sorted_filtered_and_compared(page: Page) -> None:
    browser = page.browser
    browser.open(page.link)
    names = "[...document.querySelectorAll('#runs tbody a')].map((one) => one.innerText).join()"
    browser.wait_until("document.querySelectorAll('#runs tbody tr').length == 3")
    assert {"train/gain", "optim.lr", "result"} <= set(browser.text("#runs thead").split())
    gain = "[...document.querySelectorAll('#runs th button')].find((one) => one.innerText == 'train/gain')"
    for order in ("two,three,one", "one,three,two"):
        browser.value(f"{gain}.click()")
        browser.wait_until(f"{names} == '{order}'")
        assert browser.value(f"document.activeElement === {gain}")
    for typed, found in (
        ("lr<0.2 train/gain>100", "one"),
        ("gain>=40 SGD", ""),
        ("optim.lr=0.01", "two"),
        ("it <i>broke", "three"),
        ("", "one,three,two"),
    ):
        page.set("#wanted", typed)
        browser.wait_until(f"{names} == '{found}'")
    page.set("#status-wanted", "failed")
    browser.wait_until(f"{names} == 'three'")
    page.set("#status-wanted", "")
    page.set("#columns input[value='optim.lr']", False)
    browser.wait_until("!document.querySelector('#runs thead').innerText.includes('optim.lr')")
    for run in ("three", "two"):
        browser.value(f"document.querySelector('#runs input[value={run}]').click()")
    browser.value("document.querySelector('#compare').click()")
    browser.wait_until("location.search == '?run=three&with=two'")
    browser.wait_until("raydist.charts?.lr?.plot.data.length == 3")
    assert_only_local(browser)


def test_another_run_that_continues_is_read_again_where_it_stands(
    page: Page, tmp_path: Path
) -> None:
    """Its charts are the same ones, with the focus of whoever uses them."""
    runs, browser = tmp_path / "runs/job", page.browser
    write_run(runs / "one", 100, "0.1")
    write_run(runs / "two", 50, "0.1")
    with watching(tmp_path, "runs/job") as link:
        browser.open(f"{link}?run=one&with=two")
        two = "raydist.charts.lr.plot.data[2].filter((value) => value !== undefined).length"
        browser.wait_until(f"{two} == 50")
        browser.wait_until("document.querySelectorAll('#runs tbody tr').length == 2")
        browser.value("void (window.held = document.querySelector('[data-name=lr] button'))")
        browser.value("window.held.focus()")
        browser.new_tab("about:blank")
        with (runs / "two/events.jsonl").open("a") as file:
            more = kinds.Report(rank=0, step=51, values=values(51))
            file.write(json.dumps({**more.to_json(), "t": 1.7e9 + 53}) + "\n")
        browser.show_tab(0)
        browser.wait_until(f"{two} == 51")
        assert browser.value("document.activeElement === window.held")
        assert_only_local(browser)
