"""The page of a run, a sweep or a list of runs as one file; or a folder of them. (driver)

A file has styles, scripts, curves and logs inside, and opens from a disk.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from raydist.shared.record_names import EVENTS
from raydist.watch.web.follow import (
    SHARED,
    Fetch,
    FollowedRun,
    Viewer,
    is_here,
    log_name,
    read_from,
)
from raydist.watch.web.model import Model
from raydist.watch.web.node_figures import FiguresShown
from raydist.watch.web.run_files import checkpoint_sizes, trace_text
from raydist.watch.web.run_note import read_note
from raydist.watch.web.runs import list_rows
from raydist.watch.web.server import STATIC, fetch_note, run_curves, run_settings
from raydist.watch.web.sweep import FollowedSweep, is_sweep

NODES = 16
"""Number of nodes of which all figures go into the file: those of the ranks with a failure first.

Of the others it has the newest figures, and the lines in the charts of all nodes.
"""
LOGS = 32
"""Number of ranks whose logs go into the file: all ranks with a failure, then the first ones."""
TRACE = 8 << 20
"""Maximum bytes of a trace that goes into the file, compressed."""
INDEX, PAGES = "index.html", "runs"
"""In a folder of pages: the first page, and the folder of the others."""


class Home(NamedTuple):
    """The page that a page in a folder of pages links back to."""

    path: Path
    text: str

    def seen_from(self, page: Path) -> tuple[str, str]:
        """Return the relative address of this page, and the text of the link."""
        return address(page, self.path), self.text


def address(page: Path, other: Path) -> str:
    """Return the address of another page, as a link in a page has it."""
    return quote(Path(os.path.relpath(other, page.parent)).as_posix())


async def export_folder(root: Path, to: Path, fetch: Fetch = is_here) -> list[Path]:
    """Write the page of a sweep or of a list of runs, and one for each run; return the files.

    `root`: the folder of the sweep or of the runs; `fetch`: fetches files of the sweep into it.
    OSError: a file can't be written; ConnectionError: the sweep can't be read.
    """
    if is_sweep(root):
        return await export_trials(FollowedSweep(root, fetch), to / INDEX, to / PAGES)
    index, files = to / INDEX, list[Path]()
    rows = await asyncio.to_thread(list_rows, root)
    pages = {row["run"]: to / PAGES / f"{row['run']}.html" for row in rows}
    home = Home(index, "all runs")
    for row in rows:
        page = pages[row["run"]]
        if row["sweep"]:
            sweep = FollowedSweep(root / row["run"])
            files += await export_trials(sweep, page, page.with_suffix(""), home)
        else:
            files += [await export(FollowedRun(root / row["run"]), page, home=home)]
    links = {name: address(index, page) for name, page in pages.items()}
    return [await export_list(root, index, links), *files]


async def export_list(root: Path, to: Path, links: Mapping[str, str] | None = None) -> Path:
    """Write the list of the runs below a folder. `links`: the addresses of their pages, by run.

    OSError: the file can't be written.
    """
    rows = await asyncio.to_thread(list_rows, root)
    runs = [{**row, "page": (links or {}).get(row["run"], "")} for row in rows]
    return write_page(to, "index.html", {"list": {"folder": str(root), "runs": runs}})


async def export_trials(
    sweep: FollowedSweep, to: Path, pages: Path, home: Home | None = None
) -> list[Path]:
    """Write the page of a sweep, and the pages of its trials below `pages`; return the files."""
    runs = {each["trial"]: sweep.run(each["run"]) for each in (await sweep.section())["trials"]}
    await asyncio.gather(*(run.fetch(EVENTS, whole=True) for run in runs.values()))
    begun = {number: run for number, run in runs.items() if (run.folder / EVENTS).exists()}
    found = {number: pages / f"{run.folder.name}.html" for number, run in begun.items()}
    links = {number: address(to, page) for number, page in found.items()}
    files = [await export_sweep(sweep, to, links, home)]
    for number, run in begun.items():
        files += [await export(run, found[number], home=Home(to, "the sweep"))]
    return files


async def export(
    run: FollowedRun,
    to: Path,
    others: Mapping[str, Path] | None = None,
    home: Home | None = None,
) -> Path:
    """Write the page of a run as it is now; return the file.

    `others`: the folders of runs whose curves and settings are in the same charts, by name.
    OSError: the file can't be written; ConnectionError: the run can't be read.
    """
    await run.fetch(EVENTS, whole=True)
    await run.read_all()
    await fetch_note(run)
    failures = run.model.figures.failures.found
    ranks = list(
        dict.fromkeys([*(failure.cause["rank"] for failure in failures), *sorted(run.model.ranks)])
    )
    # The events may come from elsewhere: only what a run folder has goes into the page.
    ranks = [rank for rank in ranks if SHARED.fullmatch(log_name(rank))][:LOGS]
    texts = [log_name(rank, of) for rank in ranks for of in ("stacks", "nccl")]
    marks = run.model.marks.get("operated", [])
    answers = [mark["file"] for mark in marks if mark["file"].endswith(".txt")]
    names = [*(failure.page for failure in failures), *texts, *answers]
    names = [name for name in names if SHARED.fullmatch(name)]
    await asyncio.gather(*(run.fetch(name, whole=True) for name in [*names, *map(log_name, ranks)]))
    pages = {name: run.folder / name for name in names}
    data = {
        "sections": {
            **{name: json.loads(text) for name, text in Viewer(run).news(1.0)},
            "note": read_note(run.folder)._asdict(),
        },
        "pages": {
            name: path.read_text(errors="replace") for name, path in pages.items() if path.exists()
        },
        "sizes": await asyncio.to_thread(checkpoint_sizes, [*run.model.checkpoints]),
        "others": {name: await other_run(folder) for name, folder in (others or {}).items()},
        "nodes": node_figures(run.model, ranks),
        "settings": (await run_settings(run))._asdict(),
        "logs": {rank: read_from(run.folder / log_name(rank), -1)[0] for rank in ranks},
        "trace": await asyncio.to_thread(packed_trace, run.folder),
        "home": home and home.seen_from(to),
    }
    return write_page(to, "index.html", data)


def packed_trace(folder: Path) -> str:
    """Return the trace of a run as gzip in base64; empty if it is too long for a page."""
    try:
        packed = gzip.compress(trace_text(folder).encode(), compresslevel=6)
    except (OSError, ValueError):
        return ""
    return base64.b64encode(packed).decode() if len(packed) <= TRACE else ""


async def other_run(folder: Path) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the curves, as a page gets them, and the settings of another run."""
    run = FollowedRun(folder)
    await run.read_all()
    return run_curves(run), (await run_settings(run))._asdict()


def node_figures(model: Model, ranks: Iterable[int]) -> dict[str, FiguresShown]:
    """Return the figures of the nodes of these ranks; under an empty name, those of all nodes."""
    placed = dict.fromkeys(model.ranks[rank].host for rank in ranks if rank in model.ranks)
    hosts = [host for host in placed if host in model.nodes.newest][:NODES]
    return {host: model.nodes.shown(host) for host in ["", *hosts]}


async def export_sweep(
    sweep: FollowedSweep,
    to: Path,
    links: Mapping[int, str] | None = None,
    home: Home | None = None,
) -> Path:
    """Write the page of a sweep as it is now; return the file.

    `links`: the addresses of the trials' pages, by trial. OSError: the file can't be written.
    """
    curves, section = await sweep.curves(), await sweep.section()
    data = {
        "sweep": section,
        "curves": curves,
        "name": sweep.first_curve(curves),
        "links": links or {},
        "home": home and home.seen_from(to),
    }
    return write_page(to, "sweep.html", data)


def write_page(to: Path, name: str, data: Mapping[str, object]) -> Path:
    """Write a page with its data; return the file."""
    text = one_file(name, data)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text, encoding="utf-8")
    return to


def one_file(name: str, data: Mapping[str, object]) -> str:
    """Return a page with its data and everything that it would load."""
    page = (STATIC / name).read_text(encoding="utf-8")

    def style(match: re.Match[str]) -> str:
        return f"<style>\n{(STATIC / match[1]).read_text(encoding='utf-8')}</style>"

    def script(match: re.Match[str]) -> str:
        return f"<script{match[2]}>\n{(STATIC / match[1]).read_text(encoding='utf-8')}</script>"

    page = re.sub(r'<link rel="stylesheet" href="([^"]+)">', style, page)
    page = re.sub(r'<script src="([^"]+)"([^>]*)></script>', script, page)
    safe = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    element = f'<script type="application/json" id="data">{safe}</script>\n'
    return page.replace("<script>", element + "<script>", 1)
