"""One per node: a plain process that has imported torch once, and forks the ranks from itself. (actor)

    python -m raydist.node.forkserver LISTEN_FD LIFELINE_FD START IDLE_S MODULE…

It is exec'ed, not forked from a Ray worker (whose threads and gRPC would not survive), has one thread of its own, and
never touches CUDA. Seats speak to it over a Unix socket, one JSON message per packet, descriptors beside it:

    {"op": "fork", "spec": {…}}  + log, channel and heartbeat descriptors   -> {"forked": pid}, later {"ended": pid, …}
    {"op": "exec", "spec": {…}}  + log descriptor        -> the same, of another program: spec's argv, env and cwd
    {"op": "store", "store": "tcp", "address": ip}       -> {"store": port, "secret": "…", "pid": pid}; or horovod
    {"op": "save", "slot": n}    + a descriptor for its word     n of the first rank's snapshots becomes a checkpoint
    {"op": "save", "slot": null, "parts": {…}}                   what to do with the parts of a sharded state
    {"op": "kill", "pid": pid, "signal": n}      n to the rank; SIGKILL goes to its whole process group

It greets a seat with {"warm": {…}} once all is imported. When a seat hangs up, its ranks end, their last state goes to
the disk, and then the server hangs up too; when the lifeline's other end closes (its owner died, however), or no seat
came for IDLE_S, everything ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from raydist.node import entry
from raydist.node.memory import Memories, write_checkpoint
from raydist.node.processes import end_children, end_session, kill, wait_one
from raydist.node.wire import PACKET

PR_SET_CHILD_SUBREAPER = 36
WRITE_S = 600.0
"""Longest wait for the last state to get to the disk when everything else has ended: large ones take minutes."""
OWN = 3
"""What it listens to when no seat is there: its socket, the lifeline, the end of a child."""


@dataclass
class Server:
    """The ranks of one node, who asked for each, and the way to fork one more."""

    listener: socket.socket
    lifeline: int
    start: str
    idle_s: float | None = None
    owner: dict[int, socket.socket] = field(default_factory=dict)
    """Who asked for each process that lives, by pid."""
    leaving: set[socket.socket] = field(default_factory=set)
    """Seats that have hung up, and whose processes have not all ended."""
    memories: dict[socket.socket, Memories] = field(default_factory=dict)
    """Where the ranks of each seat keep their snapshots."""
    writers: dict[int, Memories] = field(default_factory=dict)
    """Whose state a process writes to the disk, by its pid."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    warm: dict[str, Any] = field(default_factory=dict)

    def serve(self) -> None:
        """Answer until the lifeline closes."""
        wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self.listener, self.lifeline, wake):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            ready = self.selector.select(self.idle_s)
            if not ready and len(self.selector.get_map()) == OWN and not self.owner:
                return self.end_all()
            for key, _ in ready:
                if key.fileobj is self.listener:
                    self.greet(self.listener.accept()[0])
                elif key.fd == wake:
                    os.read(wake, 512)
                elif key.fd == self.lifeline:
                    return self.end_all()
                else:
                    self.answer(key.fileobj)  # type: ignore[arg-type]
            self.reap()

    def greet(self, seat: socket.socket) -> None:
        self.selector.register(seat, selectors.EVENT_READ)
        say(seat, warm=self.warm)

    def answer(self, seat: socket.socket) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(seat, PACKET, 4)
        except OSError:
            packet, fds = b"", []
        if not packet:
            self.see_off(seat)
            return
        message = json.loads(packet)
        if message["op"] in ("fork", "exec"):
            pid = (self.fork_rank if message["op"] == "fork" else self.fork_program)(message["spec"], fds, seat)
            self.owner[pid] = seat
            say(seat, forked=pid)
        elif message["op"] == "store":
            pid, opened = self.fork_store(message["store"], message["address"])
            self.owner[pid] = seat
            say(seat, **opened, pid=pid)
        elif message["op"] == "save" and self.memories[seat].wants_writer(message["slot"], message.get("parts")):
            self.fork_writer(seat, message["slot"], message.get("parts"), *fds)
        elif message["op"] == "kill" and message["pid"] in self.owner:
            kill(message["pid"], message["signal"])
        for fd in fds:
            os.close(fd)

    def see_off(self, seat: socket.socket) -> None:
        """A seat has hung up: SIGKILL its ranks, which inside a collective would not see a SIGTERM."""
        self.selector.unregister(seat)
        self.leaving.add(seat)
        for pid in [pid for pid, owner in self.owner.items() if owner is seat and pid not in self.writers]:
            kill(pid, signal.SIGKILL)

    def fork_rank(self, spec: dict[str, Any], fds: list[int], seat: socket.socket) -> int:
        held = self.memories[seat] = Memories.of_run(spec, self.memories.values())
        fds = [*fds[:3], *held.of_rank(seat, spec["env"]), *fds[3:]]
        libraries = spec["env"].get("LD_LIBRARY_PATH")  # read when a program starts: a fork can't change it any more
        if self.start == "spawn" or libraries != os.environ.get("LD_LIBRARY_PATH"):
            return spawn_rank(spec, fds)
        return self.fork(lambda: entry.run_rank(spec, *fds))

    def fork_program(self, spec: dict[str, Any], fds: list[int], seat: socket.socket) -> int:
        return self.fork(lambda: entry.run_program(spec, *fds))

    def fork(self, become: Callable[[], NoReturn]) -> int:
        """A child that becomes something else; its pid."""
        # A SIGTERM for a rank that is a moment old waits until the rank no longer ignores it as the server does.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            self.forget()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if pid == 0:
            try:
                become()
            except BaseException:
                traceback.print_exc()
            finally:  # nothing may unwind into what the server does when it ends
                os._exit(1)
        return pid

    def fork_store(self, kind: str, address: str) -> tuple[int, dict[str, Any]]:
        """A process that holds the store open; where (its port, its secret), or the text of why it could not."""
        ours, its = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.forget()
            hold_store(kind, address, its)
        os.close(its)
        with os.fdopen(ours) as answer:
            return pid, json.loads(answer.read())

    def fork_writer(self, seat: socket.socket, slot: int | None, parts: dict[str, Any] | None, word: int = -1) -> None:
        """A process that makes a checkpoint of a slot (None: of the newest), and sends an event of it to `word`.

        `parts`: what it does with those of a sharded state instead.
        """
        pid = os.fork()
        if pid == 0:
            self.forget()
            os.setsid()
            write_checkpoint(self.memories[seat], slot, parts, word)
        self.owner[pid], self.writers[pid] = seat, self.memories[seat]

    def forget(self) -> None:
        """In a fresh child: drop the server's descriptors and end with it."""
        entry.die_with_parent()
        signal.set_wakeup_fd(-1)
        for key in list(self.selector.get_map().values()):
            with contextlib.suppress(OSError):
                os.close(key.fd)
        self.selector.close()

    def reap(self) -> None:
        """Tell each dead process's owner how it ended, and end what it left behind."""
        while (dead := wait_one()) is not None:
            pid, status = dead
            seat = self.owner.pop(pid, None)
            if written := self.writers.pop(pid, None):
                written.unlock()
            end_session(pid)
            if seat is not None and seat.fileno() >= 0:
                code = os.waitstatus_to_exitcode(status)
                say(seat, ended=pid, code=max(code, 0), signal=max(-code, 0), at=time.time())
        if self.leaving and not self.owner:
            end_children()  # what went into a session of its own
        for seat in self.leaving - set(self.owner.values()):
            held = self.memories.get(seat)
            if held is not None and held.owed():
                self.fork_writer(seat, None, None)
                continue
            if held is not None:
                held.release(seat)
            self.leaving.remove(seat)
            seat.close()

    def end_all(self) -> None:
        """As if every seat had hung up."""
        for key in list(self.selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket) and key.fileobj is not self.listener:
                self.see_off(key.fileobj)
        until = time.monotonic() + WRITE_S
        while self.leaving and time.monotonic() < until:
            self.reap()
            time.sleep(0.002)
        end_children()


def say(seat: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the seat hung up; its packet of zero bytes is on the way
        seat.send(json.dumps(message).encode())


def spawn_rank(spec: dict[str, Any], fds: list[int]) -> int:
    """A fresh interpreter for the rank, where a fork of a warm one is unsafe."""
    import subprocess

    path = f"{spec['value']}.spec"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds the environment
    with os.fdopen(descriptor, "w") as file:
        json.dump(spec, file)
    command = [sys.executable, "-m", "raydist.node.entry", path, *map(str, fds)]
    env = {**spec["env"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, pass_fds=[fd for fd in fds if fd >= 0], env=env).pid


def hold_store(kind: str, address: str, answer: int) -> NoReturn:
    """In a child: open the store, say where it is, hold it until killed."""
    os.setsid()
    from raydist.node import rendezvous, rendezvous_http

    try:
        hold, opened = (rendezvous_http.open_store if kind == "horovod" else rendezvous.hold_store)(address)
    except Exception as error:
        hold, opened = None, {"store": f"{type(error).__name__}: {error}"}
    os.write(answer, json.dumps(opened).encode())
    os.close(answer)
    if hold is not None:
        hold()
    os._exit(1)


def warm_up(modules: list[str]) -> dict[str, Any]:
    """Import what ranks will need; a module that fails here will fail in the rank, with its own words."""
    began, failed = time.time(), {}
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            failed[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # ranks share these pages; the collector must not touch them
    torch = sys.modules.get("torch")
    return {
        "s": time.time() - began,
        "failed": failed,
        "cuda": bool(torch and torch.cuda.is_initialized()),
        "threads": [t.name for t in threading.enumerate()[1:]],
    }


@contextlib.contextmanager
def ends_with(lifeline: int, folder: str) -> Iterator[None]:
    """The end of the lifeline ends this process also while it imports, and reads nothing."""

    def leave(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGIO, leave)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before it could be told
        leave()
    yield
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


def main(listen_fd: str, lifeline_fd: str, start: str, idle_s: str, *modules: str) -> None:
    """Warm up, serve, end everything."""
    import ctypes

    if os.fork():
        # A Ray worker SIGKILLs its children when it ends. The server lives on, to end the ranks and all they started.
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's business
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    server = Server(socket.socket(fileno=int(listen_fd)), int(lifeline_fd), start, float(idle_s) or None)
    folder = os.path.dirname(server.listener.getsockname())
    with ends_with(server.lifeline, folder):
        server.warm = warm_up(["raydist.node.entry", *modules] if start == "fork" else [])
    try:
        server.serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
