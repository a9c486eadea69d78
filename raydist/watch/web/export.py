"""The page of a run or sweep as one file: styles, scripts, curves and logs inside. (driver)

It opens from a disk.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from raydist.watch.web.follow import FollowedRun, Viewer, log_name, read_from
from raydist.watch.web.model import Model
from raydist.watch.web.node_figures import FiguresShown
from raydist.watch.web.run_files import checkpoint_sizes
from raydist.watch.web.run_note import read_note
from raydist.watch.web.server import STATIC, fetch_note, run_curves, run_settings
from raydist.watch.web.sweep import FollowedSweep

NODES = 16
"""Number of nodes of which all figures go into the file: those of the ranks with a failure first.

Of the others it has the newest figures, and the lines in the charts of all nodes.
"""
LOGS = 32
"""Number of ranks whose logs go into the file: all ranks with a failure, then the first ones."""


async def export(run: FollowedRun, to: Path, others: Mapping[str, Path] | None = None) -> None:
    """Write the page of a run as it is now.

    `others`: the folders of runs whose curves and settings are in the same charts, by name.
    OSError: the file can't be written; ConnectionError: the run can't be read.
    """
    await run.fetch("events.jsonl", whole=True)
    await run.read_all()
    await fetch_note(run)
    failures = run.model.figures.failures.found
    ranks = list(
        dict.fromkeys([*(failure.cause["rank"] for failure in failures), *sorted(run.model.ranks)])
    )[:LOGS]
    texts = [log_name(rank, of) for rank in ranks for of in ("stacks", "nccl")]
    names = [*(failure.page for failure in failures), *texts]
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
    }
    to.write_text(one_file("index.html", data), encoding="utf-8")


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


async def export_sweep(sweep: FollowedSweep, to: Path) -> None:
    """Write the page of a sweep as it is now. OSError: the file can't be written."""
    curves, section = await sweep.curves(), await sweep.section()
    data = {"sweep": section, "curves": curves, "name": sweep.first_curve(curves)}
    to.write_text(one_file("sweep.html", data), encoding="utf-8")


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
