"""Invented runs, failures, machines and findings for tests/test_golden.py, the same each time."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.messages.checkup import Trip
from raydist.network import checks_node
from raydist.network.facts import Facts
from raydist.network.finding import Finding
from raydist.node import probe
from raydist.recovery import blame, hang_verdict, policy, straggler
from raydist.reporting.result import make_result
from raydist.reporting.resume_check import Comparison, Made, Place
from raydist.settings.config import Backend, Job, Scale
from raydist.shared.errors import LaunchError, RaydistError, Stopped
from raydist.shared.kinds import Event
from raydist.shared.outcome import Attempt, End, Slow
from raydist.tools import doctor_findings
from raydist.tools.doctor_findings import Host
from raydist.tools.doctor_report import Report
from tests import machines
from tests.records import changed, event
from tests.reporting.folds import fold_figures

FOLDER = "/data/runs/digits/2026-11-21_02-30-00"
INTERFACES = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1", "10.0.0.2")}
VERSIONS = {
    "raydist": "0.1.0",
    "torch": "2.15.0",
    "ray": "2.60.0",
    "nccl": "2.30.1",
    "cuda": "13.2.0",
}

# Nodes and machines


def nodes(count: int, gpus: int = 0) -> list[Node]:
    """Return nodes of a cluster, with 16 CPUs each."""
    have = {"CPU": 16.0, **({"GPU": float(gpus)} if gpus else {})}
    return [Node(f"id-{i}", f"10.0.0.{i}", f"node-{i}", have, have) for i in range(1, count + 1)]


def facts(root: Path, box: machines.Box, node: Node, gpus: Sequence[str] | None = None) -> Facts:
    """Return the facts of a machine as this node; it is built below `root`."""
    if not (own := root / node.host).exists():
        machines.build(own, box)
    node_facts = probe.read_facts(node.ip, None, gpus, own)
    limits = replace(node_facts.limits, shm=2**34)
    return replace(
        node_facts,
        hostname=node.host,
        cpus=node_facts.cpus if box.cpus else 16,
        python="3.11.7",
        versions=VERSIONS,
        limits=limits,
    )


# A run, event by event


def at(t: float, kind: str, **facts: Any) -> Event:
    return event(kind, t=t, **facts)


def slots(ranks: int, per_node: int, gpus: bool = False) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "host": f"node-{node}", "ip": f"10.0.0.{node}", "node": f"id-{node}",
         "local_rank": rank % per_node, "gpus": [rank % per_node] if gpus else 0}
        for rank in range(ranks) for node in [1 + rank // per_node]
    ]  # fmt: skip


def launch() -> list[Event]:
    """Return the events of a launch of 8 seconds, up to the first step."""
    return [
        at(0, "run", name="digits", dir=FOLDER, pages=0),
        at(0, "cluster", address="10.0.0.1:6379", started=False, nodes=3),
        at(1, "phase", name="connect", s=1.0),
        at(
            1,
            "avoid",
            node="id-9",
            avoided=True,
            text="node-9 (10.0.0.9) is avoided: as the ledger says",
        ),
        at(1, "wait", text="waiting for 1 more node with 2 CPU: 1 of 2 ready"),
        at(4, "phase", name="place", s=3.0),
        at(4, "plan", backend="gloo", world_size=3, slots=slots(3, 1), spares=[{"host": "node-4"}]),
        *[at(6, "began", rank=rank, host=f"node-{rank + 1}", pid=7) for rank in range(3)],
        *[at(8, "joined", rank=rank, pid=7) for rank in range(3)],
        at(8, "phase", name="rendezvous", s=2.0),
        at(8, "begin", rank=0, steps=60, epochs=2, resumed=None),
    ]


def steps(first: int, last: int, t: float) -> Iterator[Event]:
    """Yield reports of the loop from `t` on, half a second apart."""
    for step in range(first, last + 1):
        words = {
            "steps": 60,
            "epoch": 1 + (step - 1) // 30,
            "epochs": 2,
            "samples": 64 * step,
            "loss": 1 / step,
        }
        yield at(t + 0.5 * (step - first), "report", rank=0, step=step, values=words)


def restart(t: float, end: End, step: int) -> list[Event]:
    """Return the events of a restart of 2 seconds after a failure, with one repeated step."""
    retry = policy.Retry((Attempt(ends=[end]),)).as_event(
        Job(restart=replace(Job().restart, max=3)).restart
    )
    there, moved = slots(3, 1), [end.rank] if end.how == "lost" else []
    for rank in moved:
        there[rank] |= {"host": "node-4", "ip": "10.0.0.4", "node": "id-4"}
    return [
        changed(retry, t=t),
        at(t + 0.5, "placed", number=1, moved=moved, slots=there),
        *[at(t + 1, "began", rank=rank, host="h", pid=8) for rank in range(3)],
        *[at(t + 1.5, "joined", rank=rank, pid=8) for rank in range(3)],
        at(t + 1.75, "begin", rank=0, steps=60, epochs=2, resumed=step - 1),
        *steps(step, step, t + 2),
        at(t + 2, "restarted", number=1, step=step, s=t + 2 - end.at, repeated=1),
    ]


def with_result(
    events: list[Event], t: float, error: RaydistError | None = None, why: str = "", *ends: End
) -> list[Event]:
    """Return the events, followed by the result that they add up to."""
    all_ends = ends or tuple(End(rank, f"node-{rank + 1}", "finished", t, 60) for rank in range(3))
    attempt = Attempt(
        ends=all_ends, failure=blame.failure_text(all_ends), error=error, why_last=why
    )
    done = make_result(Path(FOLDER), attempt, fold_figures(events), t)
    return [*events, at(t, "result", **done.to_json())]


def finished() -> list[Event]:
    """Return the events of a run that ends well, with everything that a person may see."""
    slow = straggler.as_event([Slow(2, "node-3", 0.062, 0.05, 0.08)])
    saved = at(27, "saved", rank=0, step=30, path=f"{FOLDER}/checkpoints/step-30", s=0.2)
    events = [
        *launch(),
        *steps(1, 20, 8.5),
        at(18, "warning", rank=1, text="the disk is slow"),
        at(18, "warning", rank=2, text="the disk is slow"),
        *failure_events(KILLED, ECHO),
        *restart(18.7, KILLED, 20),
        at(20.7, "checked", text=checks()[1], resumed=19, steps=1),
        *steps(21, 30, 21),
        at(26, "report", rank=0, step=30, values={"accuracy": 0.91, "test_loss": 0.3}),
        at(26, "spent", rank=0, what="evaluate", s=0.5),
        saved,
        changed(slow, t=27),
        at(
            27,
            "notice",
            text="Ray drains node-2: it is to be taken away in 120 s",
            ranks=[1],
            hosts=["node-2"],
            s=120,
        ),
        at(
            28,
            "takeover",
            node="id-4",
            host="node-4",
            ip="10.0.0.4",
            instead="id-1",
            of="node-2",
            backend="gloo",
            world_size=3,
            slots=slots(3, 1),
        ),
        at(28, "resize", nodes=2, before=3, backend="gloo", world_size=2, slots=slots(2, 1)),
        at(29, "restarted", number=2, step=31, s=1.25, repeated=0, resized=True),
        *steps(31, 60, 29),
        at(44, "report", rank=0, step=60, values={"accuracy": 0.978, "test_loss": 0.1}),
        at(44, "network", text="2 nodes over eth0 (TCP); no node has InfiniBand", nodes=[]),
        changed(saved, t=45, step=60, path=f"{FOLDER}/checkpoints/step-60"),
    ]
    return with_result(events, 46)


def checks() -> list[str]:
    """Return what is said of the steps after a restart or a resume, in each case."""
    two, one, gpus = Place(2), Place(1), Place(2, True)
    made = Made(0.447213595, "a", two)
    near = made.loss * (1 + 2e-7)
    cases = [
        {},
        {23: (made, made)},
        dict.fromkeys((23, 24, 25), (made, made)),
        {23: (made._replace(samples=None), made)},
        {23: (made, Made(near, "a", one))},
        {23: (made, Made(near, "a", gpus))},
        {23: (made, made), 24: (made, Made(near, "a", two))},
        {23: (made._replace(samples=None), Made(near, "a", two))},
        {23: (made, Made(0.5, "a", one))},
        {23: (made, Made(0.5, "b", two))},
        {23: (made, Made(0.5, "b", one))},
    ]
    said = []
    for case in cases:
        comparison = Comparison(22, {step: before for step, (before, _) in case.items()})
        found = [comparison.add(step, now) for step, (_, now) in case.items()]
        said.append((found or [comparison.outcome()])[-1])
    return [each.text for each in said if each]


def failed() -> list[Event]:
    """Return the events of a run that hangs and is ended."""
    return with_result(
        [*launch(), *steps(1, 20, 8.5), hang(), *failure_events(HUNG)], 19, None, "", HUNG
    )


def stopped() -> list[Event]:
    """Return the events of a run that a person ends."""
    saved = at(19, "saved", rank=0, step=20, path=f"{FOLDER}/checkpoints/step-20", s=0.1)
    ended = Stopped(signal.SIGINT)
    return with_result(
        [*launch(), *steps(1, 20, 8.5), at(18.6, "stop", reason=str(ended)), saved], 19, ended
    )


def never_placed() -> list[Event]:
    """Return the events of a run that was never placed."""
    return with_result(
        launch()[:5], 31, LaunchError("gave up after 30 s (scale.wait_s): waiting for 1 more node")
    )


def program() -> list[Event]:
    """Return the events of a program with so many ranks that the screen has one row for each
    node."""
    lines = [at(2, "output", rank=rank, output=f"loss {rank}\n".encode()) for rank in range(2)]
    placed = at(1, "plan", backend="nccl", world_size=24, slots=slots(24, 8, gpus=True))
    return [
        *launch()[:2],
        placed,
        *lines,
        at(3, "output", rank=1, output=b"no end of line"),
        *with_result([], 4),
    ]


# Failures

KILLED = End(
    1,
    "node-2",
    "killed",
    18.1,
    20,
    "forward",
    signal=signal.SIGKILL,
    log=f"{FOLDER}/logs/rank-1.log",
)
ECHO = End(
    0,
    "node-1",
    "raised",
    18.2,
    20,
    type="RuntimeError",
    message="Connection closed by peer [::1]:1",
)
TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 31, in job\n    '
    "loss.backward()\nValueError: nan"
)
RAISED = replace(
    KILLED, how="raised", signal=0, type="ValueError", message="loss is nan", traceback=TRACEBACK
)
KERNEL = "out of memory: the kernel's out-of-memory killer chose it; the machine had no more"
MONITOR = (
    "out of memory: Ray's memory monitor ended its actor, because the node had no more "
    "(7.9GB used / 8GB limit)"
)
LOST = replace(KILLED, how="lost", signal=0)
STATES = [
    hang_verdict.RankState(0, "node-1", 20, "backward", state="S", collectives=[{"profiling_name": "gloo:all_reduce",
               "input_sizes": [[3]], "collective_seq_id": 10, "p2p_seq_id": 0, "process_group": ["0", "default_pg"],
               "is_p2p": False, "state": "scheduled"}]),
    hang_verdict.RankState(1, "node-2", 20, "forward", pid=42, state="T"),
]  # fmt: skip
HUNG = replace(KILLED, how="hung", signal=9, message=hang_verdict.diagnose(STATES).text)
GLOO = "op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size."
FAILURES = {
    "a killed rank": (KILLED, [ECHO, End(2, "node-3", "stopped", 18.3, 20)]),
    "an exception": (RAISED, [replace(RAISED, rank=2, at=18.11), ECHO]),
    "a hang": (HUNG, []),
    "out of memory, as the kernel finds": (replace(KILLED, why=KERNEL, oom="kernel"), [ECHO]),
    "out of memory, as Ray finds": (replace(LOST, why=MONITOR, oom="ray"), []),
    "a GPU out of memory": (
        replace(RAISED, type="OutOfMemoryError", message="CUDA out of memory."),
        [],
    ),
    "a lost node": (LOST, [ECHO]),
    "different collectives": (replace(KILLED, signal=signal.SIGABRT, message=GLOO), [ECHO]),
    "a crash in native code": (replace(KILLED, signal=signal.SIGSEGV), []),
    "a full /dev/shm": (replace(KILLED, signal=signal.SIGBUS), []),
    "an exit": (replace(KILLED, how="exited", signal=0, code=3), []),
    "only victims": (
        ECHO,
        [End(1, "node-2", "finished", 18.3, 20), End(2, "node-3", "stopped", 18.3, 20)],
    ),
}
"""The first cause, and the ends of the others."""
RESTARTED = ("a killed rank", "a lost node")


def hang() -> Event:
    verdict = hang_verdict.diagnose(STATES)
    return at(
        18.3,
        "hang",
        text=verdict.text,
        ranks=list(verdict.culprits),
        certain=verdict.certain,
        s=3.0,
    )


def failure_events(first: End, *others: End) -> list[Event]:
    """Return the events of a failure whose cause is `first`."""
    failed = blame.failure_event(first, [first, *others], 0)
    return [
        at(18.4, "stop", cause="failure", reason="a rank failed"),
        changed(failed, t=18.6),
    ]


def failure(what: str) -> list[Event]:
    """Return the events of a run with that failure, which it survives or ends with."""
    first, others = FAILURES[what]
    saved = at(18.5, "saved", rank=0, step=16, path=f"{FOLDER}/checkpoints/step-16", s=0.1)
    events = [*launch(), *steps(1, 20, 8.5), saved, *failure_events(first, *others)]
    if what in RESTARTED:
        return [*events, *restart(18.7, first, 20)]
    return with_result(events, 19, None, "2 failures within 3600 s, restart.max=1", first, *others)


# What the doctor finds


def healthy() -> Report:
    report = Report(
        [Host("node-1", "10.0.0.1", "eth0")], "2 ranks on 1 node, backend gloo, over eth0"
    )
    for check in doctor_findings.CHECKS:
        report.note_check(check)
    return report


def unplaced() -> Report:
    report = Report()
    report.add("launch", Finding("launch", "fail", (), "gave up after 600 s (scale.wait_s)"))
    return report


def failing() -> Report:
    """Return a report with a finding of each of the doctor's own checks."""
    hosts = [Host(f"node-{i}", f"10.0.0.{i}", "eth0") for i in range(1, 7)]
    report = Report(hosts, "6 ranks on 6 nodes, backend gloo, over eth0", gpus=True)
    report.note_trips(trips := trips_of(len(hosts)), 1.25)
    same = {"python": "3.11.7", **VERSIONS}
    other, none = {**same, "python": "3.11.2", "torch": "2.14.0"}, {"python": "3.11.7"}
    trials: list[dict[str, Any]] = [
        {
            "gloo": {"error": "Unable to find address for: eth0"},
            "nccl": {"addresses": ["127.0.0.1"]},
        },
        {"gloo": {"addresses": ["10.9.0.1"], "interface": "ib0"}},
    ]
    findings = [
        *doctor_findings.check_answers("listen", {"no answer within 60 s": ["node-6"]}),
        *doctor_findings.check_rendezvous(
            hosts, ["", "", "", "no answer within 3 s", "", None], 40123
        ),
        *doctor_findings.check_peers(hosts, trips),
        *doctor_findings.check_latency(hosts, trips),
        *doctor_findings.check_clocks(hosts, trips),
        *doctor_findings.check_loaded_libraries(hosts[:2], trials, [(), ()]),
        *doctor_findings.check_imports(
            hosts,
            [{}, {"timm": "ModuleNotFoundError: No module named 'timm'"}, {}, {}, {}, {}],
            {"timm": ["timm"]},
        ),
        *doctor_findings.check_shm(hosts, ["No space left on device", "", "", "", "", None]),
        *doctor_findings.check_run_folder(
            hosts, [True, False, True, True, True, None], "/data/runs"
        ),
        *doctor_findings.check_hostnames(
            hosts, [["127.0.1.1"], [], ["10.0.0.3"], None, None, None]
        ),
        *doctor_findings.check_lookups(hosts, [10.0, 10.02, 0.01, 1.01, 0.0, None]),
        *doctor_findings.compare_versions(hosts, [same, same, other, same, same, none]),
    ]
    for check in doctor_findings.CHECKS:
        report.add(check, *(finding for finding in findings if finding.check == check))
    return report


def trips_of(n: int) -> list[list[Trip]]:
    """Return the trips between all nodes, with one kind of failure for each pair of neighbours."""
    fine, late = Trip("fine", "", 1e-4), Trip("fine", "", 1e-4, 90.0)
    failures = [
        Trip("silent", "no answer within 3 s"),
        Trip("refused", "connection refused"),
        Trip("unreachable", "No route to host"),
        Trip("stalled", "64 KiB did not come back within 9 s", 1e-4),
        Trip("fine", "", 0.045),
    ]
    return [
        [failures[i] if j == i + 1 else late if j == n - 1 else fine for j in range(n)]
        for i in range(n)
    ]


def misconfigured(root: Path) -> Report:
    """Return a report about two machines on which much is wrong."""
    there, job = nodes(2, gpus=8), Job(backend=Backend("nccl"), scale=Scale(nodes=2, per_node=1))
    plan = placement.assign_ranks(placement.resources_for(job, there), there)
    facts_of_nodes = [
        facts(root, box, node)
        for node, box in zip(there, (broken_box(), machines.efa_box()), strict=True)
    ]
    facts_of_nodes[1] = replace(
        facts_of_nodes[1],
        limits=replace(facts_of_nodes[1].limits, shm=2**26, nofile=1024),
        versions={"torch": "2.14.0"},
    )
    report = Report(
        [Host(node.host, node.ip, "eth0") for node in there],
        "2 ranks on 2 nodes, backend nccl",
        gpus=True,
    )
    for finding in checks_node.findings(job, plan, facts_of_nodes):
        report.add(finding.check, finding)
    return report


def broken_box() -> machines.Box:
    """Return a machine whose cards came up badly, without libraries for them, and with bad
    settings."""
    link, dgx = machines.Link, machines.dgx()
    bad = (link(sm_lid=0), link(state="1: DOWN", phys="2: Polling"), link(state="2: INIT"))
    cards = [
        replace(card, ports=(port,), width=(8, 16))
        for card, port in zip(dgx.cards, bad, strict=False)
    ]
    limits = machines.LIMITS.replace(
        "unlimited            unlimited ", "65536                65536     "
    )
    files = {
        "etc/nccl.conf": "NCCL_IB_DISABLE=1\n",
        "etc/hosts": "127.0.1.1 node-1\n",
        "proc/self/limits": limits,
    }
    return replace(dgx, cards=(*cards, *dgx.cards[3:]), libraries=(), nodes=False, files=files)
