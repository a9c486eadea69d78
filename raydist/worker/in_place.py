"""A rank that outlives another: it leaves its step, and joins the next attempt. (rank side)

The main thread trains; the thread of the channel gets the agent's messages.

    MeetRequest -> <- Meet the rank is ready; the driver sends each rank the contacts of all
    <- ParkRank            another rank was killed: leave the step, wherever the rank is
    ParkReply ->           it waits, or it can't, and is killed
    <- GoOn                the next attempt begins: the ranks meet again

A rank that waits for a dead one does not notice by itself: gloo reports only a connection that
breaks, and a rank may wait for another survivor. Therefore ParkRank breaks all connections to other
ranks, which raises an error in every unfinished collective.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn, Protocol, TypeVar

from raydist.messages.rank import GoOn, Meet, ParkRank, ParkReply, RankMessage
from raydist.shared import kinds
from raydist.shared.errors import RaydistError
from raydist.shared.kinds import Event

T = TypeVar("T")
Address = tuple[str, int]

PATIENCE_S = 5.0
"""Seconds that a rank which has lost a peer waits for ParkRank before it fails: the driver learns
of a killed rank within milliseconds, but of a lost node only later."""
AGAIN_S = 0.02
"""Seconds between two attempts to break all connections: the rank may be opening new ones."""
CLOSED_S = 0.002
"""Seconds between two looks whether gloo has closed them all."""
STUCK_S, STUCK_CPU_S = 0.5, 0.02
"""Seconds within which gloo closes a connection that was broken, and seconds of this process's CPU
time: a thread of gloo that cannot close one tries again without a pause."""
NOT_CLOSED = "gloo did not close a broken connection"
NOT_INSIDE = "it was not in raydist.fit, nor in the steps of raydist.Recoverable"


class PeerLost(Exception):
    """Another rank was killed, and this one is to leave its step."""


class Group(Protocol):
    """A process group that can be connected anew."""

    def handle(self) -> str:
        """Return what the other ranks need to know of this one."""
        ...

    def connect(self, number: int, handles: Sequence[str]) -> None:
        """Connect to all ranks, of which these are the handles, by rank."""
        ...


class InPlace:
    """Keeps one rank's process through attempts."""

    def __init__(
        self, rank: int, send: Callable[[Event], None], reply: Callable[[ParkReply], None]
    ) -> None:
        """`send`, `reply`: send an event, and a message, to the agent."""
        self.why_not = NOT_INSIDE
        """Why the rank can't leave what it does."""
        self.met_ns = 0
        """When the ranks of this attempt met, in nanoseconds since the epoch."""
        self._rank = rank
        self._send = send
        self._reply = reply
        self._messages: queue.SimpleQueue[RankMessage] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards `why_not`, `_called` and `_breaking`."""
        self._called = threading.Event()
        """Set while the rank is to leave its step, or waits for the next attempt."""
        self._breaking: tuple[threading.Thread, threading.Event] | None = None
        """The thread that breaks connections, and the event that ends it."""
        self._addresses: frozenset[Address] = frozenset()
        """Where the ranks listen for each other."""

    # The channel's thread.

    def take(self, message: RankMessage) -> None:
        """Handle a message of the agent, in the channel's thread."""
        if not isinstance(message, ParkRank):
            if isinstance(message, GoOn):
                # Not when the main thread gets it: a rank of the new attempt may have been killed
                # by then, and its ParkRank must not be taken for the one before.
                with self._lock:
                    self._called.clear()
            self._messages.put(message)
            return
        with self._lock:
            if self.why_not:
                self._reply(ParkReply(self.why_not))
            elif not self._called.is_set():
                out = threading.Event()
                breaking = threading.Thread(
                    target=self._break_connections, args=(out,), name="raydist-park", daemon=True
                )
                self._breaking = (breaking, out)
                breaking.start()
                self._messages.put(message)  # for a main thread that waits in meet()
                self._called.set()

    def _break_connections(self, out: threading.Event) -> None:
        """Break all connections until the main thread is out and gloo has closed them.

        gloo closes a broken connection when it reads from it. It does not read while it has the
        beginning of a message for a collective that has failed: another one that waits for the same
        rank never ends then, and the first barrier of the next attempt waits for it. Its thread
        spins meanwhile, by which such a rank is known early, also on a busy machine.
        """
        since: dict[str, float] = {}
        used_before = math.inf
        """The CPU time of this process when the main thread was out."""
        while True:
            is_out = out.is_set()  # from now on the main thread opens no connection
            now = time.monotonic()
            broken = dict.fromkeys(break_connections(self._addresses), now)
            there = {name for name, _ in sockets()}
            since = {name: at for name, at in {**broken, **since}.items() if name in there}
            if is_out and not since:
                return
            if is_out:
                used_before = min(used_before, time.process_time())
            spins = time.process_time() - used_before > STUCK_CPU_S
            if spins or any(now - at > STUCK_S for at in since.values()):
                with self._lock:
                    self.why_not = NOT_CLOSED
                self._reply(ParkReply(NOT_CLOSED))
                return
            if is_out:
                time.sleep(CLOSED_S)
            else:
                out.wait(AGAIN_S)

    # The main thread.

    def meet(self, group: Group, addresses: Sequence[Address], within_s: float) -> None:
        """Connect to all other ranks.

        `addresses`: where this rank listens for them. `within_s`: limit on the wait until all are
        ready. RaydistError: they were not.
        """
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        contact = json.dumps([group.handle(), addresses])
        self._send(kinds.MeetRequest(rank=self._rank, number=number, contact=contact))
        until = time.monotonic() + within_s
        message: RankMessage | None = None
        while not (isinstance(message, Meet) and message.number == number):
            try:
                message = self._messages.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise RaydistError(
                    f"some ranks did not start within backend.timeout_s={within_s:g}"
                ) from None
            if isinstance(message, ParkRank):
                raise PeerLost
        contacts = [json.loads(each) for each in message.contacts]
        self._addresses = frozenset((host, port) for _, here in contacts for host, port in here)
        self.met_ns = time.time_ns()
        group.connect(number, [handle for handle, _ in contacts])

    def add(self, addresses: Iterable[Address]) -> None:
        """Note more addresses where ranks listen for each other, in this attempt."""
        self._addresses |= {*addresses}

    def refuse(self, why: str) -> None:
        """Continue in no other attempt, for this reason.

        The agent learns it now: a rank that loses a peer may fail before it is asked.
        """
        with self._lock:
            self.why_not = why
        self._reply(ParkReply(why))

    def outlive(
        self, train: Callable[[], T], meet_again: Callable[[], None], why_not: Callable[[], str]
    ) -> T:
        """Return what `train` returns; call it again whenever another rank was killed meanwhile.

        `meet_again`: connects to the ranks of the next attempt. `why_not`: returns why this rank
        can't go back to the common step, empty if it can.
        """
        self.enter()
        begin: Callable[[], None] | None = None
        while True:
            try:
                if begin is not None:
                    begin()
                result = train()
                self.leave()
                return result
            except Exception as error:
                if not self.is_called(error):
                    raise
            self.park(why_not())
            begin = meet_again

    def enter(self) -> None:
        """Begin a part of the job that can leave its step when it is called."""
        with self._lock:
            self.why_not = ""

    def leave(self) -> None:
        """End that part; raise PeerLost if the rank was called before."""
        with self._lock:
            if self._called.is_set():
                raise PeerLost
            self.why_not = NOT_INSIDE

    def check(self) -> None:
        """Raise PeerLost if the rank was called."""
        if self._called.is_set():
            raise PeerLost

    def is_called(self, error: Exception) -> bool:
        """Return whether to leave the step; if not, the rank fails with this error.

        A rank that has lost a peer often notices before the driver does.
        """
        if has_lost_peer(error):
            self._called.wait(PATIENCE_S)
        with self._lock:
            if not self._called.is_set():
                self.why_not = NOT_INSIDE
                return False
        # The frames hold the model's wrapper, the iterators of the data, and tensors.
        traceback.clear_frames(error.__traceback__)
        return True

    def park(self, why_not: str) -> None:
        """Wait for the next attempt; or to be killed, if this rank can't continue in it."""
        with self._lock:
            assert self._breaking is not None, "the rank was called"
            breaking, out = self._breaking
        # The main thread is out when one collective has failed. Others may still wait for ranks
        # that survive too, until their connections are closed; and this before new ones are opened.
        out.set()
        breaking.join()
        if self.why_not:  # the agent knows it
            wait_to_be_killed()
        self._reply(ParkReply(why_not))
        if why_not:
            wait_to_be_killed()
        message: RankMessage | None = None
        while not isinstance(message, GoOn):  # others belong to the attempt that is over
            message = self._messages.get()
        os.environ.update(message.env)


def has_lost_peer(error: BaseException) -> bool:
    """Report whether gloo has caused this error: a connection to another rank is broken.

    A pipeline's schedule raises an error of its own from that.
    """
    cause: BaseException | None = error
    while cause is not None:
        if "gloo/" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def wait_to_be_killed() -> NoReturn:
    while True:
        signal.pause()


def sockets() -> Iterator[tuple[str, socket.socket]]:
    """Yield a name and a copy of each IP socket of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:  # it was closed meanwhile
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                yield name, copy


def listening() -> set[Address]:
    """Return the addresses where this process listens."""
    return {address_of(each.getsockname()) for _, each in sockets() if is_listener(each)}


def is_listener(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def break_connections(addresses: frozenset[Address]) -> set[str]:
    """Shut down the connections of this process that begin or end at one of these addresses.

    Returns their names.
    """
    found = set()
    for name, each in sockets():
        try:
            ends = {address_of(each.getsockname()), address_of(each.getpeername())}
            if ends & addresses:
                each.shutdown(socket.SHUT_RDWR)
                found.add(name)
        except OSError:  # it listens, or is not connected
            continue
    return found


def address_of(name: Sequence[object]) -> Address:
    """Return host and port of a socket's name, which with IPv6 has more parts."""
    return str(name[0]), int(str(name[1]))
