"""The seat of one rank: starts its process, watches it, answers for it. (actor)

A Seat is a plain class with coroutines. An actor on its node hosts it; without Ray a thread of the driver does.
It never imports torch, so it can answer, take a signal and end the rank whatever the rank is stuck in.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist import transport
from raydist.node import counters, nccl_log, oom
from raydist.node.fork_client import ForkClient
from raydist.node.nccl_log import NcclLog
from raydist.node.processes import catches, recorded, state_of
from raydist.node.server import ForkServer, folder, heritage
from raydist.node.wire import ASK, BEAT_PAGE, GOING, HERE, STACKS_SIGNAL, read_beat, read_own

if TYPE_CHECKING:
    from raydist.events import Event
    from raydist.node.checkup import Checkup

LOG_CHUNK = 1 << 20
"""Most bytes of a rank's output in one answer."""
LOOK_S = 0.6
"""Seconds that a look at a rank takes: CPU time is counted in hundredths."""


class Seat:
    """One rank's place on a node. The driver calls open, start, watch …, stop, close, in this order."""

    def __init__(self) -> None:
        self.born = time.time()
        self.rank = -1
        self.pid = 0
        self._store_pid = 0
        self._nccl: NcclLog | None = None
        self._own: ForkServer | None = None
        self._client: ForkClient | None = None
        self._news = asyncio.Event()
        self._events: list[Event] = []
        self._end: dict[str, Any] | None = None
        self._adds: dict[str, str] = {}
        """Variables that the rank gets from elsewhere; those of its spec win over them."""
        self._hands: list[int] = []
        """Descriptors that the rank gets beside log, channel and heartbeat."""
        self._error: Path | None = None
        self._drained: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._collectives: list[dict[str, Any]] = []
        self._saving: asyncio.Task[None] | None = None
        self._checkup: Checkup | None = None
        self._leaving = asyncio.Event()
        self._kills: oom.Count | None = None
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Round 1: look at the machine, bring up or join the node's fork server, open the store if rank 0 sits here.

        `ask`: what group.Gang.open sends. The lead of a node answers with its facts.
        """
        self.rank, self._lead = ask["rank"], ask["lead"]
        name, home = f"raydist-{os.getuid()}-{ask['run']}-{ask['node'][-8:]}", ask["home"]
        at_home = home is not None and home["heritage"] == heritage()
        self._at = Path(home["folder"]) if at_home else folder(name)
        self.folder = self._at / name if at_home else self._at
        facts = None
        if at_home:
            self.folder.mkdir(exist_ok=True)  # whichever seat comes first
        if ask["lead"]:
            if not at_home:
                self._own = ForkServer.launch(self._at, ask["start"], ask["modules"], ask["threads"], env=ask["env"])
            facts = look(ask["ip"], ask["interface"])
        self._client = await ForkClient.dial(self._at)
        warm = (await self._server.reply("warm"))["warm"]
        opened = await self.open_store(ask["store"], facts["address"]) if facts and ask["store"] else None
        return {
            "facts": facts,
            "born": self.born,
            "warm": warm,
            "store": opened,
            "ports": counters.read() if ask["lead"] else None,
        }

    async def blind(self, files: dict[str, str], env: dict[str, str]) -> dict[str, str]:
        """Which of these files this node can't see, and why."""
        from raydist.node import sight

        return await sight.blind(files, env)

    async def open_store(self, kind: str, address: str) -> tuple[int, str]:
        """A fresh store for an attempt, on the node of this seat; its port, and the secret that opens it."""
        if self._store_pid:
            self._server.tell(op="kill", pid=self._store_pid, signal=signal.SIGKILL)
        self._server.tell(op="store", store=kind, address=address)
        opened = await self._server.reply("store")
        if isinstance(opened["store"], str):
            raise OSError(f"the rendezvous store could not listen on {address}: {opened['store']}")
        self._store_pid = opened["pid"]
        return opened["store"], opened["secret"]

    async def start(self, spec: dict[str, Any], call: bytes | None) -> int:
        """Round 2: fork the rank with its variables; its pid."""
        self.rank = spec["rank"]  # a seat may get another rank when the size changes
        base = self.folder / f"rank-{self.rank}"
        if call is not None:
            Path(f"{base}.call").write_bytes(call)
        spec = {**spec, "call": call and f"{base}.call", "value": f"{base}.value"}
        here = {name: value.replace(HERE, str(self.folder)) for name, value in spec["env"].items()}
        spec["env"] = {**os.environ, "RAYDIST_SCRATCH": str(self.folder), **self._adds, **here}
        if spec.get("script"):
            self._error = Path(f"{base}.error.json")
            self._error.unlink(missing_ok=True)
            spec["env"]["TORCHELASTIC_ERROR_FILE"] = str(self._error)
        spec["cwd"] = spec["cwd"] if os.path.isdir(spec["cwd"]) else os.getcwd()
        spec["sys_path"] = [*spec["sys_path"], *(path for path in sys.path if path not in spec["sys_path"])]
        await self._forget(str(base))
        fabric = spec["job"]["fabric"]
        self._nccl = NcclLog(Path(f"{base}.nccl"), aloud=fabric["debug"], strict=fabric["strict"])
        self._log = open(f"{base}.log", "w+b", buffering=0)  # noqa: SIM115 - read until the rank is gone
        beat = os.open(f"{base}.beat", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(beat, BEAT_PAGE)
        self._beat = mmap.mmap(beat, BEAT_PAGE)
        ours, its = socket.socketpair()
        append = os.open(f"{base}.log", os.O_WRONLY | os.O_APPEND)
        self._server.tell([append, its.fileno(), beat, *self._hands], op="fork", spec=spec)
        for descriptor in (append, beat):
            os.close(descriptor)
        its.close()
        self.pid = int((await self._server.reply("forked"))["forked"])
        self._drained = self._spawn(self._drain(ours))
        self._kills, self._stopping = oom.count(self.pid), False
        self._spawn(self._see_end(self.pid))
        return self.pid

    async def _forget(self, base: str) -> None:
        """Leave the attempt before this one behind, once its last checkpoint is on the disk."""
        await self.rest()
        if self._drained is not None:
            self._drained.cancel()
        self._events, self._end = [], None
        self._leaving.clear()
        for kind in ("value", "value.error"):
            Path(f"{base}.{kind}").unlink(missing_ok=True)

    async def watch(self, patience: float) -> dict[str, Any]:
        """What is new: events, bytes of the log, the heartbeat and its age, and how the rank ended, last of all.

        Waits `patience` seconds so that an answer carries many events; only an end, or what says why, comes at once.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        gone = self._end
        if gone is not None and self._drained is not None:
            told = {self._drained} | ({self._saving} if self._saving else set())
            await asyncio.wait(told, timeout=0.5)  # a stray process may still hold the other end
        log = self._log.read(LOG_CHUNK)
        events, self._events = self._events, []
        said = self._nccl.news() if self._nccl else b""
        more = len(log) == LOG_CHUNK or len(said) == nccl_log.CHUNK
        if more:
            self._news.set()
        step, phase, at = read_beat(self._beat)
        quiet = time.time() - at if at else 0.0
        if self._nccl and gone is None and (why := self._nccl.refusal()):
            events.append(self._refuse(why))
        answer: dict[str, Any] = {"events": events, "log": log, "beat": (step, phase, at), "quiet": quiet, "nccl": said}
        answer["own"] = read_own(self._beat)
        if gone is not None and not more:
            answer["end"] = {**gone, "step": step, "phase": phase, "error": recorded(self._error)}
        return answer

    async def examine(self) -> dict[str, Any]:
        """What the rank is doing: the state of its process, the CPU it uses, its stacks, its last collectives.

        Takes `LOOK_S`, whatever state the rank is in; what it can't tell is left out.
        """
        if not self.pid or self._end is not None:
            return {}
        stacks = self.folder / f"rank-{self.rank}.value.stacks"
        self._collectives = []
        state, before = state_of(self.pid)
        with contextlib.suppress(OSError):
            os.truncate(stacks, 0)
        if catches(self.pid, STACKS_SIGNAL):  # another program than Python would die of it
            self._server.tell(op="kill", pid=self.pid, signal=STACKS_SIGNAL)
        if self._writer is not None:
            self._writer.write(ASK + b"\n")
        await asyncio.sleep(LOOK_S)
        state, after = state_of(self.pid)
        found = stacks.read_text(errors="replace") if stacks.exists() else ""
        busy = (after - before) / LOOK_S
        return {"pid": self.pid, "state": state, "busy": busy, "stack": found, "collectives": self._collectives}

    async def leave(self, word: str) -> None:
        """Say to the rank when to leave, as in context.Leave; returns once it knows the step, if one is named."""
        if self._writer is not None:
            self._writer.write(f"{word}\n".encode())
            if word.startswith("leave:"):
                await self._leaving.wait()

    async def prepare(self) -> None:
        """Tell the rank that it is about to leave this node."""
        await self.leave(GOING.decode())

    async def value(self) -> dict[str, bytes]:
        """What the job returned or raised, pickled; it travels by Ray's own authenticated channel."""
        paths = {
            kind: self.folder / f"rank-{self.rank}.value{end}" for kind, end in (("value", ""), ("error", ".error"))
        }
        return {kind: path.read_bytes() for kind, path in paths.items() if path.exists()}

    async def here(self) -> bool:
        """Whether this seat is open: one that has come in the place of a lost one is not."""
        return self._client is not None and self._client.connected

    async def rest(self) -> None:
        """Wait until the checkpoint that is being written is on the disk."""
        if self._saving is not None:
            await asyncio.wait({self._saving})

    async def flush(self, parts: dict[str, Any] | None = None) -> list[Event]:
        """Have this node's newest snapshot written to the disk (`parts`: as node.parts.act); what there is to tell."""
        await self.rest()
        if self.pid:
            await asyncio.wait({self._save(None, parts)})
        events, self._events = self._events, []
        return events

    def _save(self, slot: int | None, parts: dict[str, Any] | None = None) -> asyncio.Task[None]:
        """Have a snapshot written to the disk. Its writer tells its own events."""
        ours, its = socket.socketpair()
        self._server.tell([its.fileno()], op="save", slot=slot, parts=parts)
        its.close()
        self._saving = self._spawn(self._drain(ours, of_rank=False))
        return self._saving

    async def stop(self, grace: float) -> None:
        """SIGTERM, `grace` seconds, SIGKILL; with no grace SIGKILL at once. Returns when the process is gone."""
        if not self.pid:
            return
        self._stopping = True
        if grace and self._end is None:
            self._server.tell(op="kill", pid=self.pid, signal=signal.SIGTERM)
            await self._gone(grace)
        if self._end is None:
            self._server.tell(op="kill", pid=self.pid, signal=signal.SIGKILL)
            await self._gone(5)

    async def network(self) -> dict[str, Any]:
        """What the ports of this node have carried (from its lead), and what NCCL said of the rank's channels."""
        text = nccl_log.read(self.folder / f"rank-{self.rank}.nccl", self.folder / f"rank-{self.rank}.log")
        return {"ports": counters.read() if self._lead else None, "nccl": asdict(transport.parse(text))}

    async def check(self, step: str, *args: Any) -> Any:
        """One step of a check-up of this node."""
        from raydist.node.checkup import Checkup  # only the doctor asks for it

        self._checkup = self._checkup or Checkup()
        return await getattr(self._checkup, step)(*args)

    async def close(self) -> None:
        """Let go of everything: hanging up ends the rank and the store, the lifeline ends the server."""
        if self._checkup is not None:
            await self._checkup.close()
        if self._client is not None:
            await self._client.close()
        for task in list(self._tasks):
            task.cancel()
        if self._own is not None:
            await asyncio.to_thread(self._own.end)
        elif self._client is not None and self._lead:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _server(self) -> ForkClient:
        """The fork server of this node, once the seat is open."""
        assert self._client is not None, "open() comes first"
        return self._client

    def _refuse(self, why: str) -> Event:
        """End the rank for a reason of ours, as if it had raised it."""
        self._server.tell(op="kill", pid=self.pid, signal=signal.SIGKILL)
        return {
            "t": time.time(), "kind": "raised", "rank": self.rank, "type": "LaunchError", "message": why,
            "traceback": "", "step": read_beat(self._beat)[0],
        }  # fmt: skip

    async def _see_end(self, pid: int) -> None:
        end = await self._server.end_of(pid)
        if self._kills is not None and not self._stopping and (end["code"] or end["signal"]):
            killed = end["signal"] == signal.SIGKILL and "lost" not in end
            end["why"] = oom.verdict(pid, self._kills) if killed else oom.beside(self._kills)
        self._end = end
        self._news.set()

    async def _drain(self, sock: socket.socket, of_rank: bool = True) -> None:
        """Read the rank's events until it hangs up. Of the reports of ranks other than 0 only the newest is kept."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 26)
        if of_rank:
            self._writer = writer
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                happened = json.loads(line)
                kind = happened["kind"]
                if kind == "save":
                    self._save(happened["slot"])
                elif kind == "leaving":
                    self._leaving.set()
                elif kind == "collectives":
                    self._collectives = happened["entries"]
                elif kind == "report" and self.rank and self._events and self._events[-1]["kind"] == "report":
                    self._events[-1] = happened
                else:
                    self._events.append(happened)
                if kind in ("raised", "joined", "held", "left"):
                    self._news.set()
        writer.close()

    async def _gone(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._end is None and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._tasks.discard)
        return task


def look(ip: str, interface: str | None) -> dict[str, Any]:
    """The facts of this machine, as JSON-able data."""
    from raydist.node import probe

    return asdict(probe.look(ip=ip, interface=interface, gpus=None))
