"""Ranks that are silent: what each was found doing -> who holds up the others, and whether that is certain. (pure)"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raydist.blame import compact

IDLE = 0.2
"""CPUs below which a process counts as waiting: gloo's and Horovod's threads wake up often while they wait."""
DISTRIBUTED = re.compile(r"/torch/distributed/|/horovod/")
LOADER = re.compile(r"/torch/utils/data/dataloader\.py")
WAITS = re.compile(r'/horovod/torch/mpi_ops\.py", line \d+ in synchronize$')
"""Where the main thread waits for others for sure, however busy it is: Horovod asks a thousand times a second."""
LEAVES = re.compile(r'/raydist/backends/__init__\.py", line \d+ in join\n.*/contextlib\.py", line \d+ in __exit__')
"""The frames of a rank whose job has returned, and that waits to leave together with the others."""
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|<frozen|<string>")
LAUNCH = re.compile(r"^<frozen runpy>|/runpy\.py|/raydist/(node/\w+|target)\.py")
"""Files of the frames that lead to the job's own."""
SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives to which all ranks must bring tensors of one size."""
FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class Look:
    """What one rank was found doing."""

    rank: int
    host: str
    step: int = 0
    phase: str = ""
    pid: int = 0
    state: str = ""
    """The process's state as Linux tells it: R runs, S sleeps, D waits for a device, T stopped, t traced."""
    busy: float = 0.0
    """CPUs that it used while it was looked at."""
    stack: str = ""
    """Python's stacks as faulthandler writes them, the main thread's as current; empty if it could not answer."""
    collectives: Sequence[Mapping[str, Any]] = ()
    """The last entries of torch's flight recorder, the oldest first."""

    @property
    def frames(self) -> list[re.Match[str]]:
        """The frames of the main thread, the innermost first."""
        _, _, current = self.stack.rpartition("Current thread")
        return list(FRAME.finditer(current))

    @property
    def waits_in(self) -> Mapping[str, Any] | None:
        """The first collective that it has begun and not finished."""
        # gloo leaves the state at "scheduled"; only NCCL tells "completed"
        left = (one for one in self.collectives if one.get("state") != "completed" and not one.get("retired"))
        return next(left, None)

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks."""
        innermost = self.frames[:4]
        return self.waits_in is not None or any(DISTRIBUTED.search(frame["file"]) for frame in innermost)

    @property
    def idle(self) -> bool:
        """Whether it waits for something, rather than computes."""
        innermost = next((frame.group() for frame in self.frames), "")
        return self.busy < IDLE or WAITS.search(innermost) is not None

    @property
    def left(self) -> bool:
        """Whether its job has returned."""
        return LEAVES.search("\n".join(frame.group() for frame in self.frames)) is not None

    @property
    def place(self) -> str:
        """The innermost line of the person's own code: `line 31 of train.py, in job`."""
        own = next((frame for frame in self.frames if not LIBRARY.search(frame["file"])), None)
        return f"line {own['line']} of {own['file']}, in {own['name']}" if own else ""


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others."""

    text: str
    """For a person, one line; empty if nothing is wrong with anybody."""
    culprits: tuple[int, ...] = ()
    certain: bool = False
    """Whether it can't get better by waiting."""
    looks: Sequence[Look] = field(default=(), repr=False)

    @property
    def final(self) -> Verdict:
        """The same once the run is ended for it, whatever was found: something is said, and somebody is named."""
        found = "; ".join(f"{name([look])} {doing(look)}" for look in self.looks[:4])
        text = self.text or found or "no rank goes on, and none could be looked at"
        return replace(self, text=text, culprits=self.culprits or ranks(self.looks))

    def stack_of(self, rank: int) -> str:
        """The main thread's stack of that rank, as a traceback: the innermost line last."""
        frames = [frame for look in self.looks if look.rank == rank for frame in reversed(look.frames)]
        own = itertools.dropwhile(lambda frame: LAUNCH.search(frame["file"]), frames)
        return "\n".join(f'File "{f["file"]}", line {f["line"]}, in {f["name"]}' for f in own)


def judge(looks: Sequence[Look]) -> Verdict:
    """The verdict over all ranks that live."""
    for question in (_stopped, _different, _absent, _all_wait):
        verdict = question(looks)
        if verdict is not None:
            return Verdict(verdict.text, verdict.culprits, verdict.certain, tuple(looks))
    return Verdict("", looks=tuple(looks))


def _stopped(looks: Sequence[Look]) -> Verdict | None:
    """A signal has stopped a rank; one that a debugger holds will go on."""
    held = [look for look in looks if look.state in ("T", "t")]
    if not held:
        return None
    traced = [look for look in held if look.state == "t"]
    why = "held by a debugger" if traced else f"stopped by a signal (SIGSTOP); kill -CONT {held[0].pid} would wake it"
    return Verdict(f"{name(held)} {'is' if len(held) == 1 else 'are'} {why}", ranks(held), not traced)


def _different(looks: Sequence[Look]) -> Verdict | None:
    """All wait, and not in the same collective: nobody will ever come to the others."""
    if len(looks) < 2 or any(look.waits_in is None or not look.idle for look in looks):
        return None
    kinds: dict[str, list[Look]] = {}
    for look in looks:
        kinds.setdefault(call(look.waits_in or {}), []).append(look)
    same = {key(look.waits_in or {}) for look in looks}
    if len(same) == 1:
        return None
    # In groups of their own, or from rank to rank, ranks may well wait in different ones while bytes travel.
    certain = len({of for of, *_ in same}) == 1 and not any((look.waits_in or {}).get("is_p2p") for look in looks)
    odd = min(kinds.values(), key=lambda own: (len(own), -own[0].rank))
    parts = [f"{name(own)} {waits(own)} in {words}{at(own[0])}" for words, own in kinds.items()]
    return Verdict("the ranks wait in different collectives: " + "; ".join(parts), ranks(odd), certain)


def _absent(looks: Sequence[Look]) -> Verdict | None:
    """Some wait for others that are somewhere else."""
    waiting = [look for look in looks if look.waiting and look.idle and not look.left]
    absent = [look for look in looks if look not in waiting]
    if not waiting or not absent:
        return None
    where = call(waiting[0].waits_in) if waiting[0].waits_in else "a collective"
    parts = [f"{name([look])} {doing(look)}" for look in absent[:4]]
    parts += [f"and {len(absent) - 4} more"] if len(absent) > 4 else []
    return Verdict(f"{name(waiting)} {waits(waiting)} in {where}, but " + "; ".join(parts), ranks(absent))


def _all_wait(looks: Sequence[Look]) -> Verdict | None:
    """All in the same collective, or all somewhere and idle."""
    if not all(look.idle for look in looks):
        return None
    if all(look.waits_in is not None for look in looks) and len(looks) > 1:
        what = call(looks[0].waits_in or {})
        return Verdict(f"all ranks wait in the same collective, {what}, and nothing comes through: is the network cut?")
    return Verdict("; ".join(f"{name([look])} {doing(look)}" for look in looks[:4]), ranks(looks))


def doing(look: Look) -> str:
    """What a rank that waits for no other is doing."""
    line = at(look)
    if look.state == "D":
        return f"waits for a disk or a device{line}"
    if any(LOADER.search(frame["file"]) for frame in look.frames):
        return f"waits for its data loader{line}"
    if look.left:
        return "has returned from the job, and waits for the others to leave"
    if not look.stack:
        return "does not answer: something holds it outside of Python"
    return f"{'waits' if look.idle else 'computes'}{line}" + (f" ({look.phase})" if look.phase else "")


def call(entry: Mapping[str, Any]) -> str:
    """A collective in words: `all_reduce of [[3]], number 12`."""
    what = str(entry.get("profiling_name", "a collective")).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    group = (entry.get("process_group") or ["0"])[0]
    return f"{what} of {sizes}, number {number}" + (f" of group {group}" if str(group) not in ("0", "") else "")


def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for the calls of one collective by different ranks. (group, number, name, sizes where those must agree)."""
    what = str(entry.get("profiling_name")).rpartition(":")[2]
    group = str((entry.get("process_group") or ["0"])[0])
    return group, entry.get("collective_seq_id"), what, str(entry.get("input_sizes")) if what in SAME_SIZE else ""


def at(look: Look) -> str:
    return f" at {look.place}" if look.place else ""


def name(looks: Sequence[Look]) -> str:
    """`rank 3 on node-1`, `ranks 0-2`."""
    if len(looks) == 1:
        return f"rank {looks[0].rank} on {looks[0].host}"
    return f"ranks {compact(look.rank for look in looks)}"


def waits(looks: Sequence[Look]) -> str:
    return "waits" if len(looks) == 1 else "wait"


def ranks(looks: Sequence[Look]) -> tuple[int, ...]:
    return tuple(look.rank for look in looks)
