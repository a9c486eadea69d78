"""Examines all ranks when one is silent too long; ends the run for a certain hang. (driver)

A rank is silent too long if its steps do not explain the silence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from raydist.launch.limits import EXAMINE_S, longest
from raydist.launch.worker_group import WorkerGroup
from raydist.messages.agent import Examine, RankActivity
from raydist.recovery import deadlines, hang_verdict, stall
from raydist.recovery.hang_evidence import HangEvidence
from raydist.recovery.hang_verdict import ConfirmedHang, Diagnosis, RankState
from raydist.recovery.stall import Beat, StallCheck
from raydist.settings.config import Hang
from raydist.shared import kinds
from raydist.shared.events import Events

CHECK_S = 0.25
"""Seconds between two checks whether a rank is silent."""


class HangMonitor(AbstractContextManager["HangMonitor"]):
    """One attempt's stall check; leaving the `with` block ends it: nothing is reported afterwards.

    The supervisor passes heartbeats in. The ranks are examined in a separate thread, which writes
    the event `hang` and the stacks, and calls `post` only if the run is to be ended for it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        settings: Hang,
        events: Events,
        logs: Path,
        post: Callable[[ConfirmedHang], None],
        program: bool = False,
    ) -> None:
        """`program`: whether the ranks run a program (script=)."""
        self._group = group
        self._settings = settings
        self._events = events
        self._evidence = HangEvidence(group, logs)
        self._post = post
        self._lock = threading.Lock()
        """Guards everything below. Events has its own lock, which is taken inside this one, never
        around it."""
        self._stalls = StallCheck(settings, deadlines.late_answer(len(group.plan.slots)), program)
        self._unheard: dict[int, Beat] = {}
        """The last heartbeat of ranks whose agents were silent."""
        self._examining = False
        self._closed = False
        self._last_report = "", False
        """The last diagnosis: its text, and whether it was certain."""
        self._next_check = 0.0

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True

    def note(self, rank: int, beat: Beat, age: float) -> None:
        """Record a heartbeat, `age` seconds old when its agent read it.

        Examines all ranks if one is silent.
        """
        now = time.monotonic()
        with self._lock:
            self._stalls.note(rank, beat, now - age)
            if now < self._next_check or self._examining:
                return
            self._next_check = now + CHECK_S
            if not self._stalls.silent(now):
                return
            self._examining = True
            beats = self._stalls.beats()
        calls = {rank: self._group.call(rank, Examine()) for rank in beats}
        threading.Thread(
            target=self._examine, args=(calls, beats), name="raydist-hang", daemon=True
        ).start()

    def beat(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank."""
        return self.beats().get(rank, (0, "", 0.0))

    def beats(self) -> dict[int, Beat]:
        """Return the last heartbeat of each running rank."""
        with self._lock:
            return self._unheard | self._stalls.beats()

    def leave_out(self, rank: int) -> None:
        """Leave out a rank whose agent is silent: only its last heartbeat is known."""
        with self._lock:
            self._unheard[rank] = self._stalls.beats().get(rank, (0, "", 0.0))
            self._stalls.forget(rank)

    def stalled(self) -> bool:
        """Return whether a rank whose agent answers is silent for longer than its steps explain."""
        with self._lock:
            return self._stalls.silent(time.monotonic())

    def note_end(self, rank: int) -> None:
        """Note that this rank has ended: it is not silent."""
        with self._lock:
            self._stalls.forget(rank)

    def _examine(
        self, calls: Mapping[int, Future[RankActivity | None]], beats: Mapping[int, Beat]
    ) -> None:
        """Diagnose, in a thread. An error in one diagnosis does not prevent the next."""
        try:
            self._diagnose(answers_of(calls), beats)
        except Exception as error:
            text = f"no diagnosis of a silent rank: {type(error).__name__}: {error}"
            with self._lock:
                if not self._closed:
                    self._events.warn(text)
        finally:
            with self._lock:
                self._examining = False

    def _diagnose(self, answers: Mapping[int, RankActivity], beats: Mapping[int, Beat]) -> None:
        states = [self._state(rank, beats[rank], found) for rank, found in sorted(answers.items())]
        went_on = any(found.beat[2] > beats[rank][2] for rank, found in answers.items())
        with self._lock:
            ended = set(range(len(self._group.plan.slots))) - beats.keys() - self._unheard.keys()
        found = hang_verdict.diagnose(states, ended)
        at_work = self._at_work(answers, found.certain)
        if not at_work and (found.certain or not went_on):
            found = self._evidence.complete(found, answers)
        hang = self._weigh(found, went_on, at_work)
        if hang is not None:
            self._post(hang)

    def _at_work(self, answers: Mapping[int, RankActivity], certain: bool) -> bool:
        """Return whether ranks have made further collectives since they answered.

        Ranks that report no steps may train. So may ranks that seemed to wait in different
        collectives (`certain`): on a busy machine they answer one after another, and NCCL's
        watchdog records late that a collective is complete.
        """
        with self._lock:
            learning = self._stalls.learning()
        if not (learning or certain) or not any(found.collectives for found in answers.values()):
            return False
        again = Examine(quick=not learning)
        later = answers_of({rank: self._group.call(rank, again) for rank in answers})
        return any(
            newest_collective(found) > newest_collective(answers[rank])
            for rank, found in later.items()
        )

    def _state(self, rank: int, beat: Beat, found: RankActivity) -> RankState:
        host = self._group.plan.slots[rank].node.host
        return RankState(
            rank,
            host,
            step=beat[0],
            phase=beat[1],
            pid=found.pid,
            state=found.state,
            busy=found.busy,
            stack=found.stack,
            collectives=found.collectives,
            gpu_fault=found.gpu_fault,
        )

    def _weigh(self, diagnosis: Diagnosis, went_on: bool, at_work: bool) -> ConfirmedHang | None:
        """Report a new diagnosis; return the hang if the run is to be ended.

        `went_on`: whether a rank has made progress meanwhile.
        """
        with self._lock:
            now = time.monotonic()
            if self._closed or not (
                diagnosis.certain or (self._stalls.silent(now) and not went_on)
            ):
                return None
            silence, over = self._stalls.silence(now), self._stalls.over(now)
            self._stalls.note_examination(now)
            if at_work:
                return None
            lasts = diagnosis.text == self._last_report[0] and silence > 2 * stall.UNKNOWN_S
            if diagnosis.if_it_lasts and lasts:
                diagnosis = replace(diagnosis, certain=True)
            diagnosis = diagnosis.final if over else diagnosis
            if diagnosis.text and (
                (diagnosis.text, diagnosis.certain) != self._last_report or over
            ):
                self._report(diagnosis, silence)
            if over or (self._settings.end and diagnosis.certain):
                return ConfirmedHang(diagnosis.final, time.time() - silence)
            return None

    def _report(self, diagnosis: Diagnosis, silence: float) -> None:
        self._last_report = diagnosis.text, diagnosis.certain
        self._evidence.write(diagnosis.states)
        self._events.add(
            kinds.Hang(
                text=diagnosis.text,
                ranks=diagnosis.culprits,
                certain=diagnosis.certain,
                s=silence,
                notes=diagnosis.notes,
            )
        )


def answers_of(calls: Mapping[int, Future[RankActivity | None]]) -> dict[int, RankActivity]:
    """Return the activity by rank, of those that run and whose agents answer in time."""
    wait(calls.values(), timeout=longest(EXAMINE_S, len(calls)))
    answers = {
        rank: call.result() for rank, call in calls.items() if call.done() and not call.exception()
    }
    return {rank: found for rank, found in answers.items() if found is not None}


def newest_collective(found: RankActivity) -> tuple[int, int]:
    """Return the numbers of a rank's last collective and last operation with a single peer.

    A number is 0 if there is none.
    """
    numbers = [
        (each["collective_seq_id"] or 0, each["p2p_seq_id"] or 0) for each in found.collectives
    ]
    return max((each for each, _ in numbers), default=0), max(
        (each for _, each in numbers), default=0
    )
