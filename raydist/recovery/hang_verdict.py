"""What silent ranks are doing -> which of them block the others, and how certain that is. (pure)"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raydist.shared.rank_names import name_ranks, rank_ranges

IDLE = 0.2
"""CPUs in use below which a process counts as waiting: threads of gloo and Horovod wake up often
while they wait."""
STOPPED = ("T", "t")
"""The states of a process that a signal or a debugger has stopped."""
DISTRIBUTED = re.compile(r"/torch/distributed/|/horovod/")
LOGGER = re.compile(r"/torch/distributed/c10d_logger\.py")
"""The wrapper around torch's collectives."""
MAKES_GROUP = frozenset({"_new_group_with_tag", "split_group"})
"""The functions of torch.distributed in which ranks wait for each other to create a group."""
LOADER = re.compile(r"/torch/utils/data/dataloader\.py")
WAITS = re.compile(r'/horovod/torch/mpi_ops\.py", line \d+ in synchronize$')
"""The frame in which the main thread waits for other ranks, however busy it is: Horovod polls 1000
times a second."""
LEAVES = re.compile(
    r'/raydist/worker/backends/__init__\.py", line \d+ in join\n.*/contextlib\.py", line \d+ in '
    r"__exit__"
)
"""The frames of a rank whose job has returned and which waits for the others before it leaves the
process group."""
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|<frozen|<string>")
LAUNCH = re.compile(
    r"^<frozen runpy>|/runpy\.py|/raydist/(node/\w+|worker/(main|program|target))\.py"
)
"""Frames between the start of the process and the job's first frame."""
SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that need tensors of the same size on all ranks."""
FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when it was examined."""

    rank: int
    host: str
    step: int = 0
    phase: str = ""
    pid: int = 0
    state: str = ""
    """The state of the process, as in /proc/PID/stat: R runs, S sleeps, D waits for a device, T
    stopped, t traced."""
    busy: float = 0.0
    """CPUs that it used while it was examined: 1.0 is one CPU."""
    stack: str = ""
    """Python stacks in faulthandler's format, the main thread's as current; empty if the rank could
    not answer."""
    collectives: Sequence[Mapping[str, Any]] = ()
    """The last entries of torch's flight recorder, oldest first."""
    gpu_fault: str = ""
    """What NVML reports of its GPU if that is broken."""

    @property
    def frames(self) -> list[re.Match[str]]:
        """The frames of the main thread, innermost first."""
        _, _, current = self.stack.rpartition("Current thread")
        return list(FRAME.finditer(current))

    @property
    def waits_in(self) -> Mapping[str, Any] | None:
        """The first collective that it has begun and not finished."""
        # gloo leaves the state at "scheduled"; only NCCL sets "completed".
        pending = (
            call
            for call in self.collectives
            if call.get("state") != "completed" and not call.get("retired")
        )
        return next(pending, None)

    @property
    def call(self) -> str:
        """The function of torch.distributed that it has called, such as `new_group`, if any."""
        inside = itertools.takewhile(lambda frame: DISTRIBUTED.search(frame["file"]), self.frames)
        names = [frame["name"] for frame in inside if not LOGGER.search(frame["file"])]
        return names[-1] if names else ""

    @property
    def makes_group(self) -> bool:
        """Whether it creates a process group, which no flight recorder shows."""
        return any(
            frame["name"] in MAKES_GROUP and DISTRIBUTED.search(frame["file"])
            for frame in self.frames
        )

    def comes_to(self, number: int) -> bool:
        """Return whether it has begun the default group's collective of this number."""
        return any(
            _group(call) == "0" and (call["collective_seq_id"] or 0) >= number
            for call in self.collectives
        )

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks."""
        innermost = self.frames[:4]
        return self.waits_in is not None or any(
            DISTRIBUTED.search(frame["file"]) for frame in innermost
        )

    @property
    def idle(self) -> bool:
        """Whether it waits rather than computes."""
        innermost = next((frame.group() for frame in self.frames), "")
        return self.busy < IDLE or WAITS.search(innermost) is not None

    @property
    def left(self) -> bool:
        """Whether its job has returned."""
        return LEAVES.search("\n".join(frame.group() for frame in self.frames)) is not None

    @property
    def place(self) -> str:
        """The innermost line of the job's own code, such as `line 31 of train.py, in job`."""
        own = next((frame for frame in self.frames if not LIBRARY.search(frame["file"])), None)
        return f"line {own['line']} of {own['file']}, in {own['name']}" if own else ""


@dataclass(frozen=True)
class Diagnosis:
    """Why ranks are silent."""

    text: str
    """For a person, one line; empty if nothing is wrong."""
    culprits: tuple[int, ...] = ()
    """The ranks that block the others."""
    certain: bool = False
    """Whether waiting longer cannot help."""
    states: Sequence[RankState] = field(default=(), repr=False)
    """All ranks that were examined."""
    notes: tuple[str, ...] = ()
    """What further witnesses say, a line each."""
    if_it_lasts: bool = False
    """Whether it is certain once the ranks have waited like this for minutes."""

    @property
    def final(self) -> Diagnosis:
        """The diagnosis with which a run is ended.

        It always has a text, and culprits if any rank was examined.
        """
        found = "; ".join(f"{name([each])} {describe_activity(each)}" for each in self.states[:4])
        text = self.text or found or "no rank makes progress, and none could be examined"
        return replace(self, text=text, culprits=self.culprits or rank_numbers(self.states))

    def stack_of(self, rank: int) -> str:
        """Return a rank's main thread's stack as a traceback, innermost line last.

        It begins at the job's first frame.
        """
        frames = [
            frame for each in self.states if each.rank == rank for frame in reversed(each.frames)
        ]
        own = itertools.dropwhile(lambda frame: LAUNCH.search(frame["file"]), frames)
        return "\n".join(f'File "{f["file"]}", line {f["line"]}, in {f["name"]}' for f in own)


@dataclass(frozen=True)
class ConfirmedHang:
    """A hang for which the run is ended."""

    diagnosis: Diagnosis
    since: float
    """When the first rank fell silent, in seconds since the epoch."""

    def blames(self, rank: int) -> bool:
        """Return whether this rank is to blame; without culprits every rank is."""
        return rank in (self.diagnosis.culprits or (rank,))


def diagnose(ranks: Sequence[RankState], ended: Collection[int] = ()) -> Diagnosis:
    """Return why these ranks, which are all that run, are silent. The first check that applies
    decides.

    `ended`: the numbers of the other ranks.
    """
    checks = (_stopped, _different, _apart, _absent, partial(_left_alone, ended), _all_wait)
    found = next(filter(None, (check(ranks) for check in checks)), Diagnosis(""))
    return replace(_with_faults(found, ranks), states=tuple(ranks))


def _with_faults(found: Diagnosis, ranks: Sequence[RankState]) -> Diagnosis:
    """Return the diagnosis with the faults of GPUs; their ranks block the others.

    A memory error may be older than the run, so it makes nothing certain, and changes no culprit
    that is.
    """
    broken = [rank for rank in ranks if rank.gpu_fault]
    if not broken:
        return found
    faults = [f"{rank.gpu_fault} ({name([rank])})" for rank in broken[:4]]
    text = "; ".join([*filter(None, [found.text]), *faults])
    culprits = found.culprits if found.certain else rank_numbers(broken)
    return replace(found, text=text, culprits=culprits)


def _stopped(ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find ranks that a signal stopped.

    A rank under a debugger is not certain to hang: it will continue.
    """
    held = [rank for rank in ranks if rank.state in STOPPED]
    if not held:
        return None
    traced = [rank for rank in held if rank.state == "t"]
    why = (
        "held by a debugger"
        if traced
        else f"stopped by a signal (SIGSTOP); kill -CONT {held[0].pid} would wake it"
    )
    return Diagnosis(
        f"{name(held)} {'is' if len(held) == 1 else 'are'} {why}", rank_numbers(held), not traced
    )


def _different(ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find that all ranks wait, but in different collectives, none of which can complete."""
    if len(ranks) < 2 or any(rank.waits_in is None or not rank.idle for rank in ranks):
        return None
    kinds: dict[str, list[RankState]] = {}
    for rank in ranks:
        kinds.setdefault(describe_collective(rank.waits_in or {}), []).append(rank)
    same = {collective_key(rank.waits_in or {}) for rank in ranks}
    if len(same) == 1:
        return None
    # In different process groups, or in send and recv, ranks may wait in different ones while data
    # is in transit.
    comparable = len({group for group, *_ in same}) == 1 and not any(
        (rank.waits_in or {}).get("is_p2p") for rank in ranks
    )
    # A rank may be ahead by a number: those behind have called the same ones, and may only lack the
    # CPU. With a load of 50 none of them made a step between two looks.
    mismatched = _mismatched(ranks)
    odd = min(kinds.values(), key=lambda own: (len(own), -own[0].rank))
    parts = [f"{name(own)} {verb_wait(own)} in {words}{at(own[0])}" for words, own in kinds.items()]
    return Diagnosis(
        "the ranks wait in different collectives: " + "; ".join(parts),
        rank_numbers(odd),
        certain=comparable and mismatched,
        if_it_lasts=comparable and not mismatched,
    )


def _mismatched(ranks: Sequence[RankState]) -> bool:
    """Return whether ranks have called different collectives under one number of a group.

    gloo may let some of them continue to the next number: with another size, for example.
    """
    called: dict[tuple[str, Any], dict[int, tuple[Any, ...]]] = {}
    for rank in ranks:
        for call in rank.collectives:
            if not call.get("is_p2p"):
                number = _group(call), call.get("collective_seq_id")
                # NCCL's coalesced calls have one number: the first counts.
                called.setdefault(number, {}).setdefault(rank.rank, collective_key(call))
    return any(len(set(keys.values())) > 1 for keys in called.values())


def _apart(ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find that ranks create a process group, and all others wait in a collective of all ranks.

    They are where these have not come yet, and cannot come before the group exists: with NCCL it
    may need the others too. Ranks that have all come to create a group do so within seconds.
    """
    making = [rank for rank in ranks if rank.makes_group]
    others = [rank for rank in ranks if not rank.makes_group]
    if not making or not others or not all(rank.idle for rank in ranks):
        return None
    for rank in others:
        call = rank.waits_in
        if call is None or call.get("is_p2p") or _group(call) != "0":
            return None
        if any(each.comes_to(call["collective_seq_id"] or 0) for each in making):
            return None
    odd = min(making, others, key=len)
    parts = [
        f"{name(making)} {verb_wait(making)} in {making[0].call}{at(making[0])}",
        f"{name(others)} {verb_wait(others)} in {describe_collective(others[0].waits_in or {})}"
        f"{at(others[0])}",
    ]
    return Diagnosis(
        "the ranks wait in different collectives: " + "; ".join(parts),
        rank_numbers(odd),
        if_it_lasts=True,
    )


def _absent(ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find that some ranks wait for others, which are not in a collective."""
    waiting = [rank for rank in ranks if rank.waiting and rank.idle and not rank.left]
    absent = [rank for rank in ranks if rank not in waiting]
    if not waiting or not absent:
        return None
    first = waiting[0]
    if first.makes_group:
        where = first.call
    else:
        where = describe_collective(first.waits_in) if first.waits_in else "a collective"
    parts = [f"{name([rank])} {describe_activity(rank)}" for rank in absent[:4]]
    parts += [f"and {len(absent) - 4} more"] if len(absent) > 4 else []
    return Diagnosis(
        f"{name(waiting)} {verb_wait(waiting)} in {where}, but " + "; ".join(parts),
        rank_numbers(absent),
    )


def _left_alone(ended: Collection[int], ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find that all ranks wait in a collective of all, which others have ended without."""
    if not ended or not all(rank.idle for rank in ranks):
        return None
    calls = [rank.waits_in for rank in ranks]
    if not calls or any(call is None or _group(call) != "0" for call in calls):
        return None
    have = "has" if len(ended) == 1 else "have"
    return Diagnosis(
        f"{name(ranks)} {verb_wait(ranks)} in {describe_collective(calls[0] or {})}{at(ranks[0])}, "
        f"but {name_ranks(ended)} {have} ended: does each rank make the same number of steps?"
    )


def _all_wait(ranks: Sequence[RankState]) -> Diagnosis | None:
    """Find that all ranks wait in the same collective, or all are idle."""
    if not all(rank.idle for rank in ranks):
        return None
    if all(rank.waits_in is not None for rank in ranks) and len(ranks) > 1:
        what = describe_collective(ranks[0].waits_in or {})
        return Diagnosis(
            f"all ranks wait in the same collective, {what}, and no data arrives: is the network "
            "cut?"
        )
    return Diagnosis(
        "; ".join(f"{name([rank])} {describe_activity(rank)}" for rank in ranks[:4]),
        rank_numbers(ranks),
    )


def describe_activity(rank: RankState) -> str:
    """Return what a rank that does not wait in a collective is doing."""
    line = at(rank)
    if rank.state == "D":
        return f"waits for a disk or a device{line}"
    if any(LOADER.search(frame["file"]) for frame in rank.frames):
        return f"waits for its data loader{line}"
    if rank.left:
        return "has returned from the job, and waits for the others to leave"
    if not rank.stack:
        return "does not answer: it is blocked outside of Python"
    return f"{'waits' if rank.idle else 'computes'}{line}" + (
        f" ({rank.phase})" if rank.phase else ""
    )


def describe_collective(entry: Mapping[str, Any]) -> str:
    """Return a text such as `all_reduce of [[3]], number 12`."""
    what = str(entry.get("profiling_name", "a collective")).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    group = _group(entry)
    return f"{what} of {sizes}, number {number}" + (
        f" of group {group}" if group not in ("0", "") else ""
    )


def collective_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for all ranks' calls of one collective.

    It is (group, number, name, and sizes where these must agree).
    """
    what = str(entry.get("profiling_name")).rpartition(":")[2]
    return (
        _group(entry),
        entry.get("collective_seq_id"),
        what,
        str(entry.get("input_sizes")) if what in SAME_SIZE else "",
    )


def _group(entry: Mapping[str, Any]) -> str:
    """Return the name of a collective's process group; that of all ranks is "0"."""
    return str((entry.get("process_group") or ["0"])[0])


def at(rank: RankState) -> str:
    return f" at {rank.place}" if rank.place else ""


def name(ranks: Sequence[RankState]) -> str:
    """Return a text such as `rank 3 on node-1` or `ranks 0-2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} on {ranks[0].host}"
    return f"ranks {rank_ranges(rank.rank for rank in ranks)}"


def verb_wait(ranks: Sequence[RankState]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def rank_numbers(ranks: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)
