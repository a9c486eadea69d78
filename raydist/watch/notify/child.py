"""The main loop: follows events.jsonl and sends each kind of message once. (driver)

python -m raydist.watch.notify.child    reads a Task as a line of JSON; ends with the run
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from pathlib import Path

from raydist.settings.config import Notify
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.record_names import EVENTS
from raydist.watch.notify import END_S
from raydist.watch.notify.delivery import receiver
from raydist.watch.notify.message import About, Messages, RunMessage
from raydist.watch.trackers import Ledger, Task
from raydist.watch.trackers.child import LOOK_S, Life, Say, follow_run, read_on

DELIVER_S = END_S / 2
"""Limit on the delivery of one message: half of END_S, because another message may be under way
when the run ends."""


class Notifier:
    """Sends the messages of one run to one receiver."""

    def __init__(self, task: Task, say: Say, life: Life) -> None:
        self._task = task
        self._say = say
        self._life = life
        life.opened.set()
        self._folder = Path(task.folder)
        self._ledger = Ledger.read(self._folder, task.name)
        notify = Notify(**task.notify)
        self._events = notify.events
        self._deliver = receiver(task.name, notify)
        self._messages = Messages(
            About(f"{task.project}/{task.run}", socket.gethostname(), task.folder)
        )

    def run(self) -> None:
        """Follow the events until the run has a result, or the driver is gone."""
        lines = read_on(self._folder / EVENTS, self._task.begin)
        over = ended = False
        while not over and not ended:
            over = self._life.over.is_set()
            for happened in next(lines):
                ended = ended or isinstance(happened, kinds.Result)
                self._take(happened)
            if not over and not ended:
                self._life.over.wait(LOOK_S)
        if ended:
            return
        if self._life.end_was_announced():  # the result is missing because the disk is full
            self._warn("no message about the end of the run: it is not in events.jsonl")
        else:
            self._send(self._messages.driver_died(time.time()))

    def _take(self, happened: Event) -> None:
        """Process one event; skip one that cannot be processed, with a warning."""
        try:
            message = self._messages.add(happened)
        except Exception as error:
            traceback.print_exc()
            self._warn(f"an event `{happened.kind}` is skipped: {type(error).__name__}: {error}")
            return
        if message is not None:
            self._send(message)

    def _send(self, message: RunMessage) -> None:
        """Send a message, unless its kind is not in notify.events or was sent before."""
        # The file as well: a deputy that did not reach this machine may have sent it meanwhile.
        sent = {*self._ledger.sent_kinds, *Ledger.read(self._folder, self._task.name).sent_kinds}
        if message.event not in self._events or message.event in sent:
            return
        # Noted before it is sent, so that a kill in between does not make another process send it
        # again.
        self._ledger.sent_kinds.append(message.event)
        self._ledger.write(self._folder, self._task.name)
        try:
            why = self._deliver(message, time.monotonic() + DELIVER_S)
        except Exception as error:
            traceback.print_exc()
            why = type(error).__name__
        if why:
            self._warn(f"the message `{message.event}` was not delivered: {why}")

    def _warn(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # to the log, because the driver may be gone
        self._say(warning=f"notify.{self._task.name}: {text}")


if __name__ == "__main__":
    follow_run(Notifier, END_S)
