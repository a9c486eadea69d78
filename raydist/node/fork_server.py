"""The fork server of a node: a process that imports torch once and forks the ranks. (actor)

    python -m raydist.node.fork_server LISTEN_FD LIFELINE_FD START IDLE_S KEEP MODULE…

It imports these modules at once, and later those that agents name. KEEP: 0 to end with the claim, 1
to be kept for further claims (see node.kept_server), or the id of a process to be kept as long as
that process lives.

It is exec'ed, not forked from a Ray worker, whose threads and gRPC would not survive a fork. It has
one thread, and never uses CUDA. Agents send it messages of messages.server over a Unix socket, one
per packet, with descriptors:

    Claim            the new lifeline             -> Claimed
    BeginRun
    ImportModules                                 -> Warm
    RankSpec         log, channel, heartbeat      -> Forked, later Ended
    ProgramSpec      log                          -> Forked, later Ended
    LookAtModel      one for the answer           -> Forked, later Ended
    OpenStore        one for StoreOpened          -> Forked, later Ended
    WriteCheckpoint  one for the writer's events
    ShardsRequest    one for the writer's reply
    GetNewestState                                -> NewestState
    SignalProcess

A reply carries the number of its request. Before the server imports modules, it sends Busy to the
other agents.

When an agent disconnects, the server ends the agent's ranks, writes their last state to the disk,
and closes the connection. When the other end of the lifeline closes, because its owner let go or
died, the server ends all its processes, and itself unless it is kept. It also ends after IDLE_S
without an agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from raydist.messages.server import BeginRun, Busy, Claim, Claimed, ImportModules, Pong, Warm
from raydist.messages.wire import Message
from raydist.node import fork_launcher, rank_readers
from raydist.node.agent_server import AgentServer, send_message
from raydist.node.left_folders import lock_folder
from raydist.node.warm_imports import (
    ImportedFiles,
    ends_with,
    import_modules,
    is_imported,
    uses_gpu,
)
from raydist.shared.own_path import own_folder

PR_SET_CHILD_SUBREAPER = 36
CLAIMED_S = 300.0
"""Seconds for which a kept server waits for the agents of the process that has claimed it, if it is
to stay for less without a claim: their actors may take long to start."""


@dataclass
class Server(AgentServer):
    """An AgentServer for the process that claims it, its owner, and perhaps for later owners."""

    lifeline: int = -1
    """-1 while nobody claims the server."""
    keep: bool = False
    """Whether the server stays when its owner lets go."""
    guard: int = -1
    """A descriptor of Ray's raylet: the server is not kept once that process has ended. -1: none.
    """
    run_folders: list[str] = field(default_factory=list)
    """The folders to remove when the claim ends."""
    locks: list[int] = field(default_factory=list)
    """The locks on these folders."""
    files: ImportedFiles = field(default_factory=ImportedFiles)
    rank_readers: set[str] = field(default_factory=set)
    """The modules that have read, while this server imported them, which rank they are in."""

    def answer(self, agent: socket.socket, message: Message, fds: list[int], number: int) -> None:
        """Execute a message of an agent, or of a process that claims the server."""
        match message:
            case Claim():
                self.claim(agent, fds)
            case BeginRun() if self.lifeline < 0:  # the owner has died since
                self.disconnect(agent)
            case BeginRun():
                try:
                    self.begin_run(message)
                except Exception:
                    traceback.print_exc()
                    self.disconnect(agent)  # the agent then shows the end of this server's log
            case ImportModules(modules):
                send_message(agent, self.warm_up(modules, agent), number)
            case _:
                super().answer(agent, message, fds, number)

    def idle_limit(self) -> float | None:
        claimed = self.keep and self.lifeline >= 0
        return max(self.idle_s, CLAIMED_S) if claimed and self.idle_s else self.idle_s

    def claim(self, claimant: socket.socket, fds: list[int]) -> None:
        """Adopt the descriptor as the lifeline, if the server is free and its imports are current.

        They are if no file that it imported has changed.

        Without a descriptor the files do not matter: nobody is going to use the server.
        """
        free = self.lifeline < 0
        if free and fds:
            # Checking thousands of files takes seconds on a network file system.
            send_message(claimant, Busy())
            if uses_gpu() or self.files.changed():
                free, self.idle_s = False, 0.0  # it ends when the claimant has gone
        if free and fds:
            self.adopt(fds.pop())
        send_message(claimant, Claimed(free))

    def adopt(self, lifeline: int) -> None:
        """Serve the process at the other end of this lifeline until it closes."""
        self.lifeline = lifeline
        self.watch(lifeline, self.owner_gone)

    def owner_gone(self) -> None:
        """End the owner's processes, and the server unless it is kept."""
        self.serving = self.end_all() and self.keep
        if self.serving:
            self.let_go()

    def let_go(self) -> None:
        """End the claim, and wait for another one."""
        self.selector.unregister(self.lifeline)
        for folder in self.run_folders:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in self.locks:
            os.close(lock)
        self.run_folders.clear()
        self.locks.clear()
        self.memories.clear()
        self.files.note_all()  # the server may have imported something for itself
        os.close(self.lifeline)  # last: the owner waits for it
        self.lifeline = -1

    def begin_run(self, run: BeginRun) -> None:
        """Create the folder of a run's agents, where all of them find this server.

        The folder is removed when the claim ends. The server creates it: another process could be
        killed before it reports the folder to the server, and nobody would remove it. OSError:
        another user may have created it, who could read the name of the run on another node.
        """
        is_new = not os.path.exists(run.folder)  # a server of this run only already owns it
        if not own_folder(Path(run.folder)):
            raise OSError(f"another user may have made {run.folder}")
        self.run_folders.append(run.folder)
        if is_new:
            for name in ("server.log", "fork"):
                os.symlink(os.path.join(self.folder, name), os.path.join(run.folder, name))
            self.locks += lock_folder(run.folder)
        if self.keep:
            self.keep = run.keep_s > 0
            self.idle_s = run.keep_s or self.idle_s
        if run.guard:
            self.stay_with(run.guard)

    def stay_with(self, pid: int) -> None:
        """Set the process that the server may not outlive; 0: none. Replaces the previous one."""
        if self.guard >= 0:
            self.selector.unregister(self.guard)
            os.close(self.guard)
        self.guard = -1
        # The process may have ended; old kernels and other systems have no pidfd_open.
        with contextlib.suppress(OSError, AttributeError):
            self.guard = os.pidfd_open(pid) if pid else -1
        if self.guard >= 0:
            self.watch(self.guard, self.guard_gone)

    def guard_gone(self) -> None:
        """Keep the server no longer: its Ray has ended."""
        self.stay_with(0)
        self.keep = False
        if self.lifeline < 0:
            self.end_all()
            self.serving = False

    def warm_up(self, modules: Sequence[str], asking: socket.socket | None = None) -> Warm:
        """Import the modules that ranks need, unless each rank is a new interpreter.

        `asking`: the agent that waits for it. The other agents get Busy, or they would consider
        this server stopped.
        """
        folders = (*self.run_folders, self.folder)
        alone = rank_readers.left_to_ranks(modules)
        modules = [name for name in modules if name not in alone]
        missing = self.start == "fork" and not all(map(is_imported, modules))
        others = [agent for agent in self.agents() if missing and agent is not asking]
        for agent in others:
            send_message(agent, Busy())
        ends = ends_with(self.lifeline, folders) if self.lifeline >= 0 else contextlib.nullcontext()
        with ends, self.files.noted() if missing else contextlib.nullcontext():
            warm = import_modules(modules if self.start == "fork" else ())
        for agent in others:
            send_message(agent, Pong())
        if warm.cuda or warm.rank_readers:
            self.start = "spawn"  # ranks forked from here would have no GPU, or all be rank 0
        if warm.rank_readers:
            rank_readers.remember(warm.rank_readers)
            self.reusable = False  # the next server leaves these packages out, and forks
        # Whoever asked first may not have read the answer: the driver has its own server import
        # what the job needs before an agent is there.
        self.rank_readers.update(warm.rank_readers)
        return replace(warm, rank_readers=sorted(self.rank_readers))

    def report_progress(self) -> None:
        if self.lifeline >= 0:
            with contextlib.suppress(OSError):  # the owner is dead
                os.write(self.lifeline, b".")

    @property
    def folder(self) -> str:
        return os.path.dirname(str(self.listener.getsockname()))


def main(
    listen_fd: str, lifeline_fd: str, start: str, idle_s: str, keep: str, *modules: str
) -> None:
    """Detach, import the modules, and serve until the lifeline closes.

    A kept server serves until nobody claims it any more.
    """
    import ctypes

    if os.fork():
        # A Ray worker SIGKILLs its children when it ends. The server outlives it, to end the ranks
        # and their children.
        os._exit(0)
    os.setsid()
    if sys.path[0] == os.getcwd():  # "/", where it was launched
        del sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    # A Ray worker has SIGINT blocked, and the ranks and commands would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for limit in fork_launcher.RAISED:  # as Ray does for its workers
        resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)
    server = Server(
        socket.socket(fileno=int(listen_fd)), start, float(idle_s) or None, keep=keep != "0"
    )
    server.adopt(int(lifeline_fd))
    if int(keep) > 1:
        server.stay_with(int(keep))
    # torch.cuda.is_available() then leaves CUDA alone.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    folder, code = server.folder, 1
    lock_folder(folder)
    if server.keep:
        with open(os.path.join(folder, "server.json"), "w") as file:
            json.dump({"pid": os.getpid(), "born": time.time()}, file)
    server.files.note_all()
    server.warm_up(("raydist.worker.main", *modules))
    try:
        server.serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for path in (*server.run_folders, folder):  # the end of this process releases its locks
            shutil.rmtree(path, ignore_errors=True)
        if keep != "0":
            with contextlib.suppress(OSError):  # there are other servers
                os.rmdir(os.path.dirname(folder))
        os._exit(code)  # the driver waits for this end, and torch's own takes 0.1 s


if __name__ == "__main__":
    main(*sys.argv[1:])
