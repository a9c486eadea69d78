"""The doctor's checks in order; each sends one request to all nodes at once. (driver)"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from concurrent.futures import wait
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TypeVar

from raydist.launch import preload
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import FindUnreachablePaths
from raydist.messages.checkup import CallPeers, CheckHost, ListenForPeers, ReachStore, TryLibraries
from raydist.messages.request import Request
from raydist.network import checks_node
from raydist.network import variables as network_variables
from raydist.network.finding import CHECKS
from raydist.node import dryrun
from raydist.node.path_check import CHECK_S
from raydist.node.peers import patience
from raydist.settings.config import Job
from raydist.shared.errors import last_line
from raydist.tools import doctor_findings
from raydist.tools.doctor_findings import Host
from raydist.tools.doctor_report import Report

Reply = TypeVar("Reply")

ANSWER_S = 60.0
TRIED = {"gloo": ("gloo",), "nccl": ("gloo", "nccl"), "horovod": ("nccl",)}
"""Backend -> libraries to try. Horovod's own gloo can't be tried without ranks."""


class Rounds:
    """The checks on an open worker group. Causes come before their effects."""

    def __init__(
        self, job: Job, group: WorkerGroup, report: Report, timeout: float, probe: str = ""
    ) -> None:
        """Prepare the checks.

        `probe`: a file in the job's storage, which every node must see; empty without storage.
        """
        self._job = job
        self._probe = probe
        self._group = group
        self._report = report
        self._timeout = timeout
        self._leads = group.plan.leads
        self._facts = [group.facts[lead.rank] for lead in self._leads]
        names = [lead.node.host for lead in self._leads]
        self._hosts = [
            # Host names may be equal: two raylets on one machine, or pods that all have one name.
            Host(
                name if names.count(name) == 1 else f"{name}/{lead.node.ip}",
                facts.address,
                facts.interface,
            )
            for name, lead, facts in zip(names, self._leads, self._facts, strict=True)
        ]

    def make(self) -> None:
        """Run all checks."""
        self._report.describe(self._group.plan, self._hosts)
        self._variables = network_variables.plan_variables(
            self._job, self._group.plan, self._group.facts, self._group.rendezvous
        )
        self._check_facts()
        self._check_software()
        self._check_machines()
        self._check_rendezvous()
        if len(self._hosts) > 1:
            self._check_peers()
        self._check_libraries()

    def _ask(
        self, step: str, requests: Sequence[Request[Reply]], extra: float = 0.0
    ) -> list[Reply | None]:
        """Return the reply of each node to its request.

        A node without a reply yields None and a finding.
        """
        patience = ANSWER_S + extra
        calls = [
            self._group.call(lead.rank, request)
            for lead, request in zip(self._leads, requests, strict=True)
        ]
        wait(calls, timeout=patience)
        replies: list[Reply | None] = []
        nodes_by_error: dict[str, list[str]] = {}
        for host, call in zip(self._hosts, calls, strict=True):
            error = (
                call.exception()
                if call.done()
                else TimeoutError(f"no answer within {patience:g} s")
            )
            replies.append(None if error else call.result())
            if error:
                nodes_by_error.setdefault(last_line(error), []).append(host.name)
        self._report.add("launch", *doctor_findings.check_answers(step, nodes_by_error))
        return replies

    def _check_facts(self) -> None:
        """Run the checks that need only facts.

        A job without GPUs does not use RDMA: its passed checks are not listed.
        """
        for check in CHECKS if self._report.gpus else ():
            self._report.note_check(check)
        for finding in checks_node.findings(self._job, self._group.plan, self._group.facts):
            if finding.check != "hostname":  # _check_machines resolves the name on the node itself
                self._report.add(finding.check, finding)

    def _check_software(self) -> None:
        versions = [{**facts.versions, "python": facts.python} for facts in self._facts]
        self._report.add("versions", *doctor_findings.compare_versions(self._hosts, versions))
        # The job's own files travel with the rank's import path; only installed packages must be on
        # every node.
        missing = [
            {
                name: why
                for name, why in self._group.nodes.failed_imports(lead).items()
                if preload.lasting_modules([name])
            }
            for lead in self._leads
        ]
        self._report.add(
            "imports",
            *doctor_findings.check_imports(self._hosts, missing, packages_distributions()),
        )

    def _check_machines(self) -> None:
        folder = Path(self._job.dir)
        addresses = [""]
        if len(self._hosts) > 1:
            addresses = [host.address for host in [*self._hosts[1:], self._hosts[0]]]
        requests = [CheckHost(str(folder), address, self._job.env) for address in addresses]
        checks = self._ask("look", requests)
        shm = [None if check is None else check.shm_error for check in checks]
        sees = [None if check is None else check.sees_folder for check in checks]
        names = [None if check is None else check.addresses for check in checks]
        lookups = [None if check is None else check.lookup_s for check in checks]
        tracing = [None if check is None else check.tracing for check in checks]
        self._report.add("shm", *doctor_findings.check_shm(self._hosts, shm))
        self._report.add("stacks", *doctor_findings.check_stacks(self._hosts, tracing))
        if self._probe:
            self._check_storage()
        else:
            self._report.add(
                "run folder",
                *doctor_findings.check_run_folder(self._hosts, sees, str(folder.parent)),
            )
        if len(self._hosts) > 1:
            by_name = self._job.fabric.kind != "site"
            found = doctor_findings.check_hostnames(self._hosts, names, by_name)
            self._report.add("hostname", *found)
            self._report.add("lookup", *doctor_findings.check_lookups(self._hosts, lookups))

    def _check_storage(self) -> None:
        """Make each node look for a file in the storage, with the job's credentials."""
        request = FindUnreachablePaths({"storage": self._probe}, self._job.env)
        errors = self._ask("storage", [request] * len(self._hosts), CHECK_S)
        storage = self._probe.rpartition("/")[0]
        self._report.add(
            "storage", *doctor_findings.check_storage_seen(self._hosts, errors, storage)
        )

    def _check_rendezvous(self) -> None:
        meet = self._group.rendezvous
        if meet.port is not None:
            request = ReachStore(meet.address, meet.port, self._timeout)
            errors = self._ask("reach", [request] * len(self._hosts), self._timeout)
            self._report.add(
                "rendezvous", *doctor_findings.check_rendezvous(self._hosts, errors, meet.port)
            )

    def _check_peers(self) -> None:
        secret = secrets.token_bytes(32)
        listening = self._ask(
            "listen", [ListenForPeers(host.address, secret) for host in self._hosts]
        )
        peers = [peer for peer in listening if peer is not None]
        if len(peers) < len(listening):
            return
        began = time.perf_counter()
        requests = [CallPeers(peers, index, secret, self._timeout) for index in range(len(peers))]
        trips = self._ask("call", requests, patience(len(peers), self._timeout))
        self._report.note_trips(trips, time.perf_counter() - began)
        bad = list(doctor_findings.check_peers(self._hosts, trips))
        for check in ("peers", "mtu"):
            self._report.add(check, *(finding for finding in bad if finding.check == check))
        self._report.add("latency", *doctor_findings.check_latency(self._hosts, trips))
        self._report.add("clock", *doctor_findings.check_clocks(self._hosts, trips))

    def _check_libraries(self) -> None:
        names = TRIED.get(self._job.backend.name, ())
        if not self._group.plan.request.rank_resources.get("GPU"):
            names = tuple(name for name in names if name != "nccl")
        if names:
            variables = [
                {var.name: var.value for var in self._variables[lead.rank]} for lead in self._leads
            ]
            requests = [TryLibraries(names, of_rank) for of_rank in variables]
            replies = self._ask("try_out", requests, len(names) * dryrun.LIMIT_S)
            addresses = [facts.interfaces.get(facts.interface, ()) for facts in self._facts]
            bad = list(doctor_findings.check_loaded_libraries(self._hosts, replies, addresses))
            for name in names:
                self._report.add(name, *(finding for finding in bad if finding.check == name))
