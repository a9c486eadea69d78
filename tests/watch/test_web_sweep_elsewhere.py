"""A sweep that is read over a network: by its job through Ray's dashboard, or from a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.reporting.log_link import SWEEP, set_link
from raydist.state.object_store import Remote, environment
from raydist.tools import watch
from raydist.watch.web import mirror
from raydist.watch.web import sweep as sweep_page
from raydist.watch.web.mirror import Mirror
from raydist.watch.web.sweep import FollowedSweep
from tests.browser import Browser, needs_chromium
from tests.dashboard import Dashboard
from tests.scenarios.test_watch_page import DRAWN, LOSS, assert_only_local, watching
from tests.stores import store
from tests.watch.test_web_mirror import LIMIT_S, exported, report
from tests.watch.test_web_mirror import write_run as write_trial
from tests.watch.test_web_sweep import record, sweep_json

SPACE = {"lr": "1,2,3"}


def write_sweep(folder: Path, second: str = "running") -> Path:
    """Write a sweep: its first trial has ended, the second goes on, the third has not begun."""
    states = ("finished", second, "waiting")
    trials = [record(n, state, {"loss": 1.0}, lr=str(n + 1)) for n, state in enumerate(states)]
    for number in range(2):
        if not (folder / str(number)).exists():
            write_trial(folder / str(number), steps=10)
    return sweep_json(folder, trials, SPACE, best=[0])


def steps(section: Any) -> dict[int, int]:
    return {trial["trial"]: trial["step"] for trial in section["trials"]}


def in_time(work: Awaitable[object]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def until(found: Callable[[Any], bool], sweep: FollowedSweep) -> None:
    """Look again and again until what the page gets is as wanted."""
    while not found(await sweep.section()):
        await asyncio.sleep(0.02)


def test_trials_under_way_are_followed_and_others_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_page, "FETCH_S", 0.0)
    monkeypatch.setattr(mirror, "AGAIN_S", 0.05)
    there = write_sweep(tmp_path / "there")
    with Dashboard(there, sweep=True) as dashboard:
        files = watch.files_of_job(dashboard.job, dashboard.address, SWEEP)
        copies = Mirror(tmp_path / "copy", files, grows=True)
        sweep = FollowedSweep(copies.folder, copies.fetch)

        async def look() -> None:
            await until(lambda section: steps(section) == {0: 10, 1: 10, 2: 10}, sweep)
            assert (await sweep.curves())["loss"].keys() == {0, 1}
            with (there / "1/events.jsonl").open("a") as file:
                file.write(report(11))
            await until(lambda section: steps(section)[1] == 11, sweep)
            for _ in range(3):
                assert await sweep.catch_up("0") == 1.0
            assert dashboard.requests["file 0/events.jsonl"] == 1
            assert dashboard.requests["stream 0/events.jsonl"] == 0
            assert dashboard.requests["stream 1/events.jsonl"] == 1
            before = dashboard.requests["file 1/events.jsonl"]
            write_sweep(there, second="finished")
            await until(lambda section: section["trials"][1]["state"] == "finished", sweep)
            for _ in range(3):
                assert await sweep.catch_up("1") == 1.0
            assert dashboard.requests["file 1/events.jsonl"] == before + 1

        in_time(look())


def test_only_some_of_many_trials_under_way_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_page, "FOLLOWED", 1)
    trials = [record(n, "running", {}, step=0, lr="1") for n in range(2)]
    folder = sweep_json(tmp_path / "there", trials, SPACE)
    for number in range(2):
        write_trial(folder / str(number), steps=5)
    with Dashboard(folder, sweep=True) as dashboard:
        files = watch.files_of_job(dashboard.job, dashboard.address, SWEEP)
        copies = Mirror(tmp_path / "copy", files, grows=True)
        sweep = FollowedSweep(copies.folder, copies.fetch)
        in_time(until(lambda section: steps(section) == {0: 5, 1: 0}, sweep))
        assert dashboard.requests["stream 1/events.jsonl"] == 0
    here = FollowedSweep(folder)
    assert steps(asyncio.run(here.section())) == {0: 5, 1: 5}


def test_the_folder_of_a_trial_is_in_that_of_its_sweep(tmp_path: Path) -> None:
    """sweep.json comes from elsewhere, and its names become those of files here."""
    trials = [{**record(n, "running", {}, lr="1"), "dir": name} for n, name in enumerate(NAMES)]
    sweep = FollowedSweep(sweep_json(tmp_path / "s", trials, SPACE))
    section = asyncio.run(sweep.section())
    assert [trial["run"] for trial in section["trials"]] == ["7"]
    assert not sweep.has_trial("../x")


NAMES = ("..", "../x", "/etc", "", ".", "a/b", "7")


def test_a_broken_connection_or_file_changes_nothing_that_is_known(tmp_path: Path) -> None:
    there = write_sweep(tmp_path / "there")
    sizes: list[int] = []

    async def read(name: str, follow: bool) -> Any:
        content = (there / name).read_bytes()
        sizes.append(len(content))
        yield content[:50]
        if len(sizes) > 1:
            raise ConnectionError("it broke")
        yield content[50:]

    async def look() -> None:
        copies = Mirror(tmp_path / "copy", read, grows=True)
        await copies.fetch("sweep.json", whole=True)
        before = (copies.folder / "sweep.json").read_bytes()
        (there / "sweep.json").write_text("x" * 100)
        with pytest.raises(ConnectionError):
            await copies.fetch("sweep.json", whole=True)
        assert (copies.folder / "sweep.json").read_bytes() == before
        json.loads(before)

    in_time(look())


def test_an_export_by_its_job_has_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Dashboard(write_sweep(tmp_path / "there"), sweep=True) as dashboard:
        words = ["--job", dashboard.job, "--address", dashboard.address]
        assert watch.main([*words, "--export", "one.html"]) == 0
        assert watch.main([*words, "--export", "all/"]) == 0
        assert "all/index.html (3 pages, " in capsys.readouterr().out
    for page in ("one.html", "all/index.html"):
        data = exported(Path(page))
        assert steps(data["sweep"]) == {0: 10, 1: 10, 2: 10}
        assert data["curves"]["loss"].keys() == {"0", "1"}
    for number in range(2):
        trial = exported(Path(f"all/runs/{number}.html"))
        assert trial["sections"]["curves"]["loss"][1][0] == [*range(1, 11)]
        assert trial["logs"]["0"].endswith("it ends\n")


@pytest.mark.slow
def test_an_export_from_a_store_has_the_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = write_sweep(tmp_path / "there", second="failed")
    with store() as server, environment(server.env):
        bucket = Remote("s3://bucket")
        for file in [path for path in there.rglob("*") if path.is_file()]:
            (bucket / f"sweeps/one/{file.relative_to(there)}").put(file)
        assert watch.main(["s3://bucket/sweeps/one/", "--export", "all/"]) == 0
    data = exported(Path("all/index.html"))
    assert data["links"] == {"0": "runs/0.html", "1": "runs/1.html"}
    assert data["curves"]["loss"].keys() == {"0", "1"}


@needs_chromium
@pytest.mark.slow
def test_the_page_of_a_trial_opens_and_follows_it(tmp_path: Path, browser: Browser) -> None:
    there = write_sweep(tmp_path / "there")
    trial = "[...document.querySelectorAll('#trials a')].find((one) => one.innerText == '1')"
    with Dashboard(there, sweep=True) as dashboard:
        words = ("--job", dashboard.job, "--address", dashboard.address)
        with watching(tmp_path, *words) as link:
            browser.open(link)
            browser.wait_until(f"{DRAWN} && {trial}")
            browser.value(f"{trial}.click()")
            browser.wait_until(f"{DRAWN} && {LOSS}.at(-1) == 10")
            with (there / "1/events.jsonl").open("a") as file:
                file.write(report(11))
            browser.wait_until(f"{LOSS}.at(-1) == 11")
            browser.value("document.querySelector('#log').scrollIntoView()")
            browser.wait_until("document.querySelector('#log').innerText.includes('it ends')")
            assert_only_local(browser)


def test_a_link_leads_to_the_newest_folder(tmp_path: Path) -> None:
    link, one, two = tmp_path / "link", tmp_path / "one", tmp_path / "two"
    set_link(link, None)
    assert not link.is_symlink()
    for to in (one, one, two):
        set_link(link, to)
        assert link.readlink() == to
    made = link.lstat().st_ino
    set_link(link, two)
    assert link.lstat().st_ino == made  # there all the time
    set_link(link, None)
    assert not link.is_symlink()
