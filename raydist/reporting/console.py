"""Show a run from its events: a live line in a terminal or notebook, else plain lines. (driver)"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TextIO

from raydist.reporting import wording
from raydist.reporting.cell import Cell, in_notebook
from raydist.reporting.failures import Failures
from raydist.reporting.lines import Lines
from raydist.reporting.output import Output
from raydist.reporting.page import page_lines
from raydist.reporting.progress import Progress
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.outcome import StopReason
from raydist.shared.rank_names import of_ranks

if TYPE_CHECKING:
    from raydist.reporting.terminal import Terminal


class Console(AbstractContextManager["Console"]):
    """A reader of events that writes to the screen.

    The driver calls it for each event, so it redraws rarely.
    """

    def __init__(
        self, settings: Watch, stream: TextIO | None = None, failures: Failures | None = None
    ) -> None:
        """Set up the screen.

        `failures`: reads each event before this reader does; without it no page of a failure is
        named.
        """
        self._quiet = settings.progress == "none"
        self._screen = screen(settings, sys.stdout if stream is None else stream)
        self._progress = Progress()
        self._output = Output(settings.output)
        self._warnings: set[str] = set()
        self._failures = Failures() if failures is None else failures
        self._pending_restart: kinds.Restart | None = None

    def __call__(self, event: Event) -> None:
        if not self._quiet or isinstance(event, kinds.Warning | kinds.Output | kinds.Result):
            self._show(event)

    def _show(self, event: Event) -> None:
        """Show an event; most kinds are not shown."""
        moment = self._progress.read(event)
        match event:
            case kinds.Report(rank=0):
                self._screen.draw(self._progress, event.t, moment)
            case kinds.Output():
                for line in self._output.lines(event.rank, event.output):
                    self._screen.say(line)
            case kinds.Run():
                self._screen.say(f"run   {event.name}, in {event.dir}", "bold")
            case kinds.Cluster():
                self._screen.say(wording.cluster_line(event))
            case kinds.Track():
                self._screen.say(f"track {event.text}")
            case kinds.Wait():
                self._show_pending()
                self._screen.say(f"wait  {event.text}", "yellow")
            case kinds.Avoid():
                self._screen.say(f"node  {event.text}", "yellow")
            case kinds.Plan():
                self._screen.say(wording.plan_line(event))
                self._screen.table(wording.slot_rows(event.slots))
            case kinds.Phase():
                self._screen.phase(event.name, event.s)
            case kinds.Warning():
                self._on_warning(event)
            case kinds.Begin(rank=0) if event.resumed:
                self._screen.say(f"resumes after step {event.resumed}")
            case kinds.Saved():
                self._screen.saved(self._progress, event.t)
            case kinds.Hang():
                self._screen.say(f"hang  silent for {event.s:.0f} s: {event.text}", "yellow")
                for note in event.notes:
                    self._screen.say(f"hang  {note}", "yellow")
            case kinds.Held():
                self._screen.say(wording.held_line(event), "yellow")
            case kinds.Notice():
                self._screen.say(f"notice {event.text}", "yellow")
            case kinds.Slow():
                self._screen.say(f"slow  {event.text}", "yellow")
            case kinds.Restart():
                self._show_pending()
                self._pending_restart = event
            case kinds.Pause():
                self._screen.say(f"pause {event.text}", "yellow")
            case kinds.Restarted():
                self._on_restarted(event)
            case kinds.Checked() if event.differs is None:
                self._screen.say(f"check {event.text}")  # a warning follows if a step differs
            case kinds.Resize():
                self._show_pending()
                self._screen.say(wording.resize_line(event), "yellow")
                self._screen.table(wording.slot_rows(event.slots))
            case kinds.Takeover():
                self._show_pending()
                text = f"{event.host} ({event.ip}) takes over the ranks of {event.of}"
                self._screen.say(text, "yellow")
            case kinds.Stop() if event.cause != StopReason.FAILURE.value:
                # The text of a failure follows in another event.
                self._screen.say(f"stop  {event.reason}", "yellow")
            case kinds.Result():
                self._on_result(event)

    def __exit__(self, *_: object) -> None:
        self._screen.close()

    def link(self, page: str) -> None:
        """Show the address of the run's page, if it has one.

        The address contains a token, so it is in no event.
        """
        if page:
            self._screen.say(f"page  {page}")

    def _on_warning(self, event: kinds.Warning) -> None:
        text, rank = event.text, event.rank
        if text in self._warnings:
            return  # shown once; the summary has its ranks and its count
        self._warnings.add(text)
        self._screen.say(f"warning: {text if rank is None else of_ranks(text, {rank})}", "yellow")

    def _on_restarted(self, event: kinds.Restarted) -> None:
        if event.resized or event.paused:
            what = "pause" if event.paused else "resize:"
            self._screen.say(f"{what} {wording.restart_cost(event)}", "green")
            return
        failure = f" {self._pending_restart.text};" if self._pending_restart else ""
        self._pending_restart = None
        self._screen.say(
            f"restart {event.number}:{failure} {wording.restart_cost(event)}{self._page()}",
            "yellow",
        )

    def _show_pending(self) -> None:
        """Show the pending restart on its own line, before an event that precedes the next step."""
        if self._pending_restart is not None:
            text = f"restart {self._pending_restart.number}: {self._pending_restart.text}"
            self._screen.say(text, "yellow")
        self._pending_restart = None

    def _page(self) -> str:
        return f" ({self._failures.found[-1].page})" if self._failures.found else ""

    def _on_result(self, event: kinds.Result) -> None:
        for line in self._output.rest():
            self._screen.say(line)
        self._show_pending()
        self._screen.close()
        style = "bold green" if event.status == "finished" else "bold red"
        self._screen.say(wording.headline(event.to_json(), self._progress.step), style)
        # An error from outside the ranks is raised to the caller, who prints it.
        if event.failure and not event.error:
            first, _, rest = event.failure.partition("\n")
            self._screen.say(first, "red")
            for line in [*filter(None, [rest]), *self._more(event)]:
                self._screen.say(line)
        rows = wording.summary(event.to_json(), self._progress.last_evaluation, brief=self._quiet)
        self._screen.facts(rows)
        for text in () if self._quiet else event.warnings:
            self._screen.say(f"  warning: {text}", "yellow")

    def _more(self, event: kinds.Result) -> list[str]:
        """Return the lines of the last failure's page that its own text lacks."""
        last = self._failures.found[-1:] if event.status == "failed" else []
        return [f"  {line}" for failure in last for line in page_lines(failure, event.dir)]


def screen(settings: Watch, stream: TextIO) -> Lines | Terminal:
    """Return the screen for these settings and this stream."""
    if hasattr(stream, "reconfigure"):
        # A stream that is not UTF-8 shows \u…; the run must not end with a UnicodeEncodeError.
        stream.reconfigure(errors="backslashreplace")
    alive = stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    if settings.progress in ("auto", "bar") and stream is sys.stdout and in_notebook():
        return Cell(stream, settings.every_s)
    if settings.progress == "bar" or (settings.progress == "auto" and alive):
        from raydist.reporting.terminal import Terminal

        return Terminal(stream)
    return Lines(stream, settings.every_s)
