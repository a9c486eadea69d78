"""The agent of one rank: starts its process, monitors it, answers requests about it. (actor)

A RankAgent is a plain class with coroutines, hosted by an actor on its node or, without Ray, by a
thread of the driver. It never imports torch, so it can answer and end the rank wherever the rank
hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.messages.agent import (
    DYING_S,
    Close,
    Examine,
    FindUnreachablePaths,
    Flush,
    GetLoad,
    GetNetworkUse,
    GetNews,
    GetValue,
    IsOpen,
    KeepCall,
    NetworkUse,
    Open,
    Opened,
    ProcessEnd,
    RankActivity,
    RankEnd,
    RankNews,
    RankValue,
    RecordedError,
    StartRank,
    StopRank,
    WaitForWriter,
)
from raydist.messages.checkup import CheckupRequest
from raydist.messages.rank import (
    Activity,
    Holding,
    HoldRank,
    RankMessage,
    ReleaseRank,
    StopAfter,
    TellActivity,
)
from raydist.messages.request import Request
from raydist.messages.server import (
    BeginRun,
    ImportModules,
    OpenStore,
    SignalProcess,
    StoreAddress,
    StoreOpened,
    Warm,
    WriteCheckpoint,
)
from raydist.messages.shards import CommitShards, DropShards, ListShards, WriteShards
from raydist.messages.wire import Message, encode
from raydist.network import nccl_log as network_nccl_log
from raydist.node import counters, kept_server, nccl_output, oom, rank_spec, recorded_end
from raydist.node.fork_client import ForkClient
from raydist.node.fork_launcher import ForkServer
from raydist.node.load import LoadReader
from raydist.node.nccl_output import NcclLog
from raydist.node.output_file import OutputFile
from raydist.node.processes import main_stack, process_state, recorded_error
from raydist.node.writer import Writer, read_messages, read_reply
from raydist.shared.errors import LaunchError
from raydist.worker.heartbeat import (
    BEAT_PAGE,
    STACKS_SIGNAL,
    heartbeat_page,
    read_beat,
    read_compute_time,
    read_pauses,
)

if TYPE_CHECKING:
    from raydist.network.facts import Facts
    from raydist.node.checkup import Checkup
    from raydist.shared.kinds import EventJson

LOG_CHUNK = 1 << 20
"""Maximum bytes of a rank's output in one reply."""
EXAMINE_S = 0.6
"""Seconds over which a rank's CPU time is measured: the kernel counts it in hundredths of a
second."""
STOP_S = 3.0
"""Limit on the wait for a rank's end after SIGKILL. The driver gives up after 5 s
(launch.limits.SILENT_S)."""
SERVER_S = 10.0
"""Seconds after which a fork server that is needed but does not answer is killed."""
ANSWER_S = 3.0
"""Seconds that a busy rank has to answer. A signal handler that interrupts its Python code may
crash it."""


class RankAgent:
    """The agent of one rank.

    The driver sends Open, StartRank, GetNews …, StopRank, Close, in this order.
    """

    def __init__(self) -> None:
        self.born = time.time()
        self.rank = -1
        self.pid = 0
        self._lead = False
        """Whether this is the first agent of its node."""
        self._store_pid = 0
        self._nccl: NcclLog | None = None
        self._own_server: ForkServer | None = None
        """The fork server, if this agent started it."""
        self._client: ForkClient | None = None
        self._connecting: asyncio.Task[ForkClient] | None = None
        self._news = asyncio.Event()
        self._events: list[EventJson] = []
        self._end: RankEnd | None = None
        self._mpi_env: dict[str, str] = {}
        """Variables that mpirun set for the rank; those of its spec override them."""
        self._cpus: tuple[int, ...] | None = None
        """The CPUs to which mpirun binds the rank."""
        self._mpi_fds: list[int] = []
        """Descriptors that mpirun passed for the rank, besides its log, channel and heartbeat."""
        self._error_file: Path | None = None
        self._event_reader: asyncio.Task[None] | None = None
        self._to_rank: asyncio.StreamWriter | None = None
        self._activity: Activity | None = None
        """The rank's reply to the last TellActivity."""
        self._writer: Writer | None = None
        self._load = LoadReader()
        self._checkup: Checkup | None = None
        self._holding: deque[asyncio.Future[int]] = deque()
        """The HoldRank requests that the rank has not answered yet, oldest first."""
        self._oom_count: oom.Count | None = None
        """The kernel's count of OOM kills when the rank started."""
        self._stopping = self._raised = False
        self._told = False
        """See RankEnd.told."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: Request[Any]) -> Any:
        """Answer a request of the driver.

        The type parameter of the request's class is the type of the reply.
        """
        match request:
            case Open():
                return await self.open(request)
            case OpenStore():
                return await self.open_store(request)
            case FindUnreachablePaths():
                from raydist.node import path_check  # this imports the object store

                return await path_check.find_unreachable_paths(request)
            case KeepCall():
                return await self.keep_call(request)
            case StartRank():
                return await self.start(request)
            case GetNews():
                try:
                    return await self.news(request.patience)
                except Exception as error:
                    return self._end_without_news(error)
            case Examine():
                return await self.examine()
            case HoldRank():
                return await self.hold(request)
            case StopAfter() | ReleaseRank():
                return self.tell_rank(request)
            case GetValue():
                return self.value()
            case IsOpen():
                return await self.is_open()
            case WaitForWriter():
                return await self._writer.wait() if self._writer is not None else None
            case Flush():
                return await self.flush()
            case ListShards() | WriteShards() | CommitShards() | DropShards():
                return (
                    await self._writer.ask(request)
                    if self._writer is not None and self.pid
                    else None
                )
            case StopRank():
                return await self.stop(request.grace)
            case GetNetworkUse():
                return self.network_use()
            case GetLoad():
                return await asyncio.to_thread(self._load.read)
            case CheckupRequest():
                return await self.check_up(request)
            case Close():
                return await self.close()
        raise TypeError(f"an agent can't answer {request}")

    async def open(self, request: Open) -> Opened:
        """Round 1: read the machine's facts, join the fork server, open the rendezvous store.

        Only the first agent of a node reads the facts, and chooses or starts the server.
        """
        self.rank, self._lead = request.rank, request.lead
        self.folder = recorded_end.run_folder_here(request.run, request.node_id)
        facts: Facts | None = None
        modules: tuple[str, ...] = ()
        place = self.folder
        if request.lead:
            from raydist.node import probe

            self._own_server, place, modules = await asyncio.to_thread(
                kept_server.choose, request, place
            )
            # The driver knows the GPUs of each rank.
            facts = probe.read_facts(ip=request.node_ip, interface=request.interface, gpus=None)
        self._connecting = asyncio.create_task(ForkClient.connect(place))
        self._client = await self._connecting
        self._writer = Writer(self._client, self._add_event, self._spawn)
        if request.lead:
            raylet = int(os.environ.get("RAY_RAYLET_PID", "0")) if request.ray_stays else 0
            keep_s = min(request.keep_s, kept_server.most_s())
            self._server.send(BeginRun(str(self.folder), keep_s, raylet))
        warm = await self._server.ask(ImportModules(modules), Warm)
        opened = (
            await self.open_store(OpenStore(request.store, facts.address))
            if facts and request.store
            else None
        )
        return Opened(
            facts=facts,
            born=self.born,
            warm=warm,
            store=opened,
            ports=counters.read_counters() if request.lead else None,
        )

    async def open_store(self, request: OpenStore) -> StoreAddress:
        """Open a new rendezvous store for an attempt, on this agent's node."""
        if self._store_pid:
            self._server.send(SignalProcess(self._store_pid, signal.SIGKILL))
        ours, its = socket.socketpair()
        with ours:
            with its:
                self._store_pid, _ = await self._server.fork(request, [its.fileno()])
            opened = await read_reply(ours)
        if not isinstance(opened, StoreOpened):
            raise OSError(f"the process of the rendezvous store ended: {self._server.log_end()}")
        if opened.error:
            raise OSError(
                f"the rendezvous store could not listen on {request.address}: {opened.error}"
            )
        return StoreAddress(opened.port, opened.secret)

    async def keep_call(self, request: KeepCall) -> None:
        """Write the job's pickled function to the node's folder, where all its ranks read it.

        A run has one function, so an existing file is kept: the disk may have filled up since.
        """
        file = self.folder / rank_spec.CALL
        if not file.exists():
            call = request.call if isinstance(request.call, bytes) else await request.call
            await asyncio.to_thread(write_at_once, file, call)

    async def start(self, request: StartRank) -> int:
        """Round 2: fork the rank with its variables, and return its pid.

        Raises LaunchError if the process of the previous attempt can't be killed.
        """
        await self._end_previous()
        self.rank = request.rank  # changes with the world size
        base = self.folder / f"rank-{self.rank}"
        if request.script:
            self._error_file = Path(f"{base}.error.json")
            self._error_file.unlink(missing_ok=True)
        spec = rank_spec.complete_spec(
            request, self.folder, self._error_file, self._mpi_env, self._cpus
        )
        await self._reset(str(base))
        self._nccl = NcclLog(
            Path(f"{base}.nccl"), aloud=request.nccl_aloud, strict=request.nccl_strict
        )
        self._log = OutputFile(Path(f"{base}.log"))
        beat = heartbeat_page()
        self._beat = mmap.mmap(beat, BEAT_PAGE)
        agent_end, rank_end = socket.socketpair()
        append = os.open(f"{base}.log", os.O_WRONLY | os.O_APPEND)
        try:
            self.pid, ended = await self._server.fork(
                spec, [append, rank_end.fileno(), beat, *self._mpi_fds]
            )
        finally:
            for descriptor in (append, beat):
                os.close(descriptor)
            rank_end.close()
        self._end = None
        reading = read_messages(
            agent_end, self._add_event, self._handle_reply, self._note_connection
        )
        self._event_reader = self._spawn(reading)
        self._oom_count = oom.read_count(self.pid)
        self._stopping = self._raised = self._told = False
        self._spawn(self._await_end(self.pid, ended))
        return self.pid

    @property
    def _running(self) -> bool:
        """Whether the rank's process has started and not ended."""
        return bool(self.pid) and self._end is None

    async def is_open(self) -> bool:
        """Report whether the agent can start a rank.

        It can if its server runs and no process of an earlier attempt remains. Waits for the end of
        a process that was just killed.
        """
        if self._client is None:
            return False
        if self._running:
            await self._wait_end(STOP_S)
        return self._client.connected and not self._running

    async def _end_previous(self) -> None:
        """Kill the process of the previous attempt, if it still runs, and wait for its end.

        It runs if the driver considered the rank lost, for example because the agent did not answer
        in time. Two processes would share the GPU, the snapshot memory and the log.
        """
        if not self._running:
            return
        await self.stop(0.0)
        await self._wait_end(DYING_S)
        if self._running:
            state, _ = process_state(self.pid)
            raise LaunchError(
                f"process {self.pid} of the previous attempt did not end after SIGKILL (its "
                f"state is {state}): "
                "see dmesg on the node for the disk or the device that it waits for"
            )

    async def _reset(self, base: str) -> None:
        """Clear the state of the previous attempt, once its last checkpoint is on the disk."""
        if self._writer is not None:
            await self._writer.wait()
        if self._event_reader is not None:
            self._event_reader.cancel()
        self._events = []
        for kind in ("value", "value.error", "value.end"):
            Path(f"{base}.{kind}").unlink(missing_ok=True)

    async def news(self, patience: float) -> RankNews:
        """Return new events, log bytes, the heartbeat and its age, and last of all the rank's end.

        Waits `patience` seconds so that one reply carries many events. An end, or its cause, is
        reported at once.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        rank_end, server_quiet = self._end, self._server.quiet()
        if server_quiet > SERVER_S and self._saving():
            self._server.end_server()
        if rank_end is not None and self._event_reader is not None:
            writing = self._writer.reading if self._writer is not None else None
            readers = {self._event_reader} | ({writing} if writing is not None else set())
            # A child of the rank may still hold the other end.
            await asyncio.wait(readers, timeout=0.5)
        log = self._log.read(LOG_CHUNK)
        events, self._events = self._events, []
        nccl = self._nccl.news() if self._nccl else b""
        more = len(log) == LOG_CHUNK or len(nccl) == nccl_output.CHUNK
        if more:
            self._news.set()
        step, phase, at = read_beat(self._beat)
        if self._nccl and rank_end is None and (why := self._nccl.refusal()):
            events.append(self._end_refused(why))
        end = None
        if rank_end is not None and not more:
            error = recorded_error(self._error_file)
            end = replace(rank_end, step=step, phase=phase, error=error, told=self._told)
        quiet = time.time() - at if at else 0.0
        beat, work, pauses = (
            (step, phase, at),
            read_compute_time(self._beat),
            read_pauses(self._beat),
        )
        return RankNews(
            events, log, nccl, beat, quiet, work, pauses, end, server_quiet, time.time()
        )

    def tell_now(self) -> None:
        """Reply to GetNews now: the driver has waited long enough."""
        self._news.set()

    async def examine(self) -> RankActivity | None:
        """Return what the rank's process is doing now; None if it has ended.

        That is its state, the CPU it uses, its stacks and its last collectives.

        If a rank does not answer because native code holds the GIL, a signal makes it write its
        main thread's stack: after EXAMINE_S if it sleeps, after ANSWER_S if it is busy. A part that
        can't be read is empty.
        """
        if not self.pid or self._end is not None:
            return None
        self._activity = None
        state, before = process_state(self.pid)
        self.tell_rank(TellActivity())
        await asyncio.sleep(EXAMINE_S)
        state, after = process_state(self.pid)
        answer_by = time.monotonic() + (ANSWER_S - EXAMINE_S if after > before else 0)
        while self._activity is None and time.monotonic() < answer_by:
            await asyncio.sleep(0.05)
        told = self._activity
        if told is None:
            send_signal = partial(self._server.send, SignalProcess(self.pid, STACKS_SIGNAL))
            told = Activity(
                await main_stack(
                    self.pid, self.folder / f"rank-{self.rank}.value.stacks", send_signal
                ),
                (),
            )
        busy, beat = (after - before) / EXAMINE_S, read_beat(self._beat)
        return RankActivity(self.pid, state, busy, told.stack, told.collectives, beat)

    async def hold(self, request: HoldRank) -> int:
        """Ask the rank to pause after its current step, and return that step.

        Raises LaunchError if the rank has ended.
        """
        if self._end is not None:
            raise LaunchError("the rank has ended")
        held: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._holding.append(held)
        self.tell_rank(request)
        return await held

    def tell_rank(self, message: RankMessage) -> None:
        """Send a message to the rank, if it is connected."""
        if self._to_rank is not None:
            self._to_rank.write(encode(message) + b"\n")

    def value(self) -> RankValue:
        """Return the job's pickled result or exception.

        It travels over Ray's authenticated channel.
        """
        return recorded_end.read_value(self.folder / f"rank-{self.rank}")

    async def flush(self) -> list[EventJson]:
        """Write this node's newest snapshot to the disk, and return the writer's events."""
        if self._writer is not None:
            await self._writer.wait()
            if self.pid:
                await asyncio.wait({self._writer.start(WriteCheckpoint())})
        events, self._events = self._events, []
        return events

    async def stop(self, grace: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace` seconds, and wait for the end.

        Without grace, send SIGKILL at once.
        """
        if not self.pid:
            return
        self._stopping = True
        self._told |= self._end is None and not self._raised
        if grace and self._end is None:
            self._server.send(SignalProcess(self.pid, signal.SIGTERM))
            await self._wait_end(grace)
        if self._end is None:
            self._server.send(SignalProcess(self.pid, signal.SIGKILL))
            self._server.quiet(0.0)
            await self._wait_end(STOP_S)
        if self._end is None and self._server.quiet() >= STOP_S:
            self._server.end_server()
            await self._wait_end(1)

    def network_use(self) -> NetworkUse:
        """Return the counters of this node's network ports and the rank's channels in NCCL's log.

        Only the node's first agent returns the counters.
        """
        nccl_file, rank_log = (self.folder / f"rank-{self.rank}.{kind}" for kind in ("nccl", "log"))
        text = nccl_output.read_nccl_output(nccl_file, rank_log)
        ports = counters.read_counters() if self._lead else None
        return NetworkUse(ports, network_nccl_log.parse_nccl_log(text))

    async def check_up(self, request: CheckupRequest[Any]) -> Any:
        """Answer a request of the doctor's check-up."""
        from raydist.node.checkup import Checkup  # only the doctor needs it

        self._checkup = self._checkup or Checkup()
        return await self._checkup.handle(request)

    async def close(self) -> None:
        """Disconnect from the fork server, and end the server if this agent owns it.

        When the agent disconnects, the server ends the rank and the store.
        """
        if self._checkup is not None:
            await self._checkup.close()
        if self._connecting is not None:
            # The first agent may have failed while this one still waits for its server.
            self._connecting.cancel()
        if self._client is not None:
            if self._client.quiet() > STOP_S:
                self._client.end_server()
            await self._client.close()
        for task in list(self._tasks):
            task.cancel()
        if self._own_server is not None:
            await asyncio.to_thread(self._own_server.end)
        if self._client is not None and self._lead:
            shutil.rmtree(self.folder, ignore_errors=True)  # a killed server leaves it

    @property
    def _server(self) -> ForkClient:
        """The fork server of this node, once the agent is open."""
        assert self._client is not None, "open() comes first"
        return self._client

    def _saving(self) -> bool:
        """Return whether ranks wait for a checkpoint.

        They wait for its writer, or for the fork server to report that the writer has ended.
        """
        _, phase, at = read_beat(self._beat)
        return (self._writer is not None and self._writer.busy) or (
            phase == "save" and time.time() - at > SERVER_S
        )

    def _end_refused(self, why: str) -> EventJson:
        """Kill the rank because a setting forbids it to continue.

        Return the event that the rank would have sent if it had raised a LaunchError.
        """
        self._server.send(SignalProcess(self.pid, signal.SIGKILL))
        return {
            "t": time.time(),
            "kind": "raised",
            "rank": self.rank,
            "type": "LaunchError",
            "message": why,
            "traceback": "",
            "step": read_beat(self._beat)[0],
        }

    def _end_without_news(self, error: Exception) -> RankNews:
        """Kill the rank because its news can't be read, and return the error as the rank's end.

        If the request itself failed, the driver would consider the agent lost and replace it.
        """
        if self._running:
            self._server.send(SignalProcess(self.pid, signal.SIGKILL))
        beat, message = read_beat(self._beat), f"its agent can't read its news: {error}"
        recorded = RecordedError(type(error).__name__, message, traceback.format_exc())
        end = RankEnd(1, 0, time.time(), step=beat[0], phase=beat[1], error=recorded)
        return RankNews((), b"", b"", beat, 0.0, (0, 0.0, 0.0), 0.0, end, sent=time.time())

    async def _await_end(self, pid: int, ended: asyncio.Future[ProcessEnd]) -> None:
        either: set[asyncio.Future[Any]] = {ended, *filter(None, [self._event_reader])}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # The rank has closed its socket, as it does when it ends: the server should report the end.
        while not ended.done():
            await asyncio.wait({ended}, timeout=1.0)
            if not ended.done() and self._server.quiet() > SERVER_S:
                self._server.end_server()
        self._note_end(pid, RankEnd(**vars(ended.result())))

    def _note_end(self, pid: int, end: RankEnd) -> None:
        count = self._oom_count
        if count is not None and not self._stopping and (end.code or end.signal):
            killed = end.signal == signal.SIGKILL and not end.lost
            why, by_kernel = (
                oom.oom_verdict(pid, count) if killed else (oom.killed_beside(count), False)
            )
            end = replace(end, why=why, oom="kernel" if by_kernel else "")
        self._end = end
        self._news.set()
        while self._holding:
            self._note_hold(LaunchError("the rank has ended"))

    def _note_connection(self, to_rank: asyncio.StreamWriter) -> None:
        self._to_rank = to_rank

    def _handle_reply(self, message: Message) -> None:
        if isinstance(message, Activity):
            self._activity = message
        elif isinstance(message, Holding) and self._holding:
            self._note_hold(message.step)

    def _note_hold(self, outcome: int | LaunchError) -> None:
        """Complete the oldest HoldRank, with the rank's step or with an error."""
        held = self._holding.popleft()
        if held.done():  # cancelled when the agents' event loop ended
            return
        if isinstance(outcome, int):
            held.set_result(outcome)
        else:
            held.set_exception(outcome)

    def _add_event(self, event: EventJson) -> None:
        """Keep an event for the driver.

        Of consecutive reports of a rank other than 0, only the newest is kept.
        """
        kind = event["kind"]
        self._raised |= kind == "raised"
        if kind == "save":
            assert self._writer is not None, "open() comes first"
            self._writer.start(WriteCheckpoint(last=False))
        elif (
            kind == "report" and self.rank and self._events and self._events[-1]["kind"] == "report"
        ):
            self._events[-1] = event
        else:
            self._events.append(event)
        if kind in ("raised", "joined", "left", "save_shards"):
            self._news.set()

    async def _wait_end(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the rank."""
        until = time.monotonic() + seconds
        while self._end is None and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop holds only weak references
        task.add_done_callback(self._tasks.discard)
        return task


def write_at_once(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the whole file or none."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    os.replace(part, path)
