"""The buttons of a run's page, pressed in a real browser; who else can't press them."""

from __future__ import annotations

import gzip
import json
import re
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

from tests.browser import Browser, needs_chromium
from tests.programs import Program
from tests.scenarios.test_operate import FIT, rows
from tests.scenarios.test_watch_page import assert_only_local, status_of
from tests.watch.test_web_accessibility import AXE, violations

CLICK = "document.querySelector('#operate [value={}]').click()"
IDLE = "document.querySelector('#operate [value=save]').ariaDisabled == 'false'"
PATIENCE_S = 600.0


def posted(url: str, **headers: str) -> tuple[int, str]:
    """Press a button as another program does; the status and the answer."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json", **named})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def page_of(program: Program) -> str:
    program.wait_until(lambda: "page  http" in program.screen, "link", PATIENCE_S)
    link: str = re.findall(r"page  (http\S+)", program.screen)[0]
    return link


def test_without_buttons_the_commands_work(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(1000)\n")
    words = (
        "script=waits.py",
        "scale=1x1",
        "group=inline",
        "watch.page=true",
        "watch.operate=false",
    )
    program = Program(tmp_path, *words)
    link = page_of(program)
    program.wait_until(lambda: len(rows(tmp_path)) == 1, "the rank", PATIENCE_S)
    origin = re.sub(r"(:\d+)/.*", r"\1", link)
    status, answer = posted(f"{link}press?button=stacks", Origin=origin)
    assert (status, "watch.operate=false" in answer) == (200, True)
    assert program.events("operated") == []
    program.process.terminate()
    program.wait()


@needs_chromium
def test_the_buttons_ask_the_ranks_and_the_answers_stay(tmp_path: Path) -> None:
    (tmp_path / "fits.py").write_text(textwrap.dedent(FIT))
    endless = ("train.epochs=1000000", "checkpoint.every=1000000000", "data.batch_size=4")
    words = ("job=fits.py", "scale=1x2", "group=inline", "watch.page=true")
    program = Program(tmp_path, *words, *endless)
    link = page_of(program)
    program.wait_for_step(2, PATIENCE_S)
    with Browser() as browser:
        browser.open(link)
        browser.wait_until(IDLE)
        browser.value(CLICK.format("stacks"))
        browser.wait_until("document.querySelector('#answer').innerText.includes('fits.py')")
        assert re.match(r"ranks? \d", browser.text("#answer")), browser.text("#answer")
        browser.wait_until(IDLE)
        browser.value(CLICK.format("save"))
        browser.wait_until(
            "/^saved step \\d+: .*s\\)$/.test(document.querySelector('#pressed').innerText)"
        )
        assert browser.value("document.querySelector('#answer').hidden")
        browser.wait_until(IDLE)
        browser.value(CLICK.format("profile"))
        browser.wait_until("document.querySelector('#pressed a')")
        name = browser.text("#pressed a")
        address = link + str(
            browser.value("document.querySelector('#pressed a').getAttribute('href')")
        )
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as reply:
            trace = json.loads(gzip.decompress(reply.read()))
        named = {
            one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"
        }
        assert {each.partition(" ·")[0] for each in named} == {"rank 0", "rank 1"}
        browser.wait_until("document.querySelectorAll('#operated li').length == 3")
        assert name in browser.text("#operated li")  # the newest is first
        operated = program.events("operated")
        assert [each["command"] for each in operated] == ["stacks", "save", "profile"]
        assert operated[2]["file"] == name
        browser.value("document.querySelector('#operated li:last-child button').click()")
        browser.wait_until(
            "document.querySelector('dialog[open] pre')?.innerText.includes('fits.py')"
        )
        browser.value("document.querySelector('dialog button').click()")
        assert_only_local(browser)
        assert AXE is None or violations(browser) == []
        own = {"Origin": re.sub(r"(:\d+)/.*", r"\1", link)}
        for address, headers, status in (
            ("press?button=save", {}, 403),
            ("press?button=save", {"Origin": "http://other.example"}, 403),
            ("press?button=save", {**own, "Sec_Fetch_Site": "cross-site"}, 403),
            ("press?button=save", {**own, "Content_Type": "text/plain"}, 403),
            ("press?button=stop", own, 400),
            ("stream", own, 405),
        ):
            assert posted(link + address, **headers)[0] == status, (address, headers)
        wrong = link[:-2] + ("a" if link[-2] != "a" else "b") + "/"
        assert posted(f"{wrong}press?button=save", **own)[0] == 404
        assert status_of(f"{link}press?button=save")[0] == 404  # GET
        assert len(program.events("operated")) == 3
        program.process.kill()
        browser.wait_until("document.querySelector('#link').innerText == 'not connected'")
    program.wait()
    assert program.leftovers(PATIENCE_S) == []
