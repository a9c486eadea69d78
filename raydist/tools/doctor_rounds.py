"""The doctor's rounds: one question to every node at once, then the next. (driver)"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from raydist import fabric, fabric_findings, preload
from raydist.config import Job
from raydist.errors import cause
from raydist.findings import CHECKS
from raydist.group import Gang
from raydist.node.peers import patience
from raydist.tools import doctor_findings as found
from raydist.tools.doctor_findings import Host
from raydist.tools.doctor_report import Report

ANSWER_S = 60.0
TRY_S = 300.0
"""Longest wait for gloo and NCCL to be tried out: torch comes from a cold network file system once for each."""
TRIED = {"gloo": ("gloo",), "nccl": ("gloo", "nccl"), "horovod": ("nccl",)}
"""Which libraries a backend brings along; Horovod's own gloo can't be tried without its ranks."""


class Rounds:
    """The checks on an open gang, in the order in which one failure explains the next."""

    def __init__(self, job: Job, gang: Gang, report: Report, timeout: float) -> None:
        self._job = job
        self._gang = gang
        self._report = report
        self._timeout = timeout
        self._leads = [seat for seat in gang.plan.seats if seat.local_rank == 0]
        self._facts = [gang.facts[lead.rank] for lead in self._leads]
        names = [lead.node.host for lead in self._leads]
        self._hosts = [
            # two raylets on one machine, or pods that all have one name
            Host(name if names.count(name) == 1 else f"{name}/{lead.node.ip}", facts.address, facts.interface)
            for name, lead, facts in zip(names, self._leads, self._facts, strict=True)
        ]

    def make(self) -> None:
        """All of them."""
        self._report.describe(self._gang.plan, self._hosts)
        self._variables = fabric.variables(self._job, self._gang.plan, self._gang.facts, self._gang.meet)
        self._known()
        self._software()
        self._machines()
        self._rendezvous()
        if len(self._hosts) > 1:
            self._peers()
        self._libraries()

    def _ask(self, step: str, arguments: Sequence[tuple[Any, ...]], extra: float = 0.0) -> list[Any]:
        """The answer of each node to one question; None, and a finding, where there is none."""
        asked, patience = zip(self._leads, arguments, strict=True), ANSWER_S + extra
        calls = [self._gang.call(lead.rank, "check", step, *own) for lead, own in asked]
        wait(calls, timeout=patience)
        answers: list[Any] = []
        silent: dict[str, list[str]] = {}
        for host, call in zip(self._hosts, calls, strict=True):
            error = call.exception() if call.done() else TimeoutError(f"no answer within {patience:g} s")
            answers.append(None if error else call.result())
            if error:
                silent.setdefault(cause(error), []).append(host.name)
        self._report.add("launch", *found.silent(step, silent))
        return answers

    def _known(self) -> None:
        """What the facts alone tell. Of a job without GPUs only what is wrong: it has no use for RDMA."""
        for check in CHECKS if self._report.gpus else ():
            self._report.passed(check)
        for finding in fabric_findings.findings(self._job, self._gang.plan, self._gang.facts):
            if finding.check != "hostname":  # that is looked at more closely below
                self._report.add(finding.check, finding)

    def _software(self) -> None:
        told = [{**facts.versions, "python": facts.python} for facts in self._facts]
        self._report.add("versions", *found.versions(self._hosts, told))
        # A person's own files come with the rank's import path; only what is installed here has to be there too.
        missing = [
            {
                name: why
                for name, why in self._gang.missing[lead.rank].items()
                if preload.is_installed(name.split(".")[0])
            }
            for lead in self._leads
        ]
        self._report.add("imports", *found.imports(self._hosts, missing))

    def _machines(self) -> None:
        folder = Path(self._job.dir)
        seen = self._ask("look", [(str(folder),)] * len(self._hosts))
        shm, sees, name = ([own and own[what] for own in seen] for what in ("shm", "sees", "name"))
        self._report.add("shm", *found.shm(self._hosts, shm))
        self._report.add("run folder", *found.run_folder(self._hosts, sees, str(folder.parent)))
        if len(self._hosts) > 1:
            self._report.add("hostname", *found.hostnames(self._hosts, name))

    def _rendezvous(self) -> None:
        meet = self._gang.meet
        if meet.port is not None:
            own = [(meet.address, meet.port, self._timeout)] * len(self._hosts)
            refused = self._ask("reach", own, self._timeout)
            self._report.add("rendezvous", *found.rendezvous(self._hosts, refused, meet.port))

    def _peers(self) -> None:
        secret = secrets.token_bytes(32)
        peers = self._ask("listen", [(host.address, secret) for host in self._hosts])
        if None in peers:
            return
        began = time.perf_counter()
        own = [(peers, index, secret, self._timeout) for index in range(len(peers))]
        trips = self._ask("call", own, patience(len(peers), self._timeout))
        self._report.measured(trips, time.perf_counter() - began)
        found_bad = list(found.peers(self._hosts, trips))
        for check in ("peers", "mtu"):
            self._report.add(check, *(finding for finding in found_bad if finding.check == check))
        self._report.add("latency", *found.latency(self._hosts, trips))
        self._report.add("clock", *found.clocks(self._hosts, trips))

    def _libraries(self) -> None:
        names = TRIED.get(self._job.backend.name, ())
        if not self._gang.plan.ask.rank_resources.get("GPU"):
            names = tuple(name for name in names if name != "nccl")
        if names:
            variables = [{var.name: var.value for var in self._variables[lead.rank]} for lead in self._leads]
            tried = self._ask("try_out", [(names, own) for own in variables], TRY_S)
            bad = list(found.libraries(self._hosts, tried))
            for name in names:
                self._report.add(name, *(finding for finding in bad if finding.check == name))
