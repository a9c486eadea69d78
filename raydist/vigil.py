"""Listen to all ranks until each has ended; end the others once one has failed. (driver)"""

from __future__ import annotations

import queue
import signal
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from raydist import blame, notice, result, signals, straggler
from raydist.config import Job
from raydist.errors import Stopped, cause, why
from raydist.events import Event, Events
from raydist.goodput import Arrival
from raydist.group import Gang
from raydist.lookout import Grown, Lookout
from raydist.notice import Notice
from raydist.restart import Again
from raydist.result import End
from raydist.sentry import Sentry
from raydist.straggler import Slow, Stragglers
from raydist.stuck import Verdict

VICTIM_S = 0.5
"""How long a failure that looks like another's fault waits for the culprit to show."""
GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL when a person or the cluster stops the run; `ray job stop` gives three in all."""
SILENT_S = 5.0
"""Seconds after which a seat that was told to stop and says nothing is taken for lost."""
TELL_S = (0.5, 1.0)
"""Seconds between two answers of one seat, unless something ends: at the beginning, and in a long run, whose ranks need
the CPU themselves (an answer costs 3 ms of it, nearly all in Ray)."""
CALLS_PER_S = 400.0
"""Answers that the driver takes per second from all seats together; with more ranks each speaks less often."""


TAIL = 1 << 16
"""Bytes of the end of a log in which an abort is looked up."""

News = tuple[int, "Future[Any]"] | Stopped | Verdict | Notice | Grown
"""What the vigil hears: an answer of a rank's seat, or a word from outside."""


def tail(log: Path) -> str:
    """The end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read().decode(errors="replace")


class Vigil:
    """One attempt's watch over its ranks. Nothing polls: every seat has one open question, answered by news."""

    def __init__(self, gang: Gang, events: Events, logs: Path, job: Job, after: Again | None = None) -> None:
        """`after`: the failure that this attempt mends, if it is not the first."""
        self.resize = ""
        self.ends: dict[int, End] = {}
        self.stopped: Stopped | None = None
        self._gang = gang
        self._events = events
        self._logs = logs
        self._after = after
        self._resumed: int | None = None
        self._files: list[IO[bytes]] = []
        self._inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._sentry = Sentry(gang, job.hang, events, logs, self._inbox.put)
        self._lookout = Lookout(gang, self._inbox.put, bool(job.script))
        self._stragglers = Stragglers([seat.node.host for seat in gang.plan.seats], job.watch.slow)
        self.slow: list[Slow] = []
        """Those that were named last for holding up the others."""
        self._hung: Verdict | None = None
        self._silent = 0.0
        self._leaving: Notice | None = None
        self._until: dict[int, int] = {}
        """The step that each rank is to do yet, before it leaves."""
        self._raised: dict[int, Event] = {}
        self._heard: dict[int, float] = {}
        """When the seat of each rank last answered, in seconds since the epoch."""
        self._deadline: float | None = None
        self._stop_at: float | None = None
        self._arrival = Arrival(gang.plan.world_size, time.time())
        self._stepped = False

    def keep(self) -> list[End]:
        """How each rank ended, by rank. A signal meanwhile ends them all, and is kept in `stopped`."""
        self._logs.mkdir(parents=True, exist_ok=True)
        world = self._gang.plan.world_size
        with (
            ExitStack() as stack,
            signals.told(self._inbox.put),
            notice.heard(self._gang, self._inbox.put),
        ):  # SimpleQueue.put may be called by a signal's handler
            self._files = [stack.enter_context(self._log(rank).open("ab", buffering=0)) for rank in range(world)]
            for rank in range(world):
                self._listen(rank)
            stack.enter_context(self._lookout)
            while len(self.ends) < world:
                try:
                    left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                    self._hear(self._inbox.get(timeout=left))
                except queue.Empty:
                    self._overdue()
        if self._stragglers.told:
            self._events.say("work", ranks={rank: own[1:] for rank, own in sorted(self._stragglers.told.items())})
        ends = [self.ends[rank] for rank in range(world)]
        if self.stopped is None and (first := result.first_cause(ends)) is not None:
            self._events.say("failure", **blame.told(first, ends), attempt=self._gang.meet.attempt)
        return ends

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def _listen(self, rank: int) -> None:
        soon, seldom = TELL_S
        patience = min(seldom, max(soon, (time.time() - (self._arrival.met or self._arrival.began)) / 20))
        answer = self._gang.call(rank, "watch", max(patience, self._gang.plan.world_size / CALLS_PER_S))
        answer.add_done_callback(lambda done: self._inbox.put((rank, done)))

    def _hear(self, heard: News) -> None:
        if isinstance(heard, Stopped):
            self.stopped = heard
            self._stop(str(heard), GRACE_S)
            return
        if isinstance(heard, Verdict):
            if self._sentry.weigh(heard) and self._stop_at is None:
                self._hung, self._silent = heard.final, time.time() - self._sentry.silence
                self._stop("ranks hang", 0.0)
            return
        if isinstance(heard, Grown):
            if self._lookout.hear(heard):
                self._make_way()
            return
        if isinstance(heard, Notice):
            self._prepare(heard)
            return
        rank, answer = heard
        try:
            news = answer.result()
        except Exception as error:
            self._ended(
                replace(self._lost(rank, cause(error), why(error)), preempted=getattr(error, "preempted", False))
            )
            return
        self._heard[rank] = time.time()
        with suppress(OSError):  # a full disk, of which the events tell
            self._files[rank].write(news["log"])
            if news["nccl"]:
                with (self._logs / f"rank-{rank}.nccl").open("ab") as file:
                    file.write(news["nccl"])
        self._events.show(rank, news["log"])
        for happened in news["events"]:
            self._note(rank, happened)
        if "end" in news:
            self._ended(self._end(rank, news["end"]))
        elif rank not in self.ends:
            self._sentry.note(rank, news["beat"], news["quiet"])
            if slow := self._stragglers.note(rank, tuple(news["own"]), time.monotonic()):
                self.slow = slow
                self._events.say("slow", **straggler.as_event(slow))
            self._listen(rank)
            self._may_leave(rank, news["beat"][0])

    def _note(self, rank: int, happened: Event) -> None:
        self._events.add(happened)
        if self._lookout.note(rank, happened):
            self._make_way()
        if happened["kind"] == "raised":
            self._raised[rank] = happened
            # Its process may hang in its own clean-up: the verdict doesn't wait for it.
            self._expect(VICTIM_S)
        elif happened["kind"] == "begin" and rank == 0:
            self._resumed = happened.get("resumed")
        elif happened["kind"] == "report" and rank == 0 and "step" in happened and self._after and not self._stepped:
            self._first_step(self._after, happened)
        over = self._arrival.add(happened)
        for name, s in over.items() if self._after is None else ():
            self._events.say("phase", name=name, s=s)
        if "rendezvous" in over:
            self._gang.settle()

    def _first_step(self, after: Again, report: Event) -> None:
        """Tell what a restart has cost, now that rank 0 has done a step."""
        step = report["step"]
        if step > (self._resumed or 0):  # before, it may be an evaluation
            self._stepped = True
            repeated = after.reached - (step - 1 if self._resumed is None else self._resumed)
            took = report["t"] - after.since
            facts = {"number": after.number, "step": step, "s": took, "repeated": max(0, repeated)}
            self._events.say("restarted", **facts, resized=after.cause is None)

    def _end(self, rank: int, end: dict[str, Any]) -> End:
        made = End(
            rank=rank, host=self._host(rank), how="finished", at=end["at"], step=end["step"], phase=end["phase"],
            code=end["code"], signal=end["signal"], log=str(self._log(rank)), message=end.get("lost", ""),
            why=end.get("why", ""),
        )  # fmt: skip
        raised = self._raised.get(rank)
        failed_at = raised["t"] if raised else end["at"]
        if self._leaving and self._stop_at and not self.stopped and failed_at >= self._stop_at:
            gone = replace(made, how="drained", message=self._leaving.text, preempted=True)
            return gone if rank in self._leaving.ranks else replace(made, how="stopped")
        if raised:
            known = {key: raised[key] for key in ("type", "message", "traceback", "step")}
            return replace(made, how="raised", at=raised["t"], **known)
        if made.code and (left := end.get("error")):
            return replace(made, how="raised", **left)
        if self._hung and made.rank in (self._hung.culprits or (made.rank,)) and not self.stopped:
            stack = self._hung.stack_of(made.rank)
            return replace(made, how="hung", at=self._silent, message=self._hung.text, traceback=stack)
        if self._stop_at is not None and end["at"] >= self._stop_at and (end["signal"] or end["code"]):
            return replace(made, how="stopped")
        if "by" in end:
            return replace(made, how="ended")
        if made.signal == signal.SIGABRT:
            made = replace(made, message=made.message or blame.last_words(tail(self._log(rank))))
        return replace(made, how="killed" if end["signal"] else "exited" if end["code"] else "finished")

    def _lost(self, rank: int, message: str, why: str = "") -> End:
        """The end of a rank of which only its last heartbeat is left."""
        step, phase, _ = self._sentry.beat(rank)
        host, log = self._host(rank), str(self._log(rank))
        return End(rank, host, "lost", self._lost_at(rank), step, phase, message=message, why=why, log=log)

    def _lost_at(self, rank: int) -> float:
        """When a rank was lost: a node that is cut off says nothing for seconds, before Ray gives it up."""
        for end in self.ends.values():
            if end.how == "lost" and end.host == self._host(rank):
                return end.at
        now, often = time.time(), max(TELL_S[1], self._gang.plan.world_size / CALLS_PER_S)
        heard = self._heard.get(rank, now)
        # where something has failed before, a word that is late must not make this the first
        return heard if self._deadline is None and now - heard > 2 * often else now

    def _ended(self, end: End) -> None:
        if end.rank in self.ends:
            return
        self.ends[end.rank] = end
        self._sentry.gone(end.rank)
        self._events.say("ended", rank=end.rank, how=end.how, code=end.code, signal=end.signal, step=end.step)
        if end.how not in ("finished", "stopped"):
            self._expect(VICTIM_S if result.is_victim(end) else 0.0)

    def _expect(self, seconds: float) -> None:
        """Stop all in so many seconds, or sooner if that was decided already."""
        if self._stop_at is None:
            due = time.monotonic() + seconds
            self._deadline = due if self._deadline is None else min(self._deadline, due)

    def _prepare(self, heard: Notice) -> None:
        """Nodes are about to be taken away: each rank does a few more steps, keeps them, and leaves."""
        self._events.say("notice", text=heard.text, ranks=heard.ranks, hosts=heard.hosts, s=heard.left_s)
        if self._stop_at is None and not self.ends:
            self._leaving = heard
            self._until = {seat.rank: 0 for seat in self._gang.plan.seats}
            for rank in self._until:
                self._gang.call(rank, "prepare")
            self._expect(heard.share_s)

    def _may_leave(self, rank: int, step: int) -> None:
        """Leave once all ranks have done their further steps."""
        if self._leaving is None or self._stop_at is not None or rank not in self._until:
            return
        self._until[rank] = self._until[rank] or step + notice.STEPS
        if step >= self._until[rank]:
            del self._until[rank]
        if not self._until:
            self._stop("its nodes are drained", self._leaving.share_s)

    def _overdue(self) -> None:
        if self._stop_at is None and self._leaving and not any(end.failed for end in self.ends.values()):
            self._stop("its nodes are drained", self._leaving.share_s)
            return
        if self._stop_at is None:
            self._stop("a rank failed", 0.0)
            return
        for rank in range(self._gang.plan.world_size):
            self._ended(self._lost(rank, "its seat is silent"))

    def _make_way(self) -> None:
        """The ranks have left, or need not be asked: others take over."""
        if (
            self._stop_at is None
            and self._lookout.grown is not None
            and not any(end.failed for end in self.ends.values())
        ):
            self.resize = self._lookout.grown.text
            self._stop(f"the size changes: {self.resize}", 0.0)

    def _stop(self, reason: str, grace: float) -> None:
        self._stop_at = self._stop_at or time.time()
        self._events.say("stop", reason=reason)
        self._gang.stop((rank for rank in range(self._gang.plan.world_size) if rank not in self.ends), grace)
        self._deadline = time.monotonic() + grace + SILENT_S

    def _host(self, rank: int) -> str:
        return self._gang.plan.seats[rank].node.host
