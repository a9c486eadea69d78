"""The process on each other machine of a run that reports the loss of the driver's. (either side)

    python -m raydist.watch.notify.deputy    reads a Duty, a line of JSON, then lines of its agents

While the driver lives, it reads one line per second. It listens on no port, and no other process of
its user can read its memory, which contains the webhook.
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
from raydist.shared import env_names
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
"""From prctl(2): 0 forbids other processes to read this one's memory."""
FIRST_CALLS = 3
"""Number of calls at the start; one of them must be answered."""
STORAGE_S = 10.0
"""Limit on the wait for the storage of the run folder: the lost machine may be its file server."""
DELIVER_S = 30.0
"""Limit on the delivery of one message."""


class AgentLines:
    """The lines that the agents of this machine write to standard input."""

    def __init__(self) -> None:
        self.left = False
        """Whether all agents of this machine are gone."""
        self._whole: list[bytes] = []
        self._cut = b""

    def next(self, seconds: float) -> bytes:
        """Return the next line; empty if none arrives in time, or the agents are gone.

        Once they are gone, it waits for `seconds`.
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
    """Watches the driver's machine, and reports its loss if no other deputy does."""

    def __init__(self, duty: Duty, lines: AgentLines) -> None:
        self._duty = duty
        self._lines = lines
        self._born = time.monotonic()
        self._step = 0
        self._quiet_since = time.monotonic()
        """When the driver last sent something, or its machine answered, on the monotonic clock."""
        self._heard_at = time.time()
        """The same in seconds since the epoch."""
        self._dismissed = False
        self._answered = False
        """As in Signs."""
        self._unanswered_calls = 0

    def run(self) -> None:
        """Watch until the run is over, or the loss of the driver's machine is reported."""
        if not any(machine_answers(self._duty.driver) for _ in range(FIRST_CALLS)):
            say(f"this machine cannot reach {self._duty.driver}: it does not watch the driver")
            return
        while (act := next_act(self._signs)) != "end":
            until = time.monotonic() + EVERY_S
            if act == "ask" and self._is_lost():
                self._report_loss()
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
            quiet_s=time.monotonic() - self._quiet_since,
            unanswered_calls=self._unanswered_calls,
        )

    def _listen(self, until: float) -> None:
        """Read lines until this time on the monotonic clock, or until the agents are gone."""
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
        self._quiet_since, self._heard_at = time.monotonic(), time.time()
        self._unanswered_calls = 0

    def _call(self) -> None:
        """Connect to the driver's machine, and note whether it answers."""
        # Only an answer to a call that began after the agents had gone shows that the machine is
        # not lost, and that the driver alone has died.
        left = self._lines.left
        if machine_answers(self._duty.driver):
            self._note_sign()
            self._answered = left
        else:
            self._unanswered_calls += 1

    def _is_lost(self) -> bool:
        """Return whether the driver's machine is lost, and this one is not just cut off."""
        others = others_to_ask(self._duty.nodes, self._duty.own)
        answered = sum(which_answer(others))
        cut_off = is_cut_off(len(others), answered)
        if cut_off and self._unanswered_calls == LOST:
            count = f"only {answered} of {len(others)} others do"
            say(f"{self._duty.driver} does not answer, but {count}: this machine may be cut off")
        return not cut_off

    def _report_loss(self) -> None:
        """Send the message to each receiver, unless another deputy does."""
        lower = any_answers(self._duty.nodes[: self._duty.own])
        message = self._message()
        for name in self._duty.receivers:
            mine = claim_in_time(Path(self._duty.folder), name, self._duty.ledgers[name])
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
    """Return whether a machine answers; a refused connection is an answer, too."""
    try:
        socket.create_connection((raylet.ip, raylet.port), CALL_S).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


def which_answer(raylets: Sequence[Raylet]) -> list[bool]:
    """Return for each machine whether it answers; call MAX_ASKED of them at a time."""
    with ThreadPoolExecutor(MAX_ASKED) as pool:
        return [*pool.map(machine_answers, raylets)]


def any_answers(raylets: Sequence[Raylet]) -> bool:
    """Return whether any of these machines answers."""
    parts = (raylets[first : first + MAX_ASKED] for first in range(0, len(raylets), MAX_ASKED))
    return any(any(which_answer(part)) for part in parts)


def claim_message(folder: Path, name: str, ledger_id: str) -> Claim:
    """Claim the right to send the message, by a file in the run folder that one machine can create.

    `name`: webhook or command. `ledger_id`: the id of the receiver's ledger; a ledger with another
    id is in another folder with the same path. The ledger then has the message, so that a run that
    resumes this one does not send it again.
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


def claim_in_time(folder: Path, name: str, ledger_id: str) -> Claim:
    """Return what `claim_message` returns; "" if the storage does not answer within STORAGE_S."""
    found: list[Claim] = []
    thread = threading.Thread(
        target=lambda: found.append(claim_message(folder, name, ledger_id)), daemon=True
    )
    thread.start()
    thread.join(STORAGE_S)
    return found[0] if found else ""


def enter_folder(path: str) -> None:
    """Make this the current folder, if it exists here and no other user could have created it."""

    def enter() -> None:
        with suppress(OSError):
            if of_others(Path(path)) is None:
                os.chdir(path)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(STORAGE_S)


def say(*texts: Any) -> None:
    """Print to standard error: the log of the Ray worker that started this process."""
    print("raydist, deputy:", *texts, file=sys.stderr, flush=True)


def main() -> None:
    """Detach from the agents' process, read the duty, and carry it out."""
    if os.fork():
        os._exit(0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    os.dup2(2, 1)  # the output of a command goes to the log
    "".encode("idna")  # a name lookup imports it, perhaps from a disk that is lost by then
    lines = AgentLines()
    first = b""
    while not first and not lines.left:
        first = lines.next(EVERY_S)
    if not first:  # the agents have ended
        return
    duty = read_duty(first)
    os.environ.update(duty.env)
    if "PYTHONPATH" in duty.env:
        os.environ[env_names.PYTHONPATH_BEFORE] = duty.env["PYTHONPATH"]
    Deputy(duty, lines).run()


if __name__ == "__main__":
    main()
    os._exit(0)  # a thread may block on a dead file server
