"""The process on each other machine of a run that tells if the driver's is lost. (either side)

    python -m raydist.watch.notify.deputy    reads a Duty, a line of JSON, then lines of its agents

It costs one line in a second while the driver lives. It listens nowhere, and no other process of
its user can read its memory, which has the webhook.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from raydist.messages.deputy import DISMISSED, Duty, Raylet, read_duty
from raydist.settings.config import Notify
from raydist.shared.own_path import of_others
from raydist.watch.notify.delivery import receiver
from raydist.watch.notify.message import About, LastSign, RunMessage, machine_lost
from raydist.watch.notify.who_tells import (
    CALL_S,
    EVERY_S,
    LOST,
    MAX_ASKED,
    Claim,
    Signs,
    is_cut_off,
    next_act,
    others_to_ask,
    tells,
)
from raydist.watch.trackers import Ledger

PR_SET_DUMPABLE = 4
"""Of prctl(2)."""
FIRST_CALLS = 3
"""Calls at the start, of which one must be answered."""
STORAGE_S = 10.0
"""Longest wait for the storage of the run folder: the lost machine may be its file server."""
DELIVER_S = 30.0
"""Longest time for one message."""


class AgentLines:
    """The lines that the agents of this machine write, until they are gone."""

    def __init__(self) -> None:
        self.left = False
        """Whether nobody can write any more."""
        self._whole: list[bytes] = []
        self._cut = b""

    def next(self, seconds: float) -> bytes:
        """Return the next line; empty if none comes within so many seconds, or the agents are gone.

        Once they are gone it only waits.
        """
        until = time.monotonic() + seconds
        while not self._whole:
            if self.left:
                time.sleep(max(0.0, until - time.monotonic()))
                return b""
            if not select.select([0], [], [], max(0.0, until - time.monotonic()))[0]:
                return b""
            if not (block := os.read(0, 1 << 16)):
                self.left = True
                return b""
            *self._whole, self._cut = (self._cut + block).splitlines(keepends=True) or [b""]
            if self._cut.endswith(b"\n"):
                self._whole, self._cut = [*self._whole, self._cut], b""
        return self._whole.pop(0)


class Deputy:
    """Watches the driver's machine, and tells its loss if that falls to this machine."""

    def __init__(self, duty: Duty, lines: AgentLines) -> None:
        self._duty = duty
        self._lines = lines
        self._born = time.monotonic()
        self._step = 0
        self._heard = time.monotonic()
        self._heard_at = time.time()
        """The same in seconds since the epoch."""
        self._dismissed = self._answered = False
        self._unanswered = 0

    def run(self) -> None:
        """Watch until there is nothing to tell, or it is told."""
        if not any(machine_answers(self._duty.driver) for _ in range(FIRST_CALLS)):
            say(f"this machine cannot reach {self._duty.driver}: it does not watch the driver")
            return
        while (act := next_act(self._signs)) != "end":
            until = time.monotonic() + EVERY_S
            if act == "ask" and self._is_lost():
                self._tell_all()
                return
            if act != "listen":
                self._call()
            if not self._answered:
                self._listen(until)

    @property
    def _signs(self) -> Signs:
        return Signs(
            dismissed=self._dismissed,
            left=self._lines.left,
            answered=self._answered,
            quiet_s=time.monotonic() - self._heard,
            unanswered_calls=self._unanswered,
        )

    def _listen(self, until: float) -> None:
        """Read lines until this time of the monotonic clock, or the agents are gone."""
        left = self._lines.left
        while not self._dismissed and self._lines.left == left:
            line = self._lines.next(max(0.0, until - time.monotonic()))
            self._dismissed = line == DISMISSED
            if line.strip().isdigit():
                self._step = int(line)
                self._note_sign()
            if time.monotonic() >= until:
                return

    def _note_sign(self) -> None:
        self._heard, self._heard_at, self._unanswered = time.monotonic(), time.time(), 0

    def _call(self) -> None:
        """Call the driver's machine."""
        left = self._lines.left  # a call from before does not show who has ended the agents
        if machine_answers(self._duty.driver):
            self._note_sign()
            self._answered = left
        else:
            self._unanswered += 1

    def _is_lost(self) -> bool:
        """Return whether others answer, so that it is not this machine that is cut off."""
        asked = others_to_ask(self._duty.nodes, self._duty.own)
        answered = sum(answering(asked))
        cut_off = is_cut_off(len(asked), answered)
        if cut_off and self._unanswered == LOST:
            others = f"only {answered} of {len(asked)} others do"
            say(f"{self._duty.driver} does not answer, but {others}: this machine may be cut off")
        return not cut_off

    def _tell_all(self) -> None:
        lower = any_answers(self._duty.nodes[: self._duty.own])
        message = self._message()
        for name in self._duty.receivers:
            mine = claimed_in_time(Path(self._duty.folder), name, self._duty.ledgers[name])
            if tells(mine, lower):
                say(message.title, message.cause)
                self._deliver(name, message)

    def _deliver(self, name: str, message: RunMessage) -> None:
        if name == "command":
            enter_folder(self._duty.cwd)
        settings: Mapping[str, Any] = self._duty.receivers[name]
        notify = Notify(**settings)
        if why := receiver(name, notify)(message, time.monotonic() + DELIVER_S):
            say(f"notify.{name}: the message `{message.event}` was not delivered: {why}")

    def _message(self) -> RunMessage:
        duty = self._duty
        sign = LastSign(
            address=duty.driver.ip,
            heard_at=self._heard_at,
            step=self._step,
            passed_s=duty.elapsed_s + time.monotonic() - self._born,
            teller=duty.nodes[duty.own].host,
        )
        return machine_lost(About(duty.run, duty.driver.host, duty.folder), sign)


def machine_answers(raylet: Raylet) -> bool:
    """Return whether a machine answers at all; that nobody listens there is an answer, too."""
    try:
        socket.create_connection((raylet.ip, raylet.port), CALL_S).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


def answering(raylets: Sequence[Raylet]) -> list[bool]:
    """Return for each machine whether it answers; MAX_ASKED of them are called at a time."""
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        return [*pool.map(machine_answers, raylets)]


def any_answers(raylets: Sequence[Raylet]) -> bool:
    """Return whether one of these machines answers."""
    parts = (raylets[first : first + MAX_ASKED] for first in range(0, len(raylets), MAX_ASKED))
    return any(any(answering(part)) for part in parts)


def claim_message(folder: Path, name: str, ledger_id: str) -> Claim:
    """Claim the right to tell a receiver, by a file in the run folder that one machine can create.

    `name`: webhook or command. `ledger_id`: the id of its ledger; with another one this is another
    folder. The run that resumes this one then does not tell it again.
    """
    ledger = Ledger.read(folder, name)
    if ledger.id != ledger_id:
        return ""
    if "failed" in ledger.sent_kinds:
        return "taken"
    path = folder / Ledger.FOLDER / f"{name}-{ledger_id}.lost"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return "taken"
    except OSError:  # read-only, or full
        return ""
    ledger.sent_kinds.append("failed")
    ledger.write(folder, name)
    return "mine"


def claimed_in_time(folder: Path, name: str, ledger_id: str) -> Claim:
    """Return what `claim_message` does; "" if the storage does not answer within STORAGE_S."""
    found: list[Claim] = []
    thread = threading.Thread(
        target=lambda: found.append(claim_message(folder, name, ledger_id)), daemon=True
    )
    thread.start()
    thread.join(STORAGE_S)
    return found[0] if found else ""


def enter_folder(path: str) -> None:
    """Make this the current folder, if it is there and nobody else can have made it here."""

    def enter() -> None:
        with suppress(OSError):
            if of_others(Path(path)) is None:
                os.chdir(path)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(STORAGE_S)


def say(*texts: Any) -> None:
    """Print to the log of the Ray worker that started this process."""
    print("raydist, deputy:", *texts, file=sys.stderr, flush=True)


def main() -> None:
    """Leave the agents' process, read the duty, and do it."""
    if os.fork():
        os._exit(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    os.dup2(2, 1)  # what a command prints
    "".encode("idna")  # a lookup of a name imports it, maybe from a disk that is lost by then
    lines = AgentLines()
    first = b""
    while not first and not lines.left:
        first = lines.next(EVERY_S)
    if not first:  # the agents have ended
        return
    duty = read_duty(first)
    os.environ.update(duty.env)
    Deputy(duty, lines).run()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread may wait for a dead file server
