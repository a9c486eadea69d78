"""Serves the agents of a node: forks processes for them, and reports their ends. (actor)"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from raydist.messages.server import (
    CommandSpec,
    Ended,
    Failed,
    FindStates,
    Forked,
    GetNewestState,
    HoldStates,
    InFile,
    KeepStates,
    KeptSteps,
    ListSteps,
    LookAtModel,
    NewestState,
    OpenStore,
    Ping,
    Pong,
    ProgramSpec,
    RankSpec,
    SignalProcess,
    StatesFound,
    WriteCheckpoint,
)
from raydist.messages.wire import PACKET, Message, decode, encode, numbered, split_number
from raydist.messages.writer import (
    CommitShards,
    DropShards,
    ListShards,
    ReadRandomStates,
    ShardsRequest,
    WriteShards,
)
from raydist.node import huge_pages, mpi_segments, spawn
from raydist.node.held_states import CHECK_S, HeldStates
from raydist.node.processes import (
    end_children,
    end_session,
    kill,
    kill_children,
    process_of,
    take_oom_score,
    wait_one,
    work_done,
)
from raydist.node.recorded_end import record_end
from raydist.node.rendezvous import store_process
from raydist.node.snapshots import SnapshotBuffers, ends_save, run_writer, write_checkpoint
from raydist.shared import env_names
from raydist.worker import main as rank_main

DESCRIPTORS = 16
"""Maximum descriptors in one message."""
WRITE_S = 600.0
"""Limit on the wait for a writer of a last state that makes no progress: a file server may be
restarting."""
PROGRESS_S = 1.0
"""Seconds between two checks whether the processes that are to end make progress."""
END_S = 5.0
"""Limit on the wait for the end of killed processes that belong to no agent."""


@dataclass(frozen=True)
class Child:
    """A process that was forked for an agent and has not been reaped."""

    agent: socket.socket
    """The connection of the agent."""
    serial: int = 0
    """Its number among all forks, because the kernel reuses pids. 0: a writer; it may finish after
    its agent has left, and its end is not reported."""
    value: str = ""
    """The path of a rank's value."""
    beat: int = -1
    """A descriptor of a rank's heartbeat."""
    memories: SnapshotBuffers | None = None
    """The memories to unlock when a writer ends."""


@dataclass
class AgentServer:
    """Forks processes for agents; those of an agent that disconnects end."""

    listener: socket.socket
    start: str
    """How ranks start: `fork`, or `spawn` for a new interpreter."""
    idle_s: float | None = None
    """Seconds without an agent after which the server ends; None: never."""
    serving: bool = True
    reusable: bool = True
    """Whether another run may use the server: False once it may have threads."""
    huge_page_addresses: Iterator[int] | None = None
    """The addresses to put into huge pages while the server is idle and has no child:
    node.huge_pages.scattered_addresses."""
    children: dict[int, Child] = field(default_factory=dict)
    """By pid."""
    leaving_agents: set[socket.socket] = field(default_factory=set)
    """Agents that have disconnected and still have living processes."""
    memories: dict[socket.socket, SnapshotBuffers] = field(default_factory=dict)
    """By agent: the snapshot memories of its ranks."""
    held: HeldStates = field(default_factory=HeldStates)
    check_held_at: float = 0.0
    """When to check next whether these are wanted, on the monotonic clock: that reads files, which
    is not for every message."""
    mpi_since: float | None = None
    """When the run's first MPI program started, in seconds since the epoch."""
    forks: int = 0
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    """The data of each key is the function that handles what can be read there."""

    def serve(self) -> None:
        """Handle messages until `serving` is False, or nobody has wanted the server for a while."""
        wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        signal.set_wakeup_fd(wake_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.watch(self.listener.fileno(), self.accept)
        self.watch(wake, lambda: os.read(wake, 512))
        while True:
            addresses = None if self.children else self.huge_page_addresses
            ready = self.selector.select(0 if addresses else self.patience())
            if not ready and addresses:
                if address := next(addresses, None):
                    huge_pages.collapse(address)
                else:
                    self.huge_page_addresses = None
                continue
            self.drop_unwanted_states()
            if not ready and not self.agents() and not self.children and not self.held:
                self.end_all()
                return
            for key, _ in ready:
                # Others are closed since, in this round: the connection of an agent that is gone,
                # or the guard of a Ray that has been replaced.
                if self.selector.get_map().get(key.fd) is key:
                    key.data()
                if not self.serving:
                    return
            self.reap()

    def idle_limit(self) -> float | None:
        """Return the seconds without an agent after which the server ends; None: never."""
        return self.idle_s

    def patience(self) -> float | None:
        """Return the seconds to wait for a message; None: until there is one."""
        limit = self.idle_limit()
        return limit if not self.held else min(CHECK_S, limit or CHECK_S)

    def drop_unwanted_states(self) -> None:
        """Free the held states that nobody wants any more, and tell their keepers."""
        if self.held and (now := time.monotonic()) >= self.check_held_at:
            self.check_held_at = now + CHECK_S
            self.dismiss(self.held.drop_unwanted())

    def dismiss(self, keepers: Collection[socket.socket]) -> None:
        """Close the connections of keepers, who then end."""
        for keeper in keepers:
            self.selector.unregister(keeper)
            keeper.close()

    def watch(self, source: int | socket.socket, handle: Callable[[], object]) -> None:
        self.selector.register(source, selectors.EVENT_READ, handle)

    def agents(self) -> list[socket.socket]:
        """Return the connections of all agents."""
        sources = [key.fileobj for key in self.selector.get_map().values()]
        return [source for source in sources if isinstance(source, socket.socket)]

    def accept(self) -> None:
        """Accept the connection of an agent.

        If too many files are open, the connection waits: some may be closed soon.
        """
        try:
            agent, _ = self.listener.accept()
            self.watch(agent, lambda: self.handle(agent))
        except OSError:
            traceback.print_exc()
            time.sleep(0.1)

    def handle(self, agent: socket.socket) -> None:
        """Handle one message of an agent, or its disconnection.

        No message ends the server, because other agents need it.
        """
        try:
            packet, fds, flags, _ = socket.recv_fds(agent, PACKET, DESCRIPTORS)
        except OSError:
            packet = b""
            fds = []
            flags = 0
        if not packet:
            self.disconnect(agent)
            return
        message: Message | None = None
        number, packet = split_number(packet)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ValueError("a message was cut off")
            message = decode(packet)
            if isinstance(message, InFile):
                message = read_message(fds.pop())
            self.answer(agent, message, fds, number)
        except Exception as error:
            traceback.print_exc()
            if isinstance(message, WriteCheckpoint | CommitShards | DropShards):
                self.memories[agent].unlock()  # nothing is being written
            # ShardsRequest and SignalProcess get no reply here.
            elif not isinstance(message, ShardsRequest | SignalProcess):
                send_message(agent, Failed(f"{type(error).__name__}: {error}"), number)
        for fd in fds:
            os.close(fd)

    def answer(self, agent: socket.socket, message: Message, fds: list[int], number: int) -> None:
        """Execute a message of an agent. `number`: of the message, for the reply."""
        match message:
            case Ping():
                send_message(agent, Pong())
            case RankSpec() as spec:
                pid = self.fork_rank(spec, fds, agent)
                self.note_fork(pid, agent, number, spec.value, os.dup(fds[2]))
            case ProgramSpec() as program:
                self.mpi_since = self.mpi_since or time.time()
                pid = self.fork(lambda: rank_main.run_program(program, *fds))
                self.note_fork(pid, agent, number)
            case CommandSpec() as command:
                pid = self.fork(lambda: rank_main.run_program(command, *fds))
                self.note_fork(pid, agent, number)
            case LookAtModel() as model_request:
                pid = self.fork(lambda: look_at_model(model_request, *fds))
                self.note_fork(pid, agent, number)
            case OpenStore(kind, address):
                pid = self.fork_child(lambda: store_process(kind, address, *fds))
                self.note_fork(pid, agent, number)
            case (
                WriteCheckpoint()
                | ListShards()
                | WriteShards()
                | CommitShards()
                | DropShards()
                | ReadRandomStates() as request
            ):
                # Without a writer the agent's reply is empty: its descriptor is closed.
                memories = self.memories.get(agent)  # none before its first rank
                if memories is not None and memories.wants_writer(request):
                    self.fork_writer(agent, request, *fds)
            case ListSteps(ranks):
                own = self.memories.get(agent)
                send_message(agent, KeptSteps(own.common_steps(ranks) if own else []), number)
            case HoldStates(key):
                if memories := self.memories.get(agent):
                    self.held.hold(key, memories)
            case KeepStates(key):
                if not self.held.keep(key, agent):
                    self.disconnect(agent)
            case FindStates(key):
                send_message(agent, StatesFound(self.held.find(key)), number)
            case GetNewestState(run):
                held = [
                    each.newest_step() for each in self.memories.values() if str(each.run) == run
                ]
                send_message(agent, NewestState(max(held, default=-1)), number)
            case SignalProcess(pid, signal_number, group):
                if (child := self.children.get(pid)) and child.agent is agent:
                    kill(pid, signal_number, group)

    def note_fork(
        self, pid: int, agent: socket.socket, number: int, value: str = "", beat: int = -1
    ) -> None:
        self.forks += 1
        self.children[pid] = Child(agent, self.forks, value, beat)
        send_message(agent, Forked(pid, self.forks), number)

    def disconnect(self, agent: socket.socket) -> None:
        """Handle the disconnection of an agent: SIGKILL its ranks.

        SIGTERM would not suffice: a rank in a collective does not handle it.
        """
        self.selector.unregister(agent)
        self.leaving_agents.add(agent)
        self.held.leave(agent)
        for pid, child in [*self.children.items()]:
            if child.agent is agent and child.serial and not kill(pid, signal.SIGKILL):
                del self.children[pid]  # `sudo`: it ends when it likes, and nobody waits for it

    def fork_rank(self, spec: RankSpec, fds: list[int], agent: socket.socket) -> int:
        if len(fds) < 3:
            raise ValueError("a rank needs a log, a channel and a heartbeat")
        memories = self.memories[agent] = self.memories_of(spec)
        fds = [*fds[:3], *memories.of_rank(agent, spec.env, spec.saving), *fds[3:]]
        # The loader read it when this process started: a fork can't change it.
        libraries = spec.env.get("LD_LIBRARY_PATH")
        forks = self.start == "fork" and libraries == os.environ.get("LD_LIBRARY_PATH")
        path = None if forks else spawn.write_spec(spec)
        server, peer = os.getpid(), process_of(agent)

        def become_rank() -> NoReturn:
            # Ray has raised the score of its workers, such as the agent, but not that of the
            # driver, which may own this server.
            take_oom_score(peer)
            if path is not None:
                spawn.execute_rank(spec, path, fds, server)
            rank_main.run_rank(spec, rank_main.RankFiles(*fds))

        return self.fork(become_rank, memories)

    def memories_of(self, spec: RankSpec) -> SnapshotBuffers:
        """Return the memories of the run of a rank: known, held since it made way, or new."""
        run = SnapshotBuffers.of_run(spec, self.memories.values())
        if run.agents or (key := spec.env.get(env_names.HELD_STATES)) is None:
            return run
        held, keepers = self.held.take(key)
        self.dismiss(keepers)
        if held is None:
            return run
        held.run, held.checkpoints, held.first = run.run, run.checkpoints, False
        return held

    def fork(self, become: Callable[[], NoReturn], own: SnapshotBuffers | None = None) -> int:
        """Fork a child that calls `become` and that SIGTERM ends; return its pid.

        `own`: the memories that it keeps.
        """
        return spawn.fork_rank(lambda: self.close_in_child(own), become)

    def fork_child(self, become: Callable[[], NoReturn], own: SnapshotBuffers | None = None) -> int:
        """Fork a child that ignores SIGTERM, as the server does, and calls `become`.

        `own`: the memories that it keeps. Returns its pid.
        """
        return spawn.fork_child(lambda: self.close_in_child(own), become)

    def fork_writer(
        self, agent: socket.socket, request: WriteCheckpoint | ShardsRequest, reply: int = -1
    ) -> None:
        """Fork a process that executes this request.

        The process sends its events or its reply to the descriptor `reply`.
        """
        memories = self.memories[agent]
        pid = self.fork_child(lambda: run_writer(memories, request, reply), memories)
        self.children[pid] = Child(agent, memories=memories if ends_save(request) else None)

    def close_in_child(self, own: SnapshotBuffers | None) -> None:
        """Close the server's descriptors, in a new child; except of its own memories."""
        signal.set_wakeup_fd(-1)
        # An agent that leaves waits for its connection to close, so no child of another agent may
        # hold it open.
        fds = [key.fd for key in self.selector.get_map().values()]
        beats = [child.beat for child in self.children.values()]
        leaving = [agent.fileno() for agent in self.leaving_agents]
        # Nor may a child of another run hold memories after their run.
        others = {*self.memories.values()} - {own}
        memories = [fd for each in others for fd in each.descriptors.values()]
        for fd in [*fds, *beats, *leaving, *memories, *self.held.descriptors()]:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.selector.close()

    def reap(self) -> None:
        """Report the end of each dead child to its agent, and kill the processes that it left."""
        while (ended := wait_one()) is not None:
            pid, status = ended
            child = self.children.pop(pid, None)
            if child is not None and child.memories is not None:
                child.memories.unlock()
            end_session(pid)
            if child is not None and child.serial:
                self.report_end(pid, child, os.waitstatus_to_exitcode(status))
            # Only now, for a possible next run: the first run must not wait for this.
            if not self.children:
                self.huge_page_addresses = huge_pages.scattered_addresses()
        if self.leaving_agents and not self.children and kill_children():
            return  # these had created their own session; their ends wake this server
        for agent in self.leaving_agents - {child.agent for child in self.children.values()}:
            buffers = self.memories.get(agent)
            if buffers is not None and self.write_owed(agent, buffers):
                continue
            if buffers is not None:
                buffers.release(agent)
                del self.memories[agent]
            self.leaving_agents.remove(agent)
            agent.close()

    def report_end(self, pid: int, child: Child, exit_code: int) -> None:
        """Report the end of a child to its agent, and record that of a rank."""
        code, number = max(exit_code, 0), max(-exit_code, 0)
        if child.beat >= 0:
            record_end(child.value, code, number, child.beat)
            os.close(child.beat)
        if child.agent.fileno() >= 0:
            send_message(child.agent, Ended(pid, code, number, time.time(), child.serial))

    def write_owed(self, agent: socket.socket, buffers: SnapshotBuffers) -> bool:
        """Fork a process that writes what the agent left unwritten; return whether one was forked.

        If the kernel refuses the fork (pids.max, RLIMIT_NPROC), this process writes it. It may have
        threads afterwards, so it forks no further rank and serves no other run.
        """
        while request := buffers.owed_checkpoint():
            try:
                self.fork_writer(agent, request)
                return True
            except OSError:
                traceback.print_exc()
            self.start = "spawn"
            self.reusable = False
            try:
                write_checkpoint(buffers.descriptors, request)
            except Exception:
                traceback.print_exc()
            buffers.unlock()
        return False

    def end_all(self) -> bool:
        """Disconnect every agent and end all children; return whether another run may follow.

        Calls `report_progress` whenever the children have made progress: a large state takes
        minutes to write.
        """
        for agent in {*self.agents()} - self.held.keepers:
            self.disconnect(agent)
        done: dict[int, tuple[float, int]] = {}
        look_at = time.monotonic()
        until = look_at + WRITE_S
        while self.leaving_agents and (now := time.monotonic()) < until:
            if now >= look_at:
                before, done = done, {pid: work_done(pid) for pid in self.children}
                look_at = now + PROGRESS_S
                if done != before:
                    until = now + WRITE_S
                    self.report_progress()
            self.reap()
            time.sleep(0.002)
        ended = end_children(END_S) and not self.leaving_agents
        if self.mpi_since is not None:  # the agents, which do this after a run, may be gone
            mpi_segments.remove_leftovers(self.mpi_since)
            self.mpi_since = None
        return ended and self.reusable

    def report_progress(self) -> None:
        """Do nothing: only a server with an owner has someone to report to."""


def send_message(agent: socket.socket, message: Message, number: int = 0) -> None:
    """Send a message. `number`: of the request that it answers, if that has one."""
    packet = encode(message)
    # The agent has disconnected; its packet of zero bytes is still to be read.
    with contextlib.suppress(OSError):
        agent.send(numbered(number, packet) if number else packet)


def read_message(descriptor: int) -> Message:
    """Return the message in a file, and close the file."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return decode(file.read())


def look_at_model(request: LookAtModel, reply_fd: int) -> NoReturn:
    """Write why the model cannot be divided, in a child.

    Only the child imports what builds models.
    """
    from raydist.training import memory

    memory.reply_to_check(request, reply_fd)
