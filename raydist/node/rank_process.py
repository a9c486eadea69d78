"""One start of a rank: its process, from the fork to the end that is reported. (actor)"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raydist.messages.agent import (
    DYING_S,
    NativeStack,
    ProcessEnd,
    ProcessId,
    RankActivity,
    RankEnd,
    RankNews,
    RankStatus,
    RecordedError,
    StackWay,
    StartRank,
)
from raydist.messages.rank import Activity, GoOn, HoldForAction, Holding, HoldRank
from raydist.messages.server import RankSpec, WriteCheckpoint
from raydist.node import gpu_faults, native_stack, oom
from raydist.node.commands import Commands
from raydist.node.fork_client import ForkClient
from raydist.node.processes import (
    end_all_of,
    identify,
    main_stack,
    main_thread_cpu,
    process_state,
    session_members,
    wants_cpu,
)
from raydist.node.rank_channel import RankChannel
from raydist.node.rank_reports import RankReports
from raydist.node.ras_client import RasPort, ask_ras
from raydist.node.writer import Writer
from raydist.shared.errors import LaunchError
from raydist.worker.heartbeat import STACKS_SIGNAL, heartbeat_page

if TYPE_CHECKING:
    from raydist.shared.kinds import EventJson

EXAMINE_S = 0.6
"""Seconds over which a rank's CPU time is measured: the kernel counts it in hundredths of a
second."""
LOOK_S = 0.05
"""Seconds between two looks at the CPU time of a rank that has not answered yet."""
QUICK_S = 0.6
"""Seconds after which a rank of which no thread wants a CPU does not answer. They are counted by
looks: while the whole machine stalls, it can't answer."""
HELD_S = 1.0
"""CPU seconds of its main thread after which a rank does not answer."""
TICK_S = 0.01
"""The unit in which the kernel counts CPU time."""
STOP_S = 3.0
"""Limit on the wait for a rank's end after SIGKILL. The driver gives up after 5 s
(launch.limits.SILENT_S)."""
SERVER_S = 10.0
"""Seconds after which a fork server that is needed but does not answer is killed."""
PARK_S = 3.0
"""Seconds that a rank has to leave its step before it is killed: a new process has made its first
step by then."""
ANSWER_S = 3.0
"""Seconds that NVML or a busy rank has to answer. A signal handler that interrupts its Python code
may crash it."""


class ForkedRank(NamedTuple):
    """A rank's process that has just been forked."""

    id: ProcessId
    end: asyncio.Future[ProcessEnd]
    channel: socket.socket
    """The agent's end of the channel."""
    reports: RankReports
    spec: RankSpec


async def fork_process(
    server: ForkClient, request: StartRank, spec: RankSpec, descriptors: Sequence[int]
) -> ForkedRank:
    """Have the server fork a rank, and remove what its previous start has left.

    `descriptors`: further ones, for the rank. Raises OSError if the server can't fork.
    """
    beat = heartbeat_page()
    port = RasPort(spec.env)
    spec = replace(spec, env=port.env)
    reports = RankReports(Path(spec.value).parent, request, beat, port)
    agent_end, rank_end = socket.socketpair()
    log = os.open(f"{reports.base}.log", os.O_WRONLY | os.O_APPEND)
    try:
        pid, ended = await server.fork(spec, [log, rank_end.fileno(), beat, *descriptors])
    finally:
        for descriptor in (log, beat):
            os.close(descriptor)
        rank_end.close()
    return ForkedRank(identify(pid), ended, agent_end, reports, spec)


class RankProcess:
    """One start of a rank.

    The next start of the rank is another object, which nothing that comes late from this process,
    and no request that still waits for it, can reach.
    """

    def __init__(
        self,
        forked: ForkedRank,
        server: ForkClient,
        writer: Writer,
        explain: Callable[[RankEnd], RankEnd],
    ) -> None:
        """`explain`: returns the end with what the agent knows about its cause."""
        self._fork = forked
        self.channel = RankChannel(forked.channel, self._add_event)
        self.commands = Commands(server, forked.spec.env, forked.spec.cwd)
        self.end: RankEnd | None = None
        self._server = server
        self._writer = writer
        self._explain = explain
        self._oom_count = oom.read_count(self.pid)
        """The kernel's count of OOM kills when the rank began this attempt."""
        self._stopping = False
        self._stop_requested = False
        """See RankEnd.stop_requested."""
        self._watcher = asyncio.create_task(self._await_end(forked.end))
        self.reports.xids.start(self.commands.env)

    @property
    def id(self) -> ProcessId:
        return self._fork.id

    @property
    def pid(self) -> int:
        return self._fork.id.pid

    @property
    def reports(self) -> RankReports:
        return self._fork.reports

    @property
    def running(self) -> bool:
        return self.end is None

    @property
    def waits(self) -> bool:
        """Whether the process waits for the next attempt."""
        return self.channel.parked_at > 0 and self.running

    def go_on(self, request: StartRank) -> bool:
        """Have a process that waits continue in this attempt; return whether there is one."""
        if not self.waits:
            return False
        self.channel.parked_at = 0.0
        self._stopping = False
        self._stop_requested = False
        self._oom_count = oom.read_count(self.pid)
        self.channel.tell(GoOn(self.reports.begin(request)))
        return True

    def release(self) -> None:
        """Stop to listen to the process: a child of it may hold the channel open."""
        self.channel.reader.cancel()
        self._watcher.cancel()
        self.reports.xids.close()
        self.reports.ras_port.close()
        self.commands.end()

    async def news(self, patience: float) -> RankNews:
        """Return new events, log bytes, the heartbeat and its age, and last of all the rank's end.

        Waits `patience` seconds so that one reply carries many events. An end, or its cause, is
        reported at once.
        """
        try:
            return await self._read_news(patience)
        except Exception as error:
            return self._end_without_news(error)

    async def _read_news(self, patience: float) -> RankNews:
        await self.reports.wait(patience)
        end, server_quiet = self.end or self._kept_end(), self._server.quiet()
        if server_quiet > SERVER_S and self._saving():
            self._server.end_server()
        if end is not None and not end.kept:
            readers = {self.channel.reader}
            if self._writer.reader is not None and not (end.code or end.signal):
                readers.add(self._writer.reader)  # a rank that finishes waits for its checkpoint
            # A child of the rank may still hold the other end.
            await asyncio.wait(readers, timeout=0.5)
        elif end is None and (why := self.reports.nccl.refusal()):
            self._end_refused(why)
        return self.reports.read(end, server_quiet)

    def status(self) -> RankStatus | None:
        """Return what is known about the running process without asking it; None: it has ended."""
        if not self.running:
            return None
        status = self.reports.status(self.pid, process_state(self.pid)[0])
        return replace(status, held=self.channel.debugger.place)

    async def examine(self, quick: bool = False) -> RankActivity | None:
        """Return what the rank's process is doing now; None if it has ended.

        That is its state, the CPU it uses, its stacks and its last collectives; and a fault of its
        GPUs.

        If a rank does not answer because native code holds the GIL, a signal makes it write its
        main thread's stack: soon after EXAMINE_S if it sleeps, after ANSWER_S if it is busy or gets
        no CPU. A part that can't be read is empty. `quick`: as in Examine.
        """
        if not self.running:
            return None
        fault = None
        if not quick:
            fault = asyncio.create_task(gpu_faults.find_fault(self.reports.xids.gpus, ANSWER_S))
        state, before = process_state(self.pid)
        began = time.monotonic()
        self.channel.ask_activity()
        if quick:
            await self._await_activity(state)
        else:
            await asyncio.sleep(EXAMINE_S)
            state, after = process_state(self.pid)
            if after > before:
                await self.channel.await_activity(ANSWER_S - EXAMINE_S)
            else:
                await self._await_activity(state)
        after = process_state(self.pid)[1]
        busy = (after - before) / max(time.monotonic() - began, TICK_S)
        activity = self.channel.activity
        way: StackWay = "thread"
        if activity is None:
            send_signal = partial(self._send_signal, STACKS_SIGNAL)
            stacks = Path(f"{self.reports.base}.value.stacks")
            activity = Activity(await main_stack(self.pid, stacks, send_signal), ())
            way = "signal" if activity.stack else ""
        beat, stack = self.reports.beat(), activity.stack
        found = RankActivity(self.pid, state, busy, stack, activity.collectives, beat, way)
        if fault is None:
            return found
        faults = [*self.reports.xids.lines(faults_only=True), await fault]
        return replace(found, gpu_fault="; ".join(filter(None, faults)))

    async def _await_activity(self, state: str) -> None:
        """Wait until the rank answers, or can't because native code keeps the GIL.

        It can't if it is stopped; if all its threads sleep for QUICK_S without an answer; or if its
        main thread computes for HELD_S: one that runs Python code releases the GIL every 5 ms.
        """
        before, began, asleep_s = main_thread_cpu(self.pid), time.monotonic(), 0.0
        while self.channel.activity is None and state not in ("T", "t", ""):
            await self.channel.await_activity(LOOK_S)
            used, waited = main_thread_cpu(self.pid) - before, time.monotonic() - began
            asleep_s += 0.0 if wants_cpu(self.pid) else LOOK_S
            if waited > ANSWER_S or used > HELD_S or (asleep_s > QUICK_S and used <= TICK_S):
                return

    async def native_stack(self) -> NativeStack | None:
        """Return what py-spy says about the rank; None if it has ended."""
        return await native_stack.read(self.pid) if self.running else None

    async def ask_nccl(self) -> str:
        """Return what the RAS of its NCCL says of all communicators; empty: nothing."""
        return await ask_ras(self.commands.env) if self.running else ""

    async def hold(self, request: HoldRank | HoldForAction) -> Holding:
        """Ask the rank to pause after its current step, and return that step.

        Raises LaunchError if the rank has ended.
        """
        if not self.running:
            raise LaunchError("the rank has ended")
        return await self.channel.hold(request)

    async def stop(self, grace: float, keep: bool = False) -> None:
        """Send SIGTERM, then SIGKILL after `grace` seconds, and wait for the end.

        Without grace, send SIGKILL at once. `keep`: leave a process that can wait for the next
        attempt.
        """
        self._stopping = True
        self._stop_requested |= self.running and not self.reports.raised
        if keep and self.running and await self._parks():
            return
        if grace and self.running:
            self._send_signal(signal.SIGTERM)
            await self.wait_end(grace)
        if self.running:
            self.kill()
            self._server.quiet(0.0)
            await self.wait_end(STOP_S)
        if self.running and self._server.busy:  # it began to import before it read the signal
            self.kill()
            await self.wait_end(STOP_S)
        if self.running and self._server.quiet() >= STOP_S:
            self._server.end_server()
            await self.wait_end(1)

    async def _parks(self) -> bool:
        """Ask the rank to wait for the next attempt; return whether it does."""
        if await self.channel.park(PARK_S) or not self.running:
            return False
        self.channel.parked_at = time.time()
        self.reports.due.set()
        return True

    def _kept_end(self) -> RankEnd | None:
        """Return what the driver gets as the end of a process that waits; None if it does not."""
        at = self.channel.parked_at
        return RankEnd(0, 0, at, stop_requested=True, kept=True) if at else None

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send_signal(signal.SIGKILL)

    async def has_ended(self) -> bool:
        """Report whether the process has ended, or waits for the next attempt.

        Waits for the end of one that was just killed.
        """
        if self.waits:
            return True
        await self.wait_end(STOP_S)
        return not self.running

    async def make_way(self) -> None:
        """Kill the process, if it still runs, and wait for its end: the next start is to follow.

        It runs if the driver considered the rank lost, for example because the agent did not answer
        in time. Two processes would share the GPU, the snapshot memory and the log. Raises
        LaunchError if it can't be killed.
        """
        if self.running:
            await self.stop(0.0)
            await self.wait_end(DYING_S)
        if self.running:
            raise LaunchError(unkillable(self.pid))

    async def wait_end(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the rank."""
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _send_signal(self, number: int) -> None:
        self._server.signal(self.id, number, self._fork.end)

    def _add_event(self, event: EventJson) -> None:
        """Keep an event of the rank for the driver, or do what it requests."""
        if event["kind"] == "save":
            self._writer.start(WriteCheckpoint(last=False), needed=not event.get("kept"))
        else:
            self.reports.add(event)

    def _saving(self) -> bool:
        """Return whether ranks wait for a checkpoint.

        They wait for its writer, or for the fork server to report that the writer has ended.
        """
        _, phase, at = self.reports.beat()
        return self._writer.busy or (phase == "save" and time.time() - at > SERVER_S)

    def _end_refused(self, why: str) -> None:
        """Kill the rank because a setting forbids it to continue.

        Add the event that the rank would have sent if it had raised a LaunchError.
        """
        self.kill()
        self.reports.events.append(
            {
                "t": time.time(),
                "kind": "raised",
                "rank": self.reports.rank,
                "type": "LaunchError",
                "message": why,
                "traceback": "",
                "step": self.reports.beat()[0],
            }
        )

    def _end_without_news(self, error: Exception) -> RankNews:
        """Kill the rank because its messages can't be read, and return the error as the rank's end.

        If the request itself failed, the driver would consider the agent lost and replace it.
        """
        if self.running:
            self.kill()
        beat, message = self.reports.beat(), f"its agent can't read its messages: {error}"
        recorded = RecordedError(type(error).__name__, message, traceback.format_exc())
        end = RankEnd(1, 0, time.time(), step=beat[0], phase=beat[1], error=recorded)
        return RankNews((), b"", b"", beat, 0.0, (0, 0.0, 0.0), 0.0, end, sent=time.time())

    async def _await_end(self, ended: asyncio.Future[ProcessEnd]) -> None:
        either: set[asyncio.Future[Any]] = {ended, self.channel.reader}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # The rank has closed its socket, as it does when it ends: the server should report the end.
        while not ended.done():
            await asyncio.wait({ended}, timeout=1.0)
            if not ended.done() and self._server.quiet() > SERVER_S:
                self._server.end_server()
        if ended.result().lost:  # its server has died, which would end what the rank has started
            await end_all_of(session_members(self.id), STOP_S)
        end = self._with_causes(RankEnd(**vars(ended.result())))
        self.end = replace(end, gpu_report=await self._report_gpu(end))
        self.reports.xids.close()
        self.reports.due.set()
        self.channel.note_end()

    def _with_causes(self, end: RankEnd) -> RankEnd:
        """Return the end with what the agent and the kernel know about its cause."""
        end = replace(
            self._explain(end),
            stop_requested=self._stop_requested,
            why_not_kept=self.channel.why_not_parked,
        )
        if not self._stopping and (end.code or end.signal):
            killed = end.signal == signal.SIGKILL and not end.lost
            why, by_kernel = (
                oom.oom_verdict(self.pid, self._oom_count)
                if killed
                else (oom.other_victims(self._oom_count), False)
            )
            end = replace(end, why=why, oom="kernel" if by_kernel else "")
        return end

    async def _report_gpu(self, end: RankEnd) -> str:
        """Return what NVML reports about a failed rank's GPUs: Xids, and whether one is lost.

        For a rank that was stopped because others failed, only faults of the GPU. NVML is not
        queried for a killed rank: the restart would wait for the answer.
        """
        failed = self.reports.raised or end.code or end.signal
        if end.stop_requested or not failed:
            return "; ".join(self.reports.xids.lines(faults_only=True))
        lines = self.reports.xids.lines()
        if self.reports.raised or end.signal != signal.SIGKILL:
            gpus = self.reports.xids.gpus
            lines.append(await gpu_faults.find_fault(gpus, ANSWER_S, lost_only=True))
        return "; ".join(filter(None, lines))


async def end_earlier(processes: Sequence[ProcessId]) -> None:
    """Wait for the end of the ranks of an agent that was lost on this node, and of their children.

    Their fork server kills them, too, but only once it notices that the agent is gone, and it may
    have died. Raises LaunchError if one can't be killed.
    """
    members = [member for rank in processes for member in session_members(rank)]
    if left := await end_all_of((*processes, *members), DYING_S):
        raise LaunchError(unkillable(left.pid))


def unkillable(pid: int) -> str:
    """Return the text about a process that stands in the way of the next attempt."""
    return (
        f"process {pid} of the previous attempt did not end after SIGKILL (its state is "
        f"{process_state(pid)[0]}): see dmesg on the node for the disk or the device that it waits "
        "for"
    )
