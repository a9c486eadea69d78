"""The page of real runs in a real browser: a rank is killed, then the driver; then from the folder,
and as a file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.shared.kinds import EventJson
from tests.browser import Browser, needs_chromium
from tests.programs import Program
from tests.records import event, read_events

STEPS = """
import time
import torch.distributed as dist
import raydist
from raydist import checkpoint

def job(config):
    found = checkpoint.latest()
    for step in range((found.step if found else 0) + 1, 100000):
        dist.barrier()
        time.sleep(0.02)
        print("step", step, "of rank", raydist.rank().rank, flush=True)
        raydist.report(step=step, loss=1 / step, lr=0.1)
        if step % 10 == 0:
            checkpoint.save(step, {"step": step}, {})
"""
DRAWN = "document.body.dataset.drawn > 0"
LOSS = "Array.from(raydist.curves.loss.steps)"


@contextmanager
def watching(folder: Path, *words: str) -> Iterator[str]:
    """`python -m raydist.tools.watch WORD…` in a folder; the link."""
    argv = [sys.executable, "-m", "raydist.tools.watch", *words]
    with subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            yield program.stdout.readline().split()[1]
        finally:
            program.terminate()


def status_of(url: str) -> tuple[int, bytes]:
    """Return the status and the body of an answer."""
    try:
        with urllib.request.urlopen(url, timeout=120) as reply:
            return reply.status, reply.read(100)
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def servers(program: Program) -> list[psutil.Process]:
    """Return the processes that serve the page of a run."""
    children = psutil.Process(program.process.pid).children()
    return [each for each in children if "raydist.watch.web" in each.cmdline()]


def assert_only_local(browser: Browser) -> None:
    """The page asked nobody but its server, and its scripts had nothing to complain about."""
    urls = [url for url in browser.requests.values() if not url.startswith("data:")]
    hosts = {re.sub(r"^(\w+://[^/:]*).*", r"\1", url) for url in urls}
    assert hosts <= {"http://127.0.0.1", "file://"}
    assert browser.errors == []


@needs_chromium
def test_a_run_from_its_first_step_to_the_death_of_its_driver(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    program = Program(
        tmp_path, "job=steps.py", "group=inline", "scale=1x3", "watch.page=true", "restart=some"
    )
    program.wait_until(lambda: "page  http" in program.screen, "link")
    link = re.findall(r"page  (http\S+)", program.screen)[0]
    program.wait_for_step(5)
    assert servers(program) == []  # while nobody looks there is none
    with Browser() as browser:
        browser.open(link)
        browser.wait_until(DRAWN)
        browser.wait_until("document.querySelectorAll('#ranks tbody tr').length == 3")
        assert "steps.py" not in browser.text("#alarm")
        (joined,) = [each for each in program.events("joined") if each["rank"] == 1]
        os.kill(joined["pid"], signal.SIGKILL)
        killed = time.time()
        browser.wait_until("document.querySelector('#failures article')")
        seen = time.time() - killed
        (failure,) = program.events("failure")
        assert (
            f"rank 1 on {failure['cause']['host']}, step {failure['cause']['step']}: killed"
            in browser.text("#failures")
        )
        print(
            f"on the page {seen:.2f} s after the kill, said by the driver after "
            f"{failure['t'] - killed:.2f} s"
        )
        browser.wait_until(f"{LOSS}.at(-1) > {failure['reached'] + 20}")
        steps = browser.value(LOSS)
        assert steps == list(range(1, steps[-1] + 1))
        assert browser.text("#status") == "running"
        assert "attempt\n2" in browser.text("#state")
        browser.value("document.querySelector('#failures button').click()")
        browser.wait_until(
            "document.querySelector('dialog[open] pre')?.innerText.includes('root cause')"
        )
        browser.value("document.querySelector('dialog button').click()")
        browser.value("document.querySelector('#log').scrollIntoView()")
        browser.wait_until(
            f"document.querySelector('#log').innerText.includes('step {steps[-1] + 5} of rank 0')"
        )
        browser.press("/")
        assert browser.value("document.activeElement.id") == "text"
        browser.value("document.querySelector('#text').value = 'STEP 7 of rank'")
        browser.value("document.querySelector('#logs button:not([type])').click()")
        browser.wait_until("document.querySelectorAll('#found li').length == 3")
        browser.value("document.activeElement.blur()")
        browser.press("x")
        browser.wait_until("document.querySelector('[name=by]:checked').value == 'time'")
        browser.wait_until("raydist.charts.loss.plot.data[0].at(-1) < 1000")
        assert_only_local(browser)
        for address in (link[:-2] + "/", re.sub(r"(:\d+)/.*", r"\1/", link)):
            for name in ("", "stream", "runs", "page.js", "log?rank=0"):
                assert status_of(address + name) == (404, b"")
        behind = re.sub(r"(:\d+)/", r"\1/user/me/proxy/", link)
        assert status_of(behind)[0] == status_of(behind + "page.js")[0] == 200
        assert status_of(link + "file?name=events.jsonl")[0] == 404
        assert status_of(link + "../../etc/passwd")[0] == 404
        assert status_of(link + "file?name=blame-1.txt")[1].startswith(b"failure 1")
        (server,) = servers(program)
        program.signal(signal.SIGKILL)
        program.wait()
        browser.wait_until("document.querySelector('#link').innerText == 'not connected'")
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running()
    from_its_folder(tmp_path, program.run_dir)


def make_older(run: Path, s: float) -> None:
    """Have all that happened in a run have happened so many seconds earlier."""
    events = [{**each, "t": each["t"] - s} for each in read_events(run / "events.jsonl")]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))


def from_its_folder(folder: Path, run: Path) -> None:
    """The same page without its driver: from the folder, on a small dark screen, from one file."""
    reports = [
        each
        for each in read_events(run / "events.jsonl")
        if each["kind"] == "report" and each["rank"] == 0
    ]
    with watching(folder) as link, Browser(400, 900, dark=True) as browser:
        browser.open(link.rstrip("/"))  # as a person may copy it
        browser.wait_until(DRAWN)
        steps = browser.value(LOSS)
        # On a busy machine there are more than a curve has points.
        assert steps == sorted({*steps})
        assert (steps[0], steps[-1]) == (1, reports[-1]["step"])
        assert "rank 1 on" in browser.text("#failures")
        assert browser.value("document.documentElement.scrollWidth") <= 400
        assert_only_local(browser)
        make_older(run, 3600)
        browser.open(f"{link}?again")
        browser.wait_until("document.querySelector('#status').innerText == 'no events'")
        assert "No event for 1:0" in browser.text("#waits")
    argv = [sys.executable, "-m", "raydist.tools.watch", str(run), "--export", "report.html"]
    subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with Browser() as browser:
        browser.open(f"file://{folder}/report.html")
        browser.wait_until(DRAWN)
        assert browser.value(LOSS) == steps
        assert "rank 1 on" in browser.text("#failures")
        browser.value("document.querySelector('#log').scrollIntoView()")
        browser.wait_until("document.querySelector('#log').innerText.includes('of rank 0')")
        browser.value("document.querySelector('#failures button').click()")
        browser.wait_until(
            "document.querySelector('dialog[open] pre')?.innerText.includes('root cause')"
        )
        assert_only_local(browser)
        assert [url for url in browser.requests.values() if url.startswith("http")] == []


def large_run(folder: Path, ranks: int = 16, steps: int = 100_000) -> Path:
    """Yield the events of such a run, as its driver writes them."""
    folder.mkdir(parents=True)
    slots = [
        {"rank": rank, "host": f"node-{rank // 8}", "ip": "10.0.0.1", "node": "n"}
        for rank in range(ranks)
    ]

    def lines() -> Iterator[EventJson]:
        yield event("run", name="large", dir=str(folder), target="x", pages=0).to_json()
        yield event("plan", backend="nccl", world_size=ranks, slots=slots).to_json()
        for step in range(1, steps + 1):
            values = {
                "loss": 5 / step**0.5,
                "lr": 0.1,
                "grad_norm": 1 + step % 7,
                "steps": steps,
                "samples": step * 64,
            }
            yield {
                "t": 1.7e9 + step / 10,
                "kind": "report",
                "rank": 0,
                "step": step,
                "values": values,
            }
            if step % 100 == 0:
                paces = {r: (step, 0.05 + r / 1000, 0.1) for r in range(ranks)}
                yield {"t": 1.7e9 + step / 10, "kind": "pace", "ranks": paces}
            if step % 5000 == 0:
                yield {
                    "t": 1.7e9 + step / 10,
                    "kind": "saved",
                    "rank": 0,
                    "step": step,
                    "path": "x",
                    "s": 1.0,
                }

    with (folder / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines())
    return folder


@needs_chromium
def test_a_hundred_thousand_steps_of_sixteen_ranks(tmp_path: Path) -> None:
    run, other = large_run(tmp_path / "runs/large/one"), tmp_path / "runs/large/two"
    with Events(other / "events.jsonl") as events:
        for step in range(1, 50):
            events.add(kinds.Report(rank=0, step=step * 1000, values={"loss": 1.0}))
    with watching(tmp_path, str(run)) as link, Browser() as browser:
        browser.open(link)
        browser.wait_until("raydist?.curves?.loss?.steps.at(-1) == 100000")
        browser.wait_until(DRAWN)
        assert (
            browser.value(
                "Math.max(...Object.values(raydist.curves).map((one) => one.steps.length))"
            )
            <= 4800
        )
        assert browser.value("document.querySelectorAll('#ranks tbody tr').length") == 16
        assert (
            browser.text("#ranks tbody tr").split()[0] == "15"
        )  # the one with the most work besides
        page = {
            url: size
            for url, size in browser.received.items()
            if "stream" not in url and "runs" not in url
        }
        assert len(page) >= 5
        assert 0 < sum(page.values()) < 200_000
        browser.wait_until("document.querySelector('#other option[value=two]')")
        assert browser.value("[1234.56, 1000, 0.5, 1e-7, null].map(four)") == [
            "1235",
            "1000",
            "0.5",
            "1e-7",
            "",
        ]
        zoomed_by_keys(browser)
        browser.value("document.querySelector('#other').value = 'two'")
        browser.value("document.querySelector('#other').dispatchEvent(new Event('change'))")
        browser.wait_until("raydist.charts.loss?.plot.data[2].some((value) => value === 1)")
        assert_only_local(browser)


@needs_chromium
def test_news_leave_alone_what_has_not_changed(tmp_path: Path) -> None:
    """The button in focus stays, live regions are quiet; names and logs that a script could stumble
    over do no harm."""
    run = large_run(tmp_path / "runs/large/one", ranks=4, steps=200)
    (run / "logs").mkdir()
    (run / "logs/rank-0.log").write_text("before <!-- <script> after\n")
    with (
        watching(tmp_path, str(run)) as link,
        Browser() as browser,
        Events(run / "events.jsonl") as events,
    ):
        browser.open(link)
        browser.wait_until("document.querySelectorAll('#ranks tbody tr').length == 4")
        button = (
            "[...document.querySelectorAll('#ranks button')].find((one) => one.innerText == '2')"
        )
        browser.value(f"void (window.changes = 0, window.held = {button}, window.held.focus())")
        browser.value(
            "void new MutationObserver((seen) => { window.changes += seen.length; })"
            ".observe(document.querySelector('#status'), {childList: true, subtree: true, "
            "characterData: true})"
        )
        for step in (201, 202):  # the second rank in the table becomes the first, then the last
            own = {"2": 0.09 if step == 201 else 0.01}
            events.add(
                kinds.Pace(
                    ranks={str(rank): (step, own.get(str(rank), 0.05), 0.1) for rank in range(4)},
                )
            )
            events.add(kinds.Report(rank=0, step=step, values={"loss": 1.0, "constructor": 1.0}))
            browser.wait_until(f"window.held.closest('tr').cells[3].innerText == '{step}'")
            assert browser.value(
                "document.activeElement === window.held && document.contains(window.held)"
            )
            assert browser.value(f"window.held.closest('tr').rowIndex == {1 if step == 201 else 4}")
        browser.wait_until("document.querySelector('[data-name=constructor]')")
        before = browser.value("window.changes")
        events.add(kinds.Report(rank=0, step=203, values={"loss": 1.0}))
        browser.wait_until(f"{LOSS}.at(-1) == 203")
        assert browser.value("window.changes") == before
        # Four columns, with years between the second and the third.
        events.add(kinds.Restart(t=1.7e9 + 25, number=1, text="rank 1 on node-0"))
        red = (
            "((x) => { const [r, g, b] = document.querySelector('canvas.lane').getContext('2d')"
            ".getImageData(x, 31, 1, 1).data; return r > 2 * g && r > 2 * b; })"
        )
        browser.wait_until(f"{red}(600 / 4 + 1)")
        assert not any(browser.value(f"{red}({x})") for x in (1, 301, 451))
        assert status_of(f"{link}log?rank=nan")[0] == status_of(f"{link}curves?from=inf")[0] == 400
        assert_only_local(browser)
        argv = [sys.executable, "-m", "raydist.tools.watch", str(run), "--export", "a.html"]
        subprocess.run(argv, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        browser.open(f"file://{tmp_path}/a.html")
        browser.wait_until(DRAWN)
        browser.value("document.querySelector('#log').scrollIntoView()")
        browser.wait_until(
            "document.querySelector('#log').innerText.includes('before <!-- <script> after')"
        )


def zoomed_by_keys(browser: Browser) -> None:
    """The curve in focus: + zooms, and brings all points; arrows move it, not beyond the ends; 0
    leaves."""
    scale = "(({ min, max }) => [min, max])(raydist.charts.loss.plot.scales.x)"
    browser.value("document.querySelector('[data-name=loss] div').focus()")
    assert "zoom" in browser.value("document.activeElement.ariaLabel")
    for _ in range(7):
        browser.press("+")
    low, high = browser.value(scale)
    assert 500 < high - low < 1000
    browser.wait_until(
        "(({ data: [x] }) => x.length > 500 && x[1] - x[0] == 1)(raydist.charts.loss.plot)"
    )
    browser.press("ArrowRight")
    browser.wait_until(f"{scale}[0] > {low} + 100 && {scale}[1] - {scale}[0] < {high - low} + 1")
    for _ in range(6):
        browser.press("-")
    for _ in range(20):
        browser.press("ArrowLeft")
    browser.wait_until(f"{scale}[0] == 1")
    browser.press("0")
    browser.wait_until(f"{scale}[1] == 100000")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for words, says in (
        ([], "no run is below"),
        (["nowhere"], "there is no such folder"),
        (["--port", "x"], "must be a whole number"),
        (["--exprt", "a.html"], "did you mean --export"),
    ):
        argv = [sys.executable, "-m", "raydist.tools.watch", *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
