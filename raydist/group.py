"""The gang of seats: open, start, stop, ask; whatever carries them (Ray's actors, or a thread here). (driver)"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raydist import errors, fabric_findings, preload, rescue, script, shipping, sight, traffic
from raydist.config import Job, as_dict
from raydist.errors import ConfigError, LaunchError
from raydist.events import Events
from raydist.fabric import Meet, Var
from raydist.node.facts import Facts
from raydist.placement import Plan
from raydist.placement import Seat as Place
from raydist.reserve import Reserve
from raydist.result import End
from raydist.straggler import Slow
from raydist.transport import Log

OPEN_S = 300.0
"""Longest wait for a node to import torch: a cold network file system takes minutes."""
ANSWER_S = 60.0
"""Longest wait for an answer that takes no time."""
NETWORK_S = 2.0
"""Longest wait for what the networks carried: a run that is over does not wait for a line of its summary."""
CLOSE_S = 2.0
"""Longest wait for seats to let go before their actors are killed."""

Call = Callable[..., "Future[Any]"]
"""(rank, method, *arguments) -> the answer to come."""


class Gang(AbstractContextManager["Gang"]):
    """All seats of a run. One round opens them, one starts the ranks; vigil.py then listens."""

    def __init__(
        self,
        plan: Plan,
        call: Call,
        events: Events,
        gpus: Callable[[], Sequence[Sequence[str] | None]] | None = None,
        settle: Callable[[], None] = lambda: None,
        renew: Callable[[Sequence[int]], Plan] | None = None,
        draining: Callable[[], Mapping[str, float]] = dict,
        reserve: Reserve | None = None,
    ) -> None:
        """`gpus`: each rank's GPUs, where somebody keeps account. `settle`: what can wait until the ranks have met.

        `renew`: finds another place for the ranks of lost nodes, and gives the plan with it. `draining`: the nodes that
        are about to be taken away, each with its deadline in seconds since the epoch, or 0. `reserve`: nodes beside
        those of the ranks, where there may be any.
        """
        self.plan = plan
        self.first = plan.world_size
        """Ranks that it began with."""
        self.call = call
        self.settle = settle
        self.draining = draining
        self.facts: tuple[Facts, ...] = ()
        self.missing: tuple[Mapping[str, str], ...] = ()
        """By rank: the modules that its node could not import, each with the error."""
        self.meet = Meet()
        self.report_to: Callable[[End | None, Sequence[Slow]], None] = lambda cause, slow: None
        """Takes what went wrong in an attempt: its first cause, and the ranks that held up the others."""
        self._ports: list[traffic.Ports | None] = []
        self._events = events
        self._gpus = gpus
        self._renew = renew
        self.reserve = reserve
        self._runs: dict[str, str] = {}
        self._found: dict[str, dict[str, Any]] = {}
        """By node id: the name of its fork server, if it has one of its own, and what its first seat found."""

    def open(self, job: Job, modules: Sequence[str], home: dict[str, Any] | None = None, attempt: int = 0) -> None:
        """Round 1: probe every node, warm its fork server, open the store on rank 0's node.

        `home`: a server that is on its way already on the driver's machine, as home.warm offers it. `attempt`: so many
        attempts were made by other gangs.
        """
        began = time.time()
        file = self._meeting_file(job, attempt)
        self._same = {
            "run": uuid.uuid4().hex[:8], "start": job.start, "modules": list(modules), "env": job.env,
            "interface": job.fabric.interface, "threads": max(1, int(job.scale.cpus)),
            "home": home,
            "mpirun": job.backend.mpi.mpirun, "secret": secrets.token_hex(32),
        }  # fmt: skip
        self._job, self._files = job, sight.files(job, str(file.parent) if file else "")
        self._installs = ", ".join(job.pip)
        self._store = "horovod" if job.backend.name == "horovod" else "tcp"
        if self.reserve is not None:
            self.reserve.equip(self._same)
        answers = self._open(range(self.plan.world_size), None if file else self._store)
        born = max(began, *(answer["born"] for answer in answers))
        self._events.say("phase", name="actors", s=born - began)
        self._events.say("phase", name="warm-up", s=time.time() - born)
        self._learn()
        port, secret = answers[0]["store"] or (None, "")
        self.meet = Meet(self.facts[0].address, port, str(file) if file else None, secret, attempt)

    def again(self, job: Job, attempt: int, resize: bool = False) -> list[int]:
        """Make ready for another attempt: seats in the place of lost ones (their ranks), and a fresh store for all.

        `resize`: with the nodes that have come.
        """
        before = {seat.node.id for seat in self.plan.seats}
        if resize:
            self._replace([])
        until, moved = time.monotonic() + job.scale.wait_s, set[int]()
        while lost := sorted({*self.lost(), *self.going()}):
            moved.update(lost)
            try:
                self._replace(lost)
            except LaunchError:
                if self._renew is None or time.monotonic() > until:
                    raise
        with contextlib.suppress(Exception):  # an older one will do
            self.call(0, "rest").result(rescue.FLUSH_S)
        file = self._meeting_file(job, attempt)
        port, secret = None, ""
        if file is None:
            port, secret = self.call(0, "open_store", self._store, self.facts[0].address).result(ANSWER_S)
        self.meet = Meet(self.facts[0].address, port, str(file) if file else None, secret, attempt)
        if self.reserve is not None:  # ranks are counted anew
            return [seat.rank for seat in self.plan.seats if seat.node.id not in before]
        return sorted(moved)

    def lost(self) -> list[int]:
        """The ranks whose seat is gone, or new and not open yet."""
        calls = [self.call(seat.rank, "here") for seat in self.plan.seats]
        wait(calls, timeout=ANSWER_S)
        return [
            rank
            for rank, answer in enumerate(calls)
            if not answer.done() or answer.exception() is not None or not answer.result()
        ]

    def going(self) -> list[int]:
        """The ranks whose nodes are about to be taken away, where those that stay are enough to go on."""
        if self.reserve is None:
            return []
        away = self.draining()
        ranks = [seat.rank for seat in self.plan.seats if seat.node.id in away]
        return ranks if ranks and self.reserve.enough() else []

    def values(self) -> list[dict[str, bytes]]:
        """What each rank returned or raised, pickled; of seats that are gone nothing."""
        calls = [self.call(seat.rank, "value") for seat in self.plan.seats]
        wait(calls, timeout=ANSWER_S)
        return [{} if not each.done() or each.exception() is not None else each.result() for each in calls]

    def flush(self) -> None:
        """Have the last snapshot written to the disk."""
        nodes = [rescue.Node(seat.node.host, partial(self.call, seat.rank, "flush")) for seat in self._leads]
        rescue.flush(nodes, self._job.checkpoint, self._events.add)

    def _replace(self, lost: Sequence[int]) -> None:
        """Seats in the place of these."""
        if self._renew is None:
            raise LaunchError(f"the seat of rank {lost[0]} is gone, and there is no other machine")
        self.plan = self._renew(lost)
        self._same["home"] = None
        for id_, (run, answer) in (self.reserve.taken() if self.reserve else {}).items():
            self._runs[id_], self._found[id_] = run, answer
        new = self.lost() if self.reserve else lost
        for seat in (self.plan.seats[rank] for rank in new):
            if seat.local_rank == 0:
                self._runs[seat.node.id] = uuid.uuid4().hex[:8]
        self._open(new, None)
        self._learn()

    def _open(self, ranks: Sequence[int], store: str | None) -> list[dict[str, Any]]:
        """Open these seats; what each found. `store`: which kind rank 0 opens with it."""
        seats = [self.plan.seats[rank] for rank in ranks]
        asks = [
            {
                **self._same,
                "run": self._runs.get(seat.node.id, self._same["run"]),
                "rank": seat.rank,
                "node": seat.node.id,
                "ip": seat.node.ip,
                "lead": seat.local_rank == 0,
                "store": store if seat.rank == 0 else None,
            }
            for seat in seats
        ]
        looks = self._look(self._files) if not self.facts else None  # a run that is on its way goes on as it can
        if self._installs:
            self._events.say("wait", text=f"Ray installs {self._installs} on each node; the first time takes minutes")
        patience = OPEN_S + (shipping.INSTALL_S if self._installs else 0.0)
        answers = self.every("open", asks, patience=patience, ranks=ranks)
        self._warn(seats, answers)
        found = {seat.node.id: answer for seat, answer in zip(seats, answers, strict=True) if seat.local_rank == 0}
        self._found.update(found)
        if looks:
            self._refuse_blind(looks())
        return answers

    def _refuse_blind(self, seen: Sequence[Mapping[str, str]]) -> None:
        """Refuse, or tell, what nodes can't see of the files of the run."""
        source = preload.source_of(self._job.job.target)
        text = source.read_text(encoding="utf-8", errors="replace") if source and source.is_file() else ""
        if odd := sight.check(self._job, self._hosts, seen, text, self._files):
            self._events.say("warning", text=odd)

    @property
    def _leads(self) -> list[Place]:
        return [seat for seat in self.plan.seats if seat.local_rank == 0]

    @property
    def _hosts(self) -> list[str]:
        return [seat.node.host for seat in self._leads]

    def _look(self, files: Mapping[str, str]) -> Callable[[], list[dict[str, str]]]:
        """Ask each node which of these files it can't see; what gives the answers, once they are there."""
        calls = [self.call(seat.rank, "blind", dict(files), self._job.env) for seat in self._leads]
        return lambda: [each.result(ANSWER_S * 2) for each in calls]

    def check_sight(self, word: str, file: str, why: str) -> None:
        """Refuse a word that names a file which some nodes can't see."""
        sight.refuse_blind(word, self._hosts, self._look({"file": file})(), why)

    @staticmethod
    def _meeting_file(job: Job, attempt: int = 0) -> Path | None:
        """The file that ranks meet in, where they do: a new one for each attempt."""
        if job.init_method != "file":
            return None
        file = Path(job.dir).absolute() / ("rendezvous" + (f"-{attempt}" if attempt else ""))
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def start(self, job: Job, variables: Sequence[Iterable[Var]], call: bytes | None) -> None:
        """Round 2: give every rank its variables, and fork. `call`: a pickled function, if one travels."""
        fabric_findings.check(job, self.plan, self.facts, lambda text: self._events.say("warning", text=text))
        sent = shipping.root(job)
        program = script.seen_from(sent or os.getcwd(), job.script)
        paths = [path for path in sys.path if not sent or os.path.abspath(path) != sent]
        cwd = "" if sent else os.getcwd()  # a seat that is told no folder takes its actor's: the copy
        same = {"job": as_dict(job), "cwd": cwd, "script": program, "sys_path": paths}
        envs = [{var.name: var.value for var in own} for own in variables]
        args = [script.fill(job.args, env, job.init_method, self.plan.ask.backend) for env in envs]
        first = program or job.job.target
        specs = [{**same, "rank": i, "env": env, "argv": [first, *args[i]]} for i, env in enumerate(envs)]
        pids = self.every("start", [(spec, call) for spec in specs])
        for seat, pid in zip(self.plan.seats, pids, strict=True):
            self._events.say("began", rank=seat.rank, host=seat.node.host, pid=pid)

    def say_network(self) -> None:
        """Tell which network carried the run; nothing for a run on one node, or where a node is gone."""
        if len(self.plan.nodes) < 2:
            return
        try:
            answers = self.every("network", [()] * self.plan.world_size, patience=NETWORK_S)
        except LaunchError:
            return
        seats = self.plan.seats
        leads = [seat for seat in seats if seat.local_rank == 0]
        nodes = [
            traffic.Node(
                seat.node.host,
                self.facts[seat.rank].interface,
                self._ports[seat.rank] or {},
                answers[seat.rank]["ports"] or {},
            )
            for seat in leads
        ]
        places = [lead.node_rank for lead in leads]
        logs = [Log.from_dict(answer["nccl"]) for answer in answers]
        told = traffic.tell(self.plan.ask.backend, nodes, [places.index(seat.node_rank) for seat in seats], logs)
        for text in told.pop("odd"):
            self._events.say("warning", text=text)
        self._events.say("network", **told)

    def stop(self, ranks: Iterable[int], grace: float) -> None:
        """End these ranks: SIGTERM, `grace` seconds, SIGKILL. Does not wait; whoever listens hears their ends."""
        for rank in ranks:
            self.call(rank, "stop", grace)

    def every(
        self, method: str, arguments: Sequence[Any], patience: float = ANSWER_S, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """One call to every seat (or to those of `ranks`), all at once; the answers in order.

        A LaunchError names the first bad seat.
        """
        seats = self.plan.seats if ranks is None else [self.plan.seats[rank] for rank in ranks]
        calls = [
            self.call(seat.rank, method, *(argument if isinstance(argument, tuple) else (argument,)))
            for seat, argument in zip(seats, arguments, strict=True)
        ]
        wait(calls, timeout=patience, return_when="FIRST_EXCEPTION")
        for seat, answer in zip(seats, calls, strict=True):
            if answer.done() and (error := answer.exception()) is not None:
                kind = ConfigError if isinstance(error, ConfigError) else LaunchError
                raise kind(f"rank {seat.rank} on {seat.node.host} ({seat.node.ip}): {errors.cause(error)}") from error
        silent = [seat for seat, answer in zip(seats, calls, strict=True) if not answer.done()]
        if silent:
            raise LaunchError(
                f"{len(silent)} of {len(calls)} seats did not answer '{method}' within {patience:g} s, "
                f"the first is rank {silent[0].rank} on {silent[0].node.host} ({silent[0].node.ip})"
            )
        return [answer.result() for answer in calls]

    def __exit__(self, *_: object) -> None:
        beside = self.reserve.close() if self.reserve else []
        wait([*beside, *(self.call(seat.rank, "close") for seat in self.plan.seats)], timeout=CLOSE_S)

    def _learn(self) -> None:
        """Note what each rank's node is like: what its first seat found, with the rank's own GPUs."""
        gpus = self._gpus() if self._gpus else [None] * self.plan.world_size
        found = [self._found[seat.node.id] for seat in self.plan.seats]
        self.facts = tuple(
            replace(Facts.from_dict(answer["facts"]), gpus=own) for answer, own in zip(found, gpus, strict=True)
        )
        self._ports = [answer["ports"] for answer in found]
        self.missing = tuple(answer["warm"].get("failed", {}) for answer in found)

    def _warn(self, seats: Sequence[Place], answers: Sequence[dict[str, Any]]) -> None:
        for seat, answer in zip(seats, answers, strict=True):
            if answer["warm"].get("cuda"):
                text = (
                    f"a module imported on {seat.node.host} initialised CUDA, which no fork survives: say start=spawn"
                )
                self._events.say("warning", text=text)
