"""Compare the first steps after a restart or a resume with what was recorded before. (pure)

Rank 0 reports the loss of each step and, with `train.check_resume`, a checksum of its samples. What
was reported of the steps after the one that the training continues from is kept, and compared with
the reports of the same steps as they are made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from raydist.shared import kinds
from raydist.shared.kinds import Event
from raydist.shared.rank_names import counted
from raydist.state.write import place_in_run

COMPARED = 100
"""Limit on the steps that are compared after a restart or a resume."""
RECORDED = 10_000
"""Limit on the steps that are recorded; the oldest are dropped first."""
TOLERANCE = 1e-3
"""Relative difference that is allowed between losses if the number of ranks or their devices have
changed: then the same numbers are added in another order, and rounded in other places."""

OTHER_SAMPLES = (
    "their order comes from seed, data.shuffle, the number of samples and data.global_batch, or "
    "else from the stream or the loader: which has changed?"
)
OTHER_LOSS = (
    "causes may be samples with other contents, random numbers of a generator that no checkpoint "
    "has, a changed setting, or an algorithm that is not deterministic (deterministic=true)"
)


class Place(NamedTuple):
    """Where a step was made, as far as its bits depend on it."""

    ranks: int = 0
    gpus: bool = False


class Made(NamedTuple):
    """What is known of a step that was made."""

    loss: float
    samples: str | None
    """The checksum of its samples; None: unknown."""
    place: Place


def difference(before: Made, now: Made) -> str:
    """Return what differs between two makings of a step: samples, or else loss; empty: nothing."""
    if before.samples and now.samples and before.samples != now.samples:
        return "samples"
    if math.isnan(before.loss) or math.isnan(now.loss):
        return "" if math.isnan(before.loss) and math.isnan(now.loss) else "loss"
    allowed = 0.0 if before.place == now.place else TOLERANCE
    return "" if math.isclose(before.loss, now.loss, rel_tol=allowed) else "loss"


@dataclass
class RecordedTraining:
    """The recorded steps of a training."""

    fits: dict[int, dict[int, Made]] = field(default_factory=dict)
    """For each raydist.fit of the job, by its number: its steps."""
    saved: set[tuple[str, ...]] = field(default_factory=set)
    """Its checkpoints: their places in the run folder."""


@dataclass
class Comparison:
    """The steps after a restart or a resume, next to those that were recorded before."""

    resumed: int
    before: dict[int, Made]
    """The recorded steps that were not compared yet."""
    same: list[int] = field(default_factory=list)
    """The steps that were as before."""
    places: set[Place] = field(default_factory=set)
    apart: float = 0.0
    """The largest relative difference between two losses of a step."""
    with_samples: bool = True
    """Whether the samples of each step were compared."""

    def add(self, step: int, now: Made) -> kinds.Checked | None:
        """Compare a step; return what came of all, once that is known."""
        before = self.before.pop(step, None)
        if before is not None:
            if what := difference(before, now):
                return self._differing(step, what, before, now)
            self.same.append(step)
            self.places |= {before.place, now.place}
            if before.loss != now.loss and not math.isnan(now.loss):
                largest = max(abs(before.loss), abs(now.loss))
                self.apart = max(self.apart, abs(before.loss - now.loss) / largest)
            self.with_samples &= before.samples is not None and now.samples is not None
        over = step >= max(self.before, default=step) or len(self.same) == COMPARED
        return self.outcome() if over else None

    def outcome(self) -> kinds.Checked:
        """Return what came of the steps so far, none of which differs."""
        steps = len(self.same)
        if not steps:
            text = f"nothing to compare: no step after {self.resumed} was recorded before"
        else:
            last = f" to {self.same[-1]}" if steps > 1 else ""
            which = f"step{'s' if last else ''} {self.same[0]}{last}"
            samples = (
                ", and the samples" if self.with_samples else "; the samples were not recorded"
            )
            text = f"{which} as before: the losses {self._how_close()}{samples}"
        return kinds.Checked(text=text, resumed=self.resumed, steps=steps)

    def _how_close(self) -> str:
        if len(self.places) == 1 or not self.apart:
            return "to the bit"
        ranks = sorted({place.ranks for place in self.places})
        why = f"{ranks[0]} and {ranks[-1]} ranks" if len(ranks) > 1 else "with and without GPUs"
        return f"within {self.apart:.1g} ({why} add in another order)"

    def _differing(self, step: int, what: str, before: Made, now: Made) -> kinds.Checked:
        losses = f"{now.loss:.9g}, before {before.loss:.9g}"
        if what == "samples":
            text = f"step {step} has other samples than before (loss {losses}): {OTHER_SAMPLES}"
        else:
            samples = ", with the same samples" if before.samples and now.samples else ""
            text = f"the loss of step {step} is {losses}{samples}: {OTHER_LOSS}"
        if before.place.ranks != now.place.ranks:
            text += f"; {counted(now.place.ranks, 'rank')} now, {before.place.ranks} before"
            text += ", which draw other random numbers (dropout)" if what == "loss" else ""
        if before.place != now.place and what == "loss":
            text += f"; a relative difference up to {TOLERANCE:g} would be as before"
        steps = len(self.same) + 1
        return kinds.Checked(text=text, resumed=self.resumed, steps=steps, differs=step, what=what)


class ResumeCheck:
    """The fold of a run's events that compares its repeated steps."""

    def __init__(self, read: Callable[[str], Iterable[Event]] = lambda checkpoint: ()) -> None:
        """`read`: returns the events of the run folder that a checkpoint is in."""
        self._read = read
        self._trainings = [RecordedTraining()]
        """Those of the run folder; the last one is the current one."""
        self._comparison: Comparison | None = None
        self._place = Place()
        self._fit = 0
        """The number of the raydist.fit that runs."""
        self._began: float | None = None
        """When the run began, until its training begins."""

    def add(self, event: Event) -> kinds.Checked | None:
        """Process one event; return what came of a comparison that it ends."""
        match event:
            case kinds.Run():
                self._began, self._fit = event.t, 0
            case kinds.HasPlan():
                gpus = any(slot.get("gpus") for slot in event.slots)
                self._place = Place(event.world_size, gpus)
            case kinds.StartsAttempt():
                found = self._finish()
                self._fit = 0
                return found
            case kinds.Begin(rank=0):
                return self._begin(event)
            case kinds.Report(rank=0):
                return self._report(event)
            case kinds.Saved():
                self._trainings[-1].saved.add(place_in_run(Path(event.path)))
            case kinds.Done(rank=0) | kinds.Stop() | kinds.Failure():
                return self._finish()
        return None

    def _begin(self, event: kinds.Begin) -> kinds.Checked | None:
        self._fit += 1
        resumed = event.resumed or 0
        if self._began is not None:
            recorded = self._recorded(event.checkpoint, self._began) if resumed else {}
            self._trainings.append(RecordedTraining(recorded))
            self._began = None
        if resumed == event.steps:
            return None  # this fit has finished
        record = self._record()
        later = {step: made for step, made in record.items() if step > resumed}
        for step in later:
            del record[step]
        if not (resumed or later):
            return None  # a new start
        self._comparison = Comparison(resumed, later)
        return None if later else self._finish()

    def _recorded(self, checkpoint: str, began: float) -> dict[int, dict[int, Made]]:
        """Return the steps, made before this run, of the training that saved a checkpoint."""
        earlier = ResumeCheck()
        for event in self._read(checkpoint):
            if isinstance(event, kinds.Run) and event.t >= began:
                break  # this run, in the same folder
            earlier.add(event)
        place, known = place_in_run(Path(checkpoint)), [*self._trainings, *earlier._trainings]
        *_, last = [each for each in known if place in each.saved] or known
        return {fit: dict(steps) for fit, steps in last.fits.items()}

    def _report(self, event: kinds.Report) -> kinds.Checked | None:
        loss, step = event.values.get("loss"), event.step
        # An evaluation is reported without the number of samples used so far.
        if not (self._fit and step and "samples" in event.values and isinstance(loss, int | float)):
            return None
        made = Made(loss, event.samples_hash, self._place)
        record = self._record()
        record[step] = made
        if len(record) > RECORDED:
            del record[next(iter(record))]
        found = self._comparison.add(step, made) if self._comparison else None
        if found is not None:
            self._comparison = None
        return found

    def _record(self) -> dict[int, Made]:
        return self._trainings[-1].fits.setdefault(self._fit, {})

    def _finish(self) -> kinds.Checked | None:
        """End the comparison; the steps that it did not reach can be compared after a restart."""
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return None
        self._record().update(comparison.before)
        # The run may end before it repeats a step: nothing is known then.
        return comparison.outcome() if comparison.same or not comparison.before else None
