"""Events of a run -> its messages, and their forms. (pure)"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from raydist.reporting.advice import advice_for, refuses_checkpoint
from raydist.reporting.page import end_of
from raydist.reporting.progress import duration
from raydist.reporting.result import Figures
from raydist.reporting.wording import flat, signal_name
from raydist.shared import env_names, kinds
from raydist.shared.kinds import Event

LONGEST = 300
"""Maximum characters of a cause; the failure page has all of it."""
VERBS = {
    "failed": "failed",
    "hung": "hangs",
    "slow": "has a slow rank",
    "finished": "has finished",
    "stopped": "was stopped",
}
"""By event: the verb of the message's title."""
DIED = (
    "the driver ended without a result: it was killed, ran out of memory, or was interrupted twice"
)


@dataclass(frozen=True)
class RunMessage:
    """One message about a run; its fields are those of the JSON."""

    event: str
    """failed, hung, slow, finished or stopped."""
    run: str
    """NAME/FOLDER."""
    cause: str
    """What happened first, on one line; empty if all went well."""
    todo: str
    """What to do now, on one line; empty if there is nothing to do."""
    host: str
    """The driver's machine."""
    dir: str
    """The run folder on that machine."""
    page: str
    """The path of the failure's page in that folder; empty if there is none."""
    t: float
    """When it happened, in seconds since the epoch."""
    duration_s: float
    """Seconds since the run began."""
    goodput: float | None
    """The fraction of that time that was spent in steps that counted; None if it is unknown."""

    @property
    def title(self) -> str:
        return f"{self.run} {VERBS[self.event]} after {duration(self.duration_s)}"

    @property
    def lines(self) -> list[str]:
        """The text of the message without its title."""
        rows = {
            "cause": self.cause,
            "what to do": self.todo,
            "page": self.page,
            "folder": f"{self.dir} on {self.host}",
            "goodput": "" if self.goodput is None else f"{self.goodput:.0%}",
        }
        return [f"{name}: {value}" for name, value in rows.items() if value]

    def as_json(self) -> str:
        """Return all fields as JSON, with the title and the whole text."""
        text = "\n".join([self.title, *self.lines])
        return json.dumps({**asdict(self), "title": self.title, "text": text})

    def as_slack(self) -> str:
        """Return the JSON of Slack's incoming webhooks."""
        body = "\n".join([f"*{escaped(self.title)}*", *map(escaped, self.lines)])
        return json.dumps({"text": body})

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables for a command."""
        parts = {
            "EVENT": self.event,
            "RUN": self.run,
            "TITLE": self.title,
            "CAUSE": self.cause,
            "TEXT": "\n".join(self.lines),
            "DIR": self.dir,
        }
        return {f"{env_names.NOTIFY}{name}": value for name, value in parts.items()}


def escaped(text: str) -> str:
    """Escape the three characters that have a meaning in Slack's texts."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


@dataclass(frozen=True)
class About:
    """The run that messages are about."""

    run: str
    host: str
    dir: str


class Messages:
    """Turns the events of a run into messages, in the order of the events."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._figures = Figures()
        self._kept = False
        """Whether the run has had a state in memory."""

    def add(self, happened: Event) -> RunMessage | None:
        """Process one event; return the message that follows from it, if any."""
        self._figures.add(happened)
        folder = self._about.dir
        match happened:
            case kinds.Report(kept=int()):
                self._kept = True
            case kinds.Hang():
                todo = f"raydist stacks {folder} shows where each rank is"
                return self._message("hung", happened.t, happened.text, todo)
            case kinds.Slow():
                todo = f"raydist ranks {folder} compares the ranks"
                return self._message("slow", happened.t, happened.text, todo)
            case kinds.Result(status="stopped"):
                cause = f"stopped by {signal_name(happened.signal)}"
                todo = self._resume() if happened.checkpoint else ""
                return self._message("stopped", happened.t, cause, todo)
            case kinds.Result(status="failed"):
                return self._run_failed(happened)
            case kinds.Result():
                return self._message("finished", happened.t, "", "")
        return None

    def driver_died(self, now: float) -> RunMessage:
        """Return the message about the driver's death. `now`: in seconds since the epoch."""
        self._figures.ended_at = now
        todo = "find out what ended it: dmesg, the batch system, a closed session"
        _, earlier = self._figures.failures.resumed_from
        if self._kept or self._figures.checkpoint:  # what is in memory is saved without the driver
            resume = self._resume()
        elif earlier:
            resume = to_continue(earlier)
        else:  # a loop that reports nothing may have saved a state all the same
            resume = f"if the run has left a checkpoint, {self._resume()}"
        return self._message("failed", now, DIED, f"{todo}; {resume}")

    def _run_failed(self, result: kinds.Result) -> RunMessage:
        """Return the message about a run that failed; it has a page if a rank failed."""
        cause = (result.failure or result.error).partition("\n")[0]
        if not result.cause:
            return self._message("failed", result.t, cause, "")
        failures = self._figures.failures.found
        end = end_of(result.cause)
        advice = [advice_for(end)]
        if result.checkpoint and not refuses_checkpoint(end):
            advice.append(self._resume())
        page = f"{self._about.dir}/{failures[-1].page}" if failures else ""
        return self._message("failed", result.t, cause, "; ".join(filter(None, advice)), page)

    def _resume(self) -> str:
        return to_continue(self._about.dir)

    def _message(self, event: str, t: float, cause: str, todo: str, page: str = "") -> RunMessage:
        goodput = self._figures.known_goodput
        return RunMessage(
            event=event,
            run=self._about.run,
            cause=shortened(cause),
            todo=todo,
            host=self._about.host,
            dir=self._about.dir,
            page=page,
            t=t,
            duration_s=round(self._figures.wall_s, 3),
            goodput=None if goodput is None else round(goodput, 4),
        )


@dataclass(frozen=True)
class LastSign:
    """What another machine of the run knows when that of the driver is lost."""

    address: str
    """The address of the driver's machine."""
    heard_at: float
    """When the last message of the driver arrived, in seconds since the epoch."""
    step: int
    """The newest step then; 0 if none is known."""
    passed_s: float
    """Seconds since the run began."""
    teller: str
    """The machine that sends the message."""


def machine_lost(about: About, sign: LastSign) -> RunMessage:
    """Return the message that the driver's machine does not answer."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(sign.heard_at))
    step = f"the last known step is {sign.step}" if sign.step else "no step was reported before"
    return RunMessage(
        event="failed",
        run=about.run,
        cause=shortened(
            f"the driver's machine, {about.host} ({sign.address}), has not answered {sign.teller} "
            f"since {since} UTC; {step}"
        ),
        todo=f"see whether {about.host} has power and network; {to_continue(about.dir)}",
        host=about.host,
        dir=about.dir,
        page="",
        t=sign.heard_at,
        duration_s=round(sign.passed_s, 3),
        goodput=None,
    )


def to_continue(path: str) -> str:
    """Return a text that tells how to continue the run of this folder, or from this checkpoint."""
    return f"to continue: the same command with {shlex.quote(f'resume={path}')}"


def shortened(cause: str) -> str:
    """Return a cause as one line of at most LONGEST characters."""
    one_line = flat(cause)
    return one_line if len(one_line) <= LONGEST else f"{one_line[: LONGEST - 3]}..."
