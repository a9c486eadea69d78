"""What one start of a rank reports: events, output, NCCL's log, heartbeat, an error. (actor)"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.messages.agent import RankEnd, RankNews, RankStatus, StartRank
from raydist.network import ras
from raydist.node import nccl_output
from raydist.node.nccl_output import NcclLog
from raydist.node.output_file import OutputFile
from raydist.node.processes import recorded_error
from raydist.node.ras_client import RasPort
from raydist.node.xid_watch import XidWatch
from raydist.shared import kinds
from raydist.worker.heartbeat import BEAT_PAGE, read_beat, read_compute_time, read_pauses

if TYPE_CHECKING:
    from raydist.shared.kinds import EventJson

LOG_CHUNK = 1 << 20
"""Maximum bytes of a rank's output in one reply."""

AT_ONCE = ("raised", "joined", "left", "held", "released", "meet_request", "save_shards")
"""The kinds of events that the driver should get now."""


class RankReports:
    """What one start of a rank reports, until the driver has got it."""

    def __init__(self, folder: Path, request: StartRank, beat: int, port: RasPort) -> None:
        """Remove what an earlier start has left. `beat`: the descriptor of the rank's heartbeat.

        `port`: of its NCCL's RAS.
        """
        self._request = request
        """That of the newest attempt."""
        self._began_at = time.time()
        """When this attempt began here, in seconds since the epoch."""
        self.ras_port = port
        self.base = folder / f"rank-{request.rank}"
        """The path of the rank's files without their endings."""
        for kind in ("value", "value.error", "value.end", "error.json"):
            Path(f"{self.base}.{kind}").unlink(missing_ok=True)
        self.nccl = NcclLog(
            Path(f"{self.base}.nccl"), aloud=request.nccl_aloud, strict=request.nccl_strict
        )
        self._log = OutputFile(Path(f"{self.base}.log"))
        self._error_file = Path(f"{self.base}.error.json") if request.script else None
        self._beat = mmap.mmap(beat, BEAT_PAGE)
        self.events: list[EventJson] = []
        self.due = asyncio.Event()
        """Whether the driver should get the reports now."""
        self.raised = False
        """Whether the rank has reported an exception."""
        self.xids = XidWatch(self._warn, request.gpus)

    @property
    def rank(self) -> int:
        return self._request.rank

    def begin(self, request: StartRank) -> dict[str, str]:
        """Begin the next attempt of the same process; return the variables that differ.

        NCCL has read the address of its RAS already.
        """
        before, self._request, self._began_at = self._request.env, request, time.time()
        return {k: v for k, v in request.env.items() if before.get(k) != v and k != ras.ADDRESS}

    def add(self, event: EventJson) -> None:
        """Keep an event for the driver.

        Of consecutive reports of a rank other than 0, only the newest is kept.
        """
        kind = event["kind"]
        self.raised |= kind == "raised"
        if kind == "report" and self.rank and self.events and self.events[-1]["kind"] == "report":
            self.events[-1] = event
        else:
            self.events.append(event)
        if kind in AT_ONCE:
            self.due.set()

    def _warn(self, text: str) -> None:
        self.add(kinds.Warning(text=text, rank=self.rank).to_json())

    def take_events(self) -> list[EventJson]:
        """Return the events that have not been taken."""
        events, self.events = self.events, []
        return events

    async def wait(self, patience: float) -> None:
        """Wait until the driver should get the reports, at most `patience` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.due.wait(), patience)
        self.due.clear()

    def read(self, end: RankEnd | None, server_quiet: float) -> RankNews:
        """Return what is new, and the rank's end once all of its output has been read.

        `server_quiet`: as in RankNews.
        """
        log = self._log.read(LOG_CHUNK)
        events = self.take_events()
        nccl = self.nccl.news()
        more = len(log) == LOG_CHUNK or len(nccl) == nccl_output.CHUNK
        if more:
            self.due.set()
        step, phase, at = beat = self.beat()
        if end is not None:
            error = recorded_error(self._error_file)
            end = None if more else replace(end, step=step, phase=phase, error=error)
        quiet = self._quiet_s(at)
        work, pauses = read_compute_time(self._beat), read_pauses(self._beat)
        return RankNews(
            events, log, nccl, beat, quiet, work, pauses, end, server_quiet, time.time()
        )

    def status(self, pid: int, state: str) -> RankStatus:
        """Return the status of the running rank. `state`: that of its process."""
        beat = self.beat()
        quiet, now = self._quiet_s(beat[2]), time.time()
        return RankStatus(pid, state, beat, quiet, read_compute_time(self._beat), at=now)

    def _quiet_s(self, at: float) -> float:
        """Return the age of a heartbeat in seconds, since the attempt began at most.

        A process that waited for the attempt had nothing to do, maybe for minutes.
        """
        return time.time() - max(at, self._began_at) if at else 0.0

    def beat(self) -> tuple[int, str, float]:
        """Return the last heartbeat: step, phase, seconds since the epoch."""
        return read_beat(self._beat)

    def nccl_text(self) -> str:
        """Return NCCL's log."""
        return nccl_output.read_nccl_output(Path(f"{self.base}.nccl"), Path(f"{self.base}.log"))
