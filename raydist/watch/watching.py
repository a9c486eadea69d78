"""What writes and shows a run's events: records, failure pages, console, page, metrics. (driver)"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from raydist.launch.run_storage import events_of_checkpoint
from raydist.reporting.console import Console
from raydist.reporting.job_metadata import JobMetadata
from raydist.reporting.log_link import LogLink
from raydist.reporting.metrics import Metrics
from raydist.reporting.page_files import Pages
from raydist.reporting.result import Figures
from raydist.reporting.resume_check import ResumeCheck
from raydist.settings.config import Job
from raydist.shared.events import Events, Reader
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.watch.web.live_page import LivePage


class Watched(NamedTuple):
    """A run that is watched."""

    events: Events
    figures: Figures


@contextlib.contextmanager
def watching(
    job: Job, shown: Reader | None = None, also: Reader | None = None
) -> Iterator[Watched]:
    """Connect all events of the run to their readers while the block runs.

    `shown`: a reader that replaces the console. `also`: an additional reader of the caller.
    """
    folder, figures = Path(job.dir), Figures()
    console = Console(job.watch, failures=figures.failures) if shown is None else None
    screen: list[Reader] = [each for each in (shown, console, also) if each is not None]
    metrics = Metrics(run_label(job), figures, lambda text: events.warn(text))
    check = ResumeCheck(partial(events_of_checkpoint, job=job))

    def compare(event: Event) -> None:
        found = check.add(event)
        if found is not None:
            events.add(found)
            if found.differs is not None:
                events.warn(f"the training did not resume exactly: {found.text}")

    readers: tuple[Reader, ...] = (
        figures.add,
        Pages(folder, figures.failures),
        *screen,
        JobMetadata(job.watch),
        LogLink(folder, job.sweep.dir),
        metrics,
        *((compare,) if job.train.check_resume else ()),  # all others have read the event
    )
    with (
        console or contextlib.nullcontext(),
        metrics,
        Events(folder / EVENTS, readers, whole=bool(job.track)) as events,
        LivePage(folder, job.watch.page) as page,
    ):
        if console is not None:
            console.link(page.link)
        yield Watched(events, figures)


def run_label(job: Job) -> str:
    """Return `NAME/FOLDER`, the label of a run.

    For a trial the folder is `SWEEP/NUMBER`, since each sweep has a trial 0.
    """
    folder = Path(job.dir)
    return (
        f"{job.name}/{Path(job.sweep.dir).name}/{folder.name}"
        if job.sweep.dir
        else f"{job.name}/{folder.name}"
    )
