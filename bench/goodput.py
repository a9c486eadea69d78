"""The share of the time that runs of thousands of ranks spend in steps: months, simulated.

raydist's decisions are the real ones: whether it restarts (recovery.policy), how late the driver
hears of a hang with many ranks (recovery.deadlines), how many steps lie between two snapshots
(training.snapshot_interval). Failures come at random, at the rate that Meta projects and in the mix
of Llama 3, also while a run is down. What a failure costs raydist is measured by other benches or
published; the comments in `by_raydist` say which. Two columns show what a fixed stall would mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raydist.recovery import deadlines, policy
from raydist.settings.config import Restart
from raydist.shared.outcome import Attempt, End, EndKind
from raydist.training.snapshot_interval import spacing

Kind = Literal["rank", "gpu", "host", "hang"]
LLAMA_3: dict[Kind, int] = {
    "rank": 54 + 2 + 6,
    "gpu": 148 + 72 + 19 + 17 + 6,
    "host": 46,
    "hang": 49,
}
"""The 419 unexpected interruptions of Llama 3 405B by what raydist sees of them (table 5 of its
paper): a rank ends (software, dependencies, wrong results), a GPU fails and with it its node, a
host is gone (maintenance, SSD, power, chassis, I/O board, CPU, memory), ranks wait for ever (switch
and cable, NIC, NCCL's watchdog)."""
MTTF_S = {1024: 7.9 * 3600, 16384: 1.8 * 3600, 131072: 14 * 60.0}
"""Mean seconds between two failures by the number of GPUs, projected by Meta (arXiv 2410.21680)."""
PER_NODE = 8
DAYS = 30
SEEN = 200
"""Attempts that the policy is given: more than a limit of failures within an hour."""


@dataclass(frozen=True)
class Costs:
    """What a failure costs a run, in seconds."""

    detected_s: Callable[[Kind, int], float]
    """Until all ranks are told to stop, by kind and number of ranks."""
    restarted_s: float
    """From then to the first step."""
    replaced_s: float = 0.0
    """In addition, if a node has to be replaced by a spare."""
    kept_every: int = 1
    """Steps between two kept states: on average half of them are repeated."""
    kept_share: float = 0.0
    """The share of the steps' time that keeping states takes."""


def detected_by_raydist(kind: Kind, ranks: int) -> float:
    """Return what the other benches measured, and what more ranks add to it."""
    if kind == "hang":
        return 8.0 + deadlines.late_answer(ranks)  # bench driver: "a hang is certain"
    if kind == "host":
        return 7.3  # bench silence, with Ray as deploy/node starts it
    return 0.1  # bench driver


STATE_BYTES = 405e9 * 12
"""Of all ranks: Llama 3 405B, with fp32 weights and AdamW's two moments."""
COPIED_PER_S = 20e9
"""Bytes that a GPU copies to its host's memory in a second, an assumption: a third of the 64 GB/s
of PCIe 5.0 x16 in NVIDIA's data sheet of the H100. bench keeping measures it."""
STEP_S = 6.0
"""Of one step; Llama 3 405B: 16 million tokens on 16,384 GPUs at 400 TFLOPS each."""


def by_raydist(ranks: int) -> Costs:
    """Return what a failure costs raydist."""
    snapshot_share = STATE_BYTES / ranks / COPIED_PER_S / STEP_S
    every = spacing([snapshot_share])
    return Costs(
        detected_s=detected_by_raydist,
        # bench recovery: 0.45 s with four CPU ranks, forked again. What a GPU adds: 5 s to set up
        # NCCL at 2,048 GPUs (published by MegaScale), 10 s for a CUDA context and the state (an
        # assumption).
        restarted_s=0.45 + 5.0 + 10.0,
        replaced_s=4.1,  # bench silence: until the next step, on a spare whose server is warm
        kept_every=every,
        kept_share=snapshot_share / every,
    )


def stalls(seconds: float) -> Costs:
    """Return the costs of a system of which only the whole stall of a failure is published."""
    return Costs(lambda kind, ranks: seconds, restarted_s=0.0, kept_every=0)


class Outcome(NamedTuple):
    """How a simulated run went."""

    share: float
    """Of the time in steps that counted."""
    failures: int
    gave_up: str
    """Why the policy ended the run; empty if it did not."""


def simulate(
    costs: Costs, ranks: int, mttf_s: float, days: float, rule: Restart | None = None, seed: int = 0
) -> Outcome:
    """Simulate a run.

    `mttf_s`: mean seconds between two failures, whether the run is down or not. `rule`: when
    raydist gives up; None: never.
    """
    draw = random.Random(seed)
    now = trained_s = 0.0
    up_at = 0.0
    """When the ranks make the first step after the last failure."""
    past: list[Attempt] = []
    while (at := now + draw.expovariate(1 / mttf_s)) < days * 86400:
        [kind] = draw.choices([*LLAMA_3], weights=[*LLAMA_3.values()])
        if at > up_at:
            repeated_s = draw.random() * costs.kept_every * STEP_S
            trained_s += max(0.0, at - up_at - repeated_s)
        now = at
        up_at = at + costs.detected_s(kind, ranks) + costs.restarted_s
        up_at += costs.replaced_s if kind in ("gpu", "host") else 0.0
        past.append(failed(kind, draw.randrange(ranks), int(trained_s / STEP_S), at))
        if rule is not None:
            decided = policy.decide(rule, past[-SEEN:])
            if isinstance(decided, policy.GiveUp):
                return Outcome(trained_s / now, len(past), decided.reason)
    trained_s += max(0.0, days * 86400 - up_at)
    return Outcome(trained_s * (1 - costs.kept_share) / (days * 86400), len(past), "")


def failed(kind: Kind, rank: int, step: int, at: float) -> Attempt:
    """Return an attempt that such a failure has ended."""
    how: dict[Kind, EndKind] = {"rank": "raised", "gpu": "raised", "host": "lost", "hang": "hung"}
    # a type of its own: no two failures are the same error of the program
    end = End(rank, f"n{rank // PER_NODE}", how[kind], at, step=step, type=f"Error{at}")
    return Attempt(ends=(end,))


def rows(rounds: int) -> Iterator[str]:
    """Yield the table's rows: means, because a median would hide bad months."""
    for ranks, mttf_s in MTTF_S.items():
        shares = []
        for costs in (by_raydist(ranks), stalls(600), stalls(180)):
            done = [simulate(costs, ranks, mttf_s, DAYS, seed=seed) for seed in range(rounds)]
            shares.append(f"{sum(each.share for each in done) / rounds:.1%}")
        months = []
        for rule in (Restart(max=policy.USUAL), Restart(max=policy.usual_limit(ranks))):
            done = [
                simulate(by_raydist(ranks), ranks, mttf_s, DAYS, rule, seed)
                for seed in range(rounds)
            ]
            months.append(f"{sum(not each.gave_up for each in done)} of {rounds}")
        yield f"| {ranks:,} | {mttf_s / 3600:.2f} h | {' | '.join([*shares, *months])} |"


def main(rounds: int = 3) -> list[str]:
    """The table's rows."""
    return [
        "| ranks | mean time to a failure | raydist | 10 minutes for each failure | 3 minutes "
        "| months that restart.max=3 survives | months that the default survives |",
        "|---" * 7 + "|",
        *rows(rounds),
    ]
