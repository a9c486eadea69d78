"""The agent of one rank: joins the fork server, starts the rank, answers requests. (actor)

A RankAgent is a plain class with coroutines, hosted by an actor on its node or, without Ray, by a
thread of the driver. It never imports torch, so it can answer and end the rank wherever the rank
hangs.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydist.cluster import ray_private, reach
from raydist.messages.agent import (
    AskNccl,
    Close,
    Examine,
    FindReached,
    FindUnreachablePaths,
    Flush,
    Flushed,
    GetLoad,
    GetNativeStack,
    GetNetworkUse,
    GetNews,
    GetStatus,
    GetValue,
    IsOpen,
    KeepCall,
    NetworkUse,
    Open,
    Opened,
    ProcessId,
    RankEnd,
    RankNews,
    RankValue,
    ReadDebugger,
    StartRank,
    StopRank,
    WaitForWriter,
)
from raydist.messages.checkup import CheckupRequest
from raydist.messages.command import CommandRequest
from raydist.messages.rank import (
    AttachDebugger,
    DetachDebugger,
    DoAfter,
    HoldForAction,
    HoldRank,
    HoldTimeouts,
    LetGoTimeouts,
    Meet,
    PrepareEditor,
    PrepareProfile,
    ProfileNow,
    ReleaseFromAction,
    ReleaseRank,
    StopAfter,
    TellDebugger,
)
from raydist.messages.request import Request
from raydist.messages.server import (
    BeginRun,
    FindStates,
    HoldStates,
    ImportModules,
    KeptSteps,
    ListSteps,
    OpenStore,
    SignalProcess,
    StatesFound,
    StoreAddress,
    StoreOpened,
    Warm,
    WriteCheckpoint,
)
from raydist.messages.writer import (
    CommitShards,
    DropShards,
    ListShards,
    ReadRandomStates,
    WriteShards,
)
from raydist.network import nccl_log
from raydist.node import counters, kept_server, rank_process, rank_spec, recorded_end
from raydist.node.fork_client import ForkClient
from raydist.node.fork_launcher import ForkServer
from raydist.node.load import LoadReader
from raydist.node.rank_process import RankProcess
from raydist.node.rank_spec import FromMpirun
from raydist.node.writer import Writer, read_reply
from raydist.shared.errors import LaunchError
from raydist.shared.whole_file import write_at_once

if TYPE_CHECKING:
    from raydist.network.facts import Facts
    from raydist.node.checkup import Checkup


class RankAgent:
    """The agent of one rank: what stays the same through all attempts of a run.

    A RankProcess has the rest: each attempt gets a new one.

    The driver sends Open, StartRank, GetNews …, StopRank, Close, in this order.
    """

    def __init__(self) -> None:
        self.born = time.time()
        self._lead = False
        """Whether this is the first agent of its node."""
        self._store_pid = 0
        self._own_server: ForkServer | None = None
        """The fork server, if this agent started it."""
        self._connection_task: asyncio.Task[ForkClient] | None = None
        self._writer: Writer | None = None
        self._process: RankProcess | None = None
        """The newest start of the rank."""
        self._starting = asyncio.Lock()
        """Held while the rank is forked."""
        self._load = LoadReader()
        self._checkup: Checkup | None = None
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
                return await self._news(request.patience)
            case GetStatus():
                return self._process.status() if self._process is not None else None
            case Examine(quick):
                return await self._process.examine(quick) if self._process is not None else None
            case GetNativeStack():
                return await self._process.native_stack() if self._process is not None else None
            case AskNccl():
                return await self._process.ask_nccl() if self._process is not None else ""
            case HoldRank() | HoldForAction():
                return await self._newest_process().hold(request)
            case PrepareProfile():
                return await self._running_process().channel.prepare_profile(request)
            case PrepareEditor():
                return await self._running_process().channel.prepare_editor(request)
            case StopAfter() | ReleaseRank() | DoAfter() | ReleaseFromAction() | Meet():
                return self._process.channel.tell(request) if self._process is not None else None
            case HoldTimeouts():
                return await self._running_process().channel.hold_timeouts(request)
            case LetGoTimeouts():
                return self._process.channel.tell(request) if self._process is not None else None
            case AttachDebugger() | TellDebugger() | DetachDebugger() | ProfileNow():
                return self._running_process().channel.tell(request)
            case ReadDebugger(patience):
                return await self._running_process().channel.debugger.read(patience)
            case CommandRequest():
                return await self._newest_process().commands.handle(request)
            case GetValue():
                return self.value()
            case IsOpen():
                return await self.is_open()
            case WaitForWriter():
                return await self._writer.wait_if_needed() if self._writer is not None else None
            case Flush():
                return await self.flush(request)
            case ListSteps():
                return await self._server.ask(request, KeptSteps)
            case HoldStates():
                return self._server.send(request)
            case ListShards() | WriteShards() | CommitShards() | DropShards() | ReadRandomStates():
                if self._writer is None or self._process is None:
                    return None
                return await self._writer.ask(request)
            case StopRank():
                return await self.stop(request)
            case GetNetworkUse():
                return self.network_use()
            case GetLoad():
                return await asyncio.to_thread(self._load.read)
            case FindReached(addresses, within_s):
                return await asyncio.to_thread(reach.reached_addresses, addresses, within_s)
            case CheckupRequest():
                return await self.check_up(request)
            case Close():
                return await self.close()
        raise TypeError(f"an agent can't answer {request}")

    async def open(self, request: Open) -> Opened:
        """Round 1: read the machine's facts, join the fork server, open the rendezvous store.

        Only the first agent of a node reads the facts, and chooses or starts the server.
        """
        self._lead = request.lead
        self.folder = recorded_end.run_folder_here(request.run, request.node_id)
        facts: Facts | None = None
        modules: tuple[str, ...] = ()
        place = self.folder
        if request.lead:
            self._own_server, place, modules = await asyncio.to_thread(
                kept_server.choose, request, place
            )
        # At once: a server to be kept for a moment only would end while the facts are read.
        self._connection_task = asyncio.create_task(ForkClient.connect(place))
        client = await self._connection_task
        if request.lead:
            from raydist.node import probe

            # The driver knows the GPUs of each rank.
            facts = probe.read_facts(ip=request.node_ip, interface=request.interface, gpus=None)
        self._writer = Writer(client, self._spawn)
        if request.lead:
            raylet = ray_private.raylet_pid() if request.ray_stays else 0
            keep_s = min(request.keep_s, kept_server.most_s())
            self._server.send(BeginRun(str(self.folder), keep_s, raylet))
        warm = await self._server.ask(ImportModules(modules), Warm)
        opened = (
            await self.open_store(OpenStore(request.store, facts.address))
            if facts and request.store
            else None
        )
        holds = (
            request.lead
            and request.held is not None
            and (await self._server.ask(FindStates(request.held.key), StatesFound)).ok
        )
        return Opened(
            facts=facts,
            born=self.born,
            warm=warm,
            store=opened,
            ports=counters.read_counters() if request.lead else None,
            holds=holds,
            server=str((place / "fork").resolve().parent) if request.lead else "",
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

    async def start(self, request: StartRank) -> ProcessId:
        """Round 2: fork the rank with its variables, and return its id.

        A process that waits for this attempt continues instead, if the request says so. Raises
        LaunchError if the process of the previous attempt can't be killed.
        """
        return await self._start(request, FromMpirun())

    async def _start(self, request: StartRank, given: FromMpirun) -> ProcessId:
        # The request of the previous attempt may still wait for a slow fork server.
        async with self._starting:
            return await self._fork(request, given)

    async def _fork(self, request: StartRank, given: FromMpirun) -> ProcessId:
        assert self._writer is not None, "open() comes first"
        if request.keep and self._process is not None and self._process.go_on(request):
            return self._process.id
        if self._process is not None:
            await self._process.make_way()
        await rank_process.end_earlier(request.after)
        # Not waited for: the driver has done so where the attempt needs it (WaitForWriter).
        request = replace(request, saving=request.saving or self._writer.saves)
        spec = rank_spec.complete_spec(request, self.folder, given)
        if self._process is not None:
            self._process.release()
        forked = await rank_process.fork_process(self._server, request, spec, given.descriptors)
        self._process = RankProcess(forked, self._server, self._writer, self._explain_end)
        return self._process.id

    async def is_open(self) -> bool:
        """Report whether the agent can start a rank.

        It can if its server runs and no process of an earlier attempt remains. Waits for the end of
        a process that was just killed.
        """
        if self._client is None:
            return False
        ended = self._process is None or await self._process.has_ended()
        return self._client.connected and ended

    def tell_now(self) -> None:
        """Reply to GetNews now: the driver has waited long enough."""
        if self._process is not None:
            self._process.reports.due.set()

    def value(self) -> RankValue:
        """Return the job's pickled result or exception.

        It travels over Ray's authenticated channel.
        """
        if self._process is None:
            return RankValue()
        return recorded_end.read_value(self._process.reports.base)

    async def flush(self, request: Flush) -> Flushed:
        """Write this node's newest snapshot to the disk, if it has one."""
        process = self._process
        if self._writer is None or process is None:
            return Flushed([], False)
        await self._writer.wait()
        message = WriteCheckpoint(step=request.step, random=request.random)
        await asyncio.wait({self._writer.start(message)})
        held = await self._server.ask(ListSteps(1), KeptSteps)
        if held.steps and self._writer.silent:
            raise OSError("the process that writes the state was killed, or could not be started")
        events = [*process.reports.take_events(), *self._writer.take_events()]
        return Flushed(events, bool(held.steps))

    async def stop(self, request: StopRank) -> None:
        """Stop the rank, if it has been started (RankProcess.stop), or is being started."""
        async with self._starting:
            pass  # a later start waits for the end of the process that is stopped now
        if self._process is not None:
            await self._process.stop(request.grace, request.keep)

    def network_use(self) -> NetworkUse:
        """Return the counters of this node's network ports and the rank's channels in NCCL's log.

        Only the node's first agent returns the counters.
        """
        text = self._process.reports.nccl_text() if self._process is not None else ""
        ports = counters.read_counters() if self._lead else None
        return NetworkUse(ports, nccl_log.parse_nccl_log(text))

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
        if self._connection_task is not None:
            # The first agent may have failed while this one still waits for its server.
            self._connection_task.cancel()
        if self._client is not None:
            if self._client.quiet() > rank_process.STOP_S:
                self._client.end_server()
            await self._client.close()
        for task in list(self._tasks):
            task.cancel()
        if self._process is not None:
            self._process.release()
        if self._own_server is not None:
            await asyncio.to_thread(self._own_server.end)
        if self._client is not None and self._lead:
            shutil.rmtree(self.folder, ignore_errors=True)  # a killed server leaves it

    @property
    def _client(self) -> ForkClient | None:
        """The connection to the fork server of this node; None until there is one."""
        task = self._connection_task
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    @property
    def _server(self) -> ForkClient:
        """The fork server of this node, once the agent is open."""
        assert self._client is not None, "open() comes first"
        return self._client

    def _newest_process(self) -> RankProcess:
        """Return the newest start of the rank."""
        if self._process is None:
            raise LaunchError("the rank has not been started")
        return self._process

    def _running_process(self) -> RankProcess:
        """Return the rank's process. Raises LaunchError if it has ended."""
        process = self._newest_process()
        if not process.running:
            raise LaunchError("the rank has ended")
        return process

    def _explain_end(self, end: RankEnd) -> RankEnd:
        """Return how the rank ended, with what this agent knows about the cause."""
        return end

    async def _news(self, patience: float) -> RankNews:
        """Return what is new of the rank, and of the checkpoints that its node has written."""
        news = await self._newest_process().news(patience)
        written = self._writer.take_events() if self._writer is not None else []
        return replace(news, events=[*news.events, *written])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop holds only weak references
        task.add_done_callback(self._tasks.discard)
        return task
