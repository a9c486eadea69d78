"""Which ranks keep their processes when another was killed, and how all of them meet. (driver)"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from raydist.launch.worker_group import WorkerGroup
from raydist.messages.rank import Meet
from raydist.recovery.arrival import Beginning
from raydist.recovery.blame import first_cause, is_victim
from raydist.recovery.policy import Retry
from raydist.settings import in_place
from raydist.settings.config import Job
from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.outcome import End


def why_all_forked(job: Job, ends: Collection[End]) -> str:
    """Return why all ranks are started anew after these ends, for a person; empty if they are not.

    A rank that was killed has left nothing behind, also if that was because it hung, or its node
    was lost. One that raised an exception may raise it again wherever the others continue.
    """
    if why := in_place.why_not(job):
        return why
    first = first_cause(ends)
    if first is None or is_victim(first):
        return "the rank that failed first is not known"
    other = next((end for end in ends if not may_stay_after(end)), None)
    return "" if other is None else f"rank {other.rank} was not killed: {other.how}"


def may_stay_after(end: End) -> bool:
    """Return whether other ranks may keep their processes after this end."""
    alone = ("killed", "hung", "stopped", "lost")
    return (end.how in alone and not end.stuck) or (end.failed and is_victim(end))


def why_not_kept(
    job: Job, ends: Collection[End], kept: Collection[int], hosts: Sequence[str]
) -> str:
    """Return why ranks were started anew that had not failed; empty if there are none.

    `ends`: of the previous attempt. `kept`: the ranks that kept their processes. `hosts`: that of
    each rank now.
    """
    lost = [
        end
        for end in ends
        if end.rank not in kept and (not end.failed or (end.how == "raised" and is_victim(end)))
    ]
    if not lost or job.restart.in_place == "off":
        return ""
    if why := why_all_forked(job, ends):
        return why
    if len(hosts) != len(ends):
        return "the number of ranks has changed"
    stayed = (end for end in lost if end.kept and end.host in hosts)
    if not kept and any(end.host != hosts[end.rank] for end in stayed):
        return "ranks on nodes that stayed have other numbers"
    one = min(lost, key=lambda end: not end.why_not_kept)
    other = "it failed because it had lost a peer" if one.failed else "its process has ended"
    if one.kept and one.host not in hosts:
        other = f"its node {one.host} was lost"
    if one.kept:
        other += " while it waited"
    return f"rank {one.rank}: {one.why_not_kept or other}"


class Meeting:
    """The beginning of one attempt: the ranks meet, and make their first step."""

    def __init__(self, group: WorkerGroup, job: Job, now: float, retry: Retry | None) -> None:
        """`retry`: why there is this attempt, if it is not the first."""
        self._group = group
        self._job = job
        self._retry = retry
        self._beginning = Beginning(group.plan.world_size, now, retry, bool(job.script))
        self._contacts: dict[int, str] = {}
        self.running_s = self._beginning.running_s
        self.have_settled = self._beginning.have_settled

    @property
    def stepped(self) -> bool:
        """Whether a rank has made a step."""
        return self._beginning.stepped

    @property
    def fit(self) -> int:
        """The number of the last raydist.fit that began; 0: none."""
        return self._beginning.fit

    def add(self, rank: int, event: Event) -> list[kinds.Phase | kinds.Restarted]:
        """Record an event of a rank; return the events that follow from it."""
        return [self._complete(each) for each in self._beginning.add(rank, event)]

    def keeps(self, ends: Collection[End], hung: Collection[int]) -> bool:
        """Return whether the ranks that still run may keep their processes after these ends.

        `hung`: the ranks that are killed because they hang.
        """
        to_come = [End(rank, "", "hung", time.time()) for rank in hung]
        return not why_all_forked(self._job, [*ends, *to_come])

    def introduce(self, rank: int, event: kinds.MeetRequest) -> None:
        """Record the contact of a rank; once all are known, send all of them to each rank."""
        number = self._group.rendezvous.attempt
        if event.number != number:
            return
        self._contacts[rank] = event.contact
        if len(self._contacts) == self._group.plan.world_size:
            contacts = [each for _, each in sorted(self._contacts.items())]
            for each in self._contacts:
                self._group.call(each, Meet(number, contacts))

    def _complete(self, event: kinds.Phase | kinds.Restarted) -> kinds.Phase | kinds.Restarted:
        """Return an event, with the ranks that kept their processes."""
        if self._retry is None or not isinstance(event, kinds.Restarted):
            return event
        kept = self._group.rendezvous.kept
        hosts = [slot.node.host for slot in self._group.plan.slots]
        why = why_not_kept(self._job, self._retry.past[-1].ends, kept, hosts)
        found: dict[str, Any] = {"kept": kept, "why_not_kept": why}
        more = {name: value for name, value in found.items() if value}
        return kinds.Restarted(**vars(event), **more)
