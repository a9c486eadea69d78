"""A run that is read over a network: connections that break, are slow or silent, and logs that
nobody shows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from raydist.reporting.trace import trace_of
from raydist.shared.events import read_events
from raydist.tools import watch
from raydist.watch.web import mirror
from raydist.watch.web.export import export
from raydist.watch.web.follow import FollowedRun
from raydist.watch.web.mirror import Mirror, stored
from raydist.watch.web.server import PageServer, link, open_port, serve_page
from tests.dashboard import Dashboard
from tests.records import event, line

LIMIT_S = 60.0
STEPS = 400


def report(step: int) -> str:
    return line(event("report", rank=0, step=step, values={"loss": 1 / step}))


def write_run(folder: Path, steps: int = STEPS, ranks: int = 2) -> Path:
    """Write a run folder: each rank has a log, and all but rank 0's are empty."""
    (folder / "logs").mkdir(parents=True)
    slots = [{"rank": rank, "host": "h", "ip": "10.0.0.1", "node": "n"} for rank in range(ranks)]
    plan = event("plan", backend="gloo", world_size=ranks, slots=slots)
    events = [event("run", name="mine", dir="x", target="x", pages=0), plan]
    saved = line(event("saved", rank=0, step=steps, path="x", s=0.1))
    lines = (
        [line(each) for each in events] + [report(step) for step in range(1, steps + 1)] + [saved]
    )
    (folder / "events.jsonl").write_text("".join(lines))
    for rank in range(ranks):
        (folder / f"logs/rank-{rank}.log").write_text(
            "" if rank else "it begins\n" * 1000 + "it ends\n"
        )
    return folder


def exported(path: Path) -> dict[str, Any]:
    """Return the data of an exported page."""
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*)</script>', path.read_text()
    )
    return dict(json.loads(data))


def in_time(work: Awaitable[object]) -> None:
    asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def until(condition: Callable[[], bool], look: Callable[[], Awaitable[object]]) -> None:
    """Look again and again until the condition is true."""
    while not condition():
        await look()
        await asyncio.sleep(0.02)


def test_an_export_by_a_slow_connection_that_breaks_has_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cuts = {"file events.jsonl": 5000, "stream events.jsonl": 5000}
    with Dashboard(write_run(tmp_path / "run"), pause_s=0.02, cuts=cuts) as dashboard:
        words = ["--job", dashboard.job, "--address", dashboard.address]
        assert watch.main([*words, "--export", "a.html"]) == 0
        assert watch.main([*words, "--trace", "b.json"]) == 0
    data = exported(Path("a.html"))
    assert data["sections"]["curves"]["loss"][1][0] == [*range(1, STEPS + 1)]
    assert data["logs"]["0"].endswith("it ends\n")
    whole = trace_of(read_events(tmp_path / "run/events.jsonl"))
    assert json.loads(Path("b.json").read_text()) == json.loads(json.dumps(whole))


def test_an_export_of_a_run_whose_last_line_was_cut_off_ends(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(report(STEPS + 1)[:30])
    in_time(export(FollowedRun(folder), tmp_path / "a.html"))
    assert exported(tmp_path / "a.html")["sections"]["curves"]["loss"][1][0] == [
        *range(1, STEPS + 1)
    ]


def test_a_stream_that_broke_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "AGAIN_S", 0.05)
    folder = write_run(tmp_path / "run")
    with Dashboard(folder, cuts={"stream events.jsonl": 5000}) as dashboard:
        copies = Mirror(
            tmp_path / "copy", watch.files_of_job(dashboard.job, dashboard.address), grows=True
        )
        run = FollowedRun(copies.folder, copies.fetch)

        async def look() -> None:
            await until(lambda: run.model.progress.step == STEPS, run.catch_up)
            with (folder / "events.jsonl").open("a") as file:
                file.write(report(STEPS + 1))
            await until(lambda: run.model.progress.step == STEPS + 1, run.catch_up)

        in_time(look())
        assert dashboard.requests["stream events.jsonl"] == 2
    assert (copies.folder / "events.jsonl").read_bytes() == (folder / "events.jsonl").read_bytes()
    assert list(run.model.curves["loss"].steps) == [*range(1, STEPS + 2)]


def test_a_search_opens_no_stream(tmp_path: Path) -> None:
    ranks = 24
    with Dashboard(write_run(tmp_path / "run", steps=1, ranks=ranks)) as dashboard:
        copies = Mirror(
            tmp_path / "copies/watched",
            watch.files_of_job(dashboard.job, dashboard.address),
            grows=True,
        )
        server = PageServer(tmp_path / "copies", "watched", "token", copies.fetch)

        async def look() -> None:
            async with (
                aiohttp.ClientSession() as browser,
                browser.get(f"{link(sock, 'token')}search?text=ENDS") as reply,
            ):
                assert await reply.json() == {"lines": [[0, 1001, "it ends"]], "absent": 0}

        async def serve() -> None:
            await server.follow("watched").catch_up()
            await serve_page(server, sock, look())

        with open_port() as sock:
            in_time(serve())
        assert dashboard.requests == {
            "stream events.jsonl": 1,
            **{f"file logs/rank-{rank}.log": 1 for rank in range(ranks)},
        }


def test_a_log_that_nobody_shows_is_no_longer_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "IDLE_S", 0.5)
    with Dashboard(write_run(tmp_path / "run")) as dashboard:
        copies = Mirror(
            tmp_path / "copy", watch.files_of_job(dashboard.job, dashboard.address), grows=True
        )
        run = FollowedRun(copies.folder, copies.fetch)

        async def look() -> None:
            await run.catch_up()
            async for piece in run.log(0, 0.01):
                if piece.text.endswith("it ends\n"):
                    break
            assert dashboard.streams["logs/rank-0.log"] == 1
            await until(lambda: dashboard.streams["logs/rank-0.log"] == 0, run.catch_up)
            assert dashboard.streams["events.jsonl"] == 1

        in_time(look())


def test_a_copy_becomes_the_other_file_that_has_its_name_now(tmp_path: Path) -> None:
    there, here = tmp_path / "there/events.jsonl", tmp_path / "here/events.jsonl"
    there.parent.mkdir()
    copies = Mirror(tmp_path / "here", stored(there.parent), grows=True)
    for content in ("one\ntwo\n", "one\ntwo\nthree\n", "one\nother\n", "one\n", ""):
        there.write_text(content)
        asyncio.run(copies.fetch("events.jsonl", whole=True))
        assert here.read_text() == content
