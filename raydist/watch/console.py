"""What the person sees of a run, drawn from its events: a live bar in a terminal, plain lines elsewhere. (driver)"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TextIO

from raydist.config import Watch
from raydist.events import Event
from raydist.failures import Failures
from raydist.watch import wording
from raydist.watch.lines import Lines
from raydist.watch.output import Output
from raydist.watch.page import brief
from raydist.watch.progress import Progress

if TYPE_CHECKING:
    from raydist.watch.terminal import Terminal


class Console(AbstractContextManager["Console"]):
    """A reader of events. It is called by the driver itself, so it only writes down what comes, and redraws seldom."""

    def __init__(self, settings: Watch, stream: TextIO | None = None) -> None:
        self._quiet = settings.progress == "none"
        self._screen = screen(settings, sys.stdout if stream is None else stream)
        self._progress = Progress()
        self._output = Output(settings.output)
        self._warned: set[str] = set()
        self._failures = Failures()
        self._broken: Event | None = None

    def __call__(self, happened: Event) -> None:
        kind = happened["kind"]
        self._failures.add(happened)
        if not self._quiet or kind in ("warning", "output", "result"):
            # Kinds that nobody here has a word for are not for the screen.
            getattr(self, f"_on_{kind}", _ignore)(happened)

    def __exit__(self, *_: object) -> None:
        self._screen.close()

    def _on_run(self, happened: Event) -> None:
        self._screen.say(f"run   {happened['name']}, in {happened['dir']}", "bold")

    def _on_cluster(self, happened: Event) -> None:
        self._screen.say(wording.cluster(happened))

    def _on_wait(self, happened: Event) -> None:
        self._break()
        self._screen.say(f"wait  {happened['text']}", "yellow")

    def _on_avoid(self, happened: Event) -> None:
        self._screen.say(f"node  {happened['text']}", "yellow")

    def _on_plan(self, happened: Event) -> None:
        self._screen.say(wording.plan(happened))
        self._screen.table(wording.seats(happened))

    def _on_phase(self, happened: Event) -> None:
        self._screen.phase(happened["name"], happened["s"])

    def _on_warning(self, happened: Event) -> None:
        text = happened["text"]
        if text in self._warned:
            return  # told once; the summary says how often, and by whom
        self._warned.add(text)
        whose = f" (rank {happened['rank']})" if happened.get("rank") is not None else ""
        self._screen.say(f"warning: {text}{whose}", "yellow")

    def _on_begin(self, happened: Event) -> None:
        if happened.get("rank") == 0:
            self._progress.begin(happened)
            if happened.get("resumed"):
                self._screen.say(f"goes on from step {happened['resumed']}")

    def _on_report(self, happened: Event) -> None:
        if happened.get("rank") == 0:
            self._screen.draw(self._progress, happened["t"], self._progress.report(happened))

    def _on_saved(self, happened: Event) -> None:
        self._screen.saved(self._progress, happened["t"])

    def _on_output(self, happened: Event) -> None:
        for line in self._output.lines(happened["rank"], happened["output"]):
            self._screen.say(line)

    def _on_hang(self, happened: Event) -> None:
        self._screen.say(f"hang  silent for {happened['s']:.0f} s: {happened['text']}", "yellow")

    def _on_notice(self, happened: Event) -> None:
        self._screen.say(f"notice {happened['text']}", "yellow")

    def _on_slow(self, happened: Event) -> None:
        self._screen.say(f"slow  {happened['text']}", "yellow")

    def _on_restart(self, happened: Event) -> None:
        self._break()
        self._broken = happened

    def _on_restarted(self, happened: Event) -> None:
        if happened.get("resized"):
            self._screen.say(f"resize: {wording.back(happened)}", "green")
            return
        what = f" {self._broken['text']};" if self._broken else ""
        self._broken = None
        self._screen.say(f"restart {happened['number']}:{what} {wording.back(happened)}{self._page()}", "yellow")

    def _break(self) -> None:
        """Say what broke, where more than a moment lies between that and the next step."""
        if self._broken is not None:
            self._screen.say(f"restart {self._broken['number']}: {self._broken['text']}", "yellow")
        self._broken = None

    def _page(self) -> str:
        return f" ({self._failures.found[-1].page})" if self._failures.found else ""

    def _on_resize(self, happened: Event) -> None:
        self._break()
        self._screen.say(wording.resize(happened), "yellow")
        self._screen.table(wording.seats(happened))

    def _on_takeover(self, happened: Event) -> None:
        self._break()
        self._screen.say(f"{happened['host']} ({happened['ip']}) takes over the ranks of {happened['of']}", "yellow")

    def _on_stop(self, happened: Event) -> None:
        if happened["reason"] != "a rank failed":  # which one, and how, comes next
            self._screen.say(f"stop  {happened['reason']}", "yellow")

    def _on_result(self, happened: Event) -> None:
        for line in self._output.rest():
            self._screen.say(line)
        self._break()
        self._screen.close()
        good = happened["status"] == "finished"
        self._screen.say(wording.headline(happened, self._progress.step), "bold green" if good else "bold red")
        # What ended the run from outside the ranks is raised to the caller, who says it.
        if happened.get("failure") and not happened.get("error"):
            first, _, rest = happened["failure"].partition("\n")
            self._screen.say(first, "red")
            for line in [*filter(None, [rest]), *self._more(happened)]:
                self._screen.say(line)
        self._screen.facts(wording.summary(happened, self._progress.evaluated, brief=self._quiet))
        for text in () if self._quiet else happened.get("warnings", ()):
            self._screen.say(f"  warning: {text}", "yellow")

    def _more(self, happened: Event) -> list[str]:
        """Of the page of the failure that ended the run, what its own text does not say."""
        last = self._failures.found[-1:] if happened["status"] == "failed" else []
        return [f"  {line}" for failure in last for line in brief(failure, happened["dir"])]


def _ignore(happened: Event) -> None:
    pass


def screen(settings: Watch, stream: TextIO) -> Lines | Terminal:
    """The screen that the settings and the stream ask for."""
    if hasattr(stream, "reconfigure"):
        # A terminal or a log that isn't UTF-8 shows \u…; it must not end the run with a UnicodeEncodeError.
        stream.reconfigure(errors="backslashreplace")
    alive = stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown", "")
    if settings.progress == "bar" or (settings.progress == "auto" and alive):
        from raydist.watch.terminal import Terminal  # rich takes its time to import

        return Terminal(stream)
    return Lines(stream, settings.every_s)
