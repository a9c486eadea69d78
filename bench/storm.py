"""Ranks killed at random moments, with restart.in_place: the end must be that of a run left alone,
to the bit.

From outside, SIGKILL to one rank or several of 4, whenever: in a step, as the others leave theirs,
while a new rank is forked, while all connect again, in an evaluation or a checkpoint. Compared are
the loss of each step; on each rank the weights, the buffers and the random generators of Python,
numpy and torch at the end; and the checkpoint, which has the optimizer. In a loop of one's own also
a schedule, a sampler, and tensors that differ among ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 4
STEPS = 600
"""Of each run, unless the caller says otherwise. There are as many runs as the kills need."""
LOOK_S = 0.001
SILENT_S = 120.0
"""Seconds without an event after which a run hangs."""
FAILURES = 3
"""Runs of one division that fail before it is given up."""
DIVISIONS = {
    "ddp": ("parallel=ddp",),
    "ddp, data.workers=1": ("parallel=ddp", "data.workers=1"),
    "fsdp": ("parallel=fsdp",),
    "hsdp": ("parallel=hsdp", "parallel.shard=2"),
    "tp": ("parallel=tp",),
    "pp": ("parallel=ddp", "parallel.pp=2"),
    "a loop of one's own": ("job=stormy.py:own_loop", "parallel=ddp"),
}
WORDS = (
    f"scale=1x{RANKS}",
    "group=inline",
    "backend=gloo",
    "optim=adamw",
    "data.batch_size=8",
    "snapshot.every=1",
    "checkpoint.every=50",
    "train.evaluate_every=1",
    "watch.progress=none",
    "hydra.run.dir=run",
    "restart.max=100000",
    "restart.window_s=null",
)
JOB = """
import random

import numpy
import torch
from torch import nn
import raydist
from raydist.worker import random_state


class Noisy(torch.utils.data.Dataset):
    # Each sample is drawn anew: from all generators of the rank, or of its loader's worker.

    def __init__(self, size):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(size, 10, generator=generator)
        self.targets = torch.randint(3, (size,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(10) + random.gauss(0, 1) + float(numpy.random.randn())
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs):
        return inputs + self.dropout(self.down(self.up(inputs).relu()))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(10, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(16, 3)
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, inputs):
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def job(config):
    torch.manual_seed(0)
    model, loss = Blocks(), nn.functional.cross_entropy
    leave(model, raydist.fit(config, train=Noisy(1600), test=Noisy(64), loss=loss, model=model))


class Sampler:
    # Gives each rank its part of an order that is drawn anew for each epoch.

    def __init__(self, size, batch):
        self.size, self.batch = size, batch
        self.generator = torch.Generator().manual_seed(2)
        self.order, self.at = torch.empty(0, dtype=torch.int64), 0

    def draw(self):
        me = raydist.rank()
        if self.at + me.world_size * self.batch > len(self.order):
            self.order, self.at = torch.randperm(self.size, generator=self.generator), 0
        first = self.at + me.rank * self.batch
        self.at += me.world_size * self.batch
        return self.order[first : first + self.batch].tolist()

    def state_dict(self):
        return {"order": self.order, "at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["generator"])


def own_loop(config):
    torch.manual_seed(0)
    model, data, steps = Blocks(), Noisy(1600), config.train.steps
    random_state.seed_everything(random_state.derive(config.seed, 0, raydist.rank().rank), False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = {
        "schedule": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps),
        "sampler": Sampler(len(data), config.data.batch_size),
        "average": torch.zeros(3),
        "mine": torch.zeros(()),
    }
    training = raydist.Recoverable(config, model=model, optimizer=optimizer, **parts)
    for step in training.steps(steps):
        with training.step():
            chosen = [data[index] for index in parts["sampler"].draw()]
            inputs, targets = map(torch.stack, zip(*chosen))
            loss = nn.functional.cross_entropy(training.model(inputs), targets)
            loss.backward()
            optimizer.step()
            parts["schedule"].step()
            parts["average"].lerp_(model.last.bias.detach(), 0.1)
            parts["mine"] += loss.detach()  # another number on each rank
            raydist.report(step=step, loss=loss)
    average, mine = parts["average"].tolist(), parts["mine"].item()
    leave(model, {"average": average, "mine": mine})


def leave(model, figures):
    parts = {name: each for name, each in model.state_dict().items() if not each.is_meta}
    own = {name: getattr(each, "to_local", lambda e=each: e)() for name, each in parts.items()}
    found = {
        "figures": figures,
        "model": own,
        "random": random_state.capture(torch.device("cpu")),
    }
    me = raydist.rank()
    part = me.run_dir / f"{me.rank}.part"
    torch.save(found, part)
    part.rename(me.run_dir / f"{me.rank}.pt")
"""


class Storm(Exception):
    """A run that did not end as it should."""


@dataclass
class Stream:
    """The events of a run so far."""

    path: Path
    pids: dict[int, int] = field(default_factory=dict)
    """The newest process of each rank."""
    kept: list[int] = field(default_factory=list)
    """How many ranks kept their processes in each restart that made a step."""
    why_not: list[str] = field(default_factory=list)
    """Why other ranks were started anew that had not failed."""
    took: list[float] = field(default_factory=list)
    """Seconds from a failure to the next step."""
    losses: dict[int, float] = field(default_factory=dict)
    """By step. A repeated step must have the same."""
    furthest: int = 0
    """The last step that any rank had begun when it ended."""
    goes_on: bool = False
    """Whether the run has made a step that no earlier attempt had made."""
    killed: int = 0
    """How many ranks were killed."""
    changed: float = field(default_factory=time.monotonic)
    """When the last event came, on the monotonic clock."""
    last: str = ""
    """Its kind."""
    _read: int = 0

    def read(self) -> set[str]:
        """Read what is new; return the kinds of these events."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:  # the run has not begun
            return set()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        new = [json.loads(line) for line in text.splitlines() if line]
        for event in new:
            self._note(event)
        if new:
            self.changed, self.last = time.monotonic(), new[-1]["kind"]
        return {event["kind"] for event in new}

    def _note(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "began":
                self.pids[event["rank"]] = event["pid"]
            case "restart":
                self.goes_on = False
            case "stop" if event["cause"] == "hang":
                raise Storm("ranks hang")
            case "ended":
                self.furthest = max(self.furthest, event["step"])
            case "restarted":
                self.kept.append(len(event.get("kept", ())))
                self.took.append(event["s"])
                self.why_not += filter(None, [event.get("why_not_kept")])
            case "report" if event["rank"] == 0 and "loss" in event["values"]:
                loss, step = event["values"]["loss"], event["step"]
                self.goes_on |= step > self.furthest + 1
                if self.losses.setdefault(step, loss) != loss:
                    raise Storm(f"step {step} had loss {self.losses[step]!r}, then {loss!r}")


class Killer:
    """Kills ranks of a run at random moments."""

    def __init__(self, stream: Stream, chance: random.Random, most: int) -> None:
        self.stream = stream
        self.chance = chance
        self.most = most
        self._due = math.inf
        self._again = False
        """Whether ranks may be killed within the restart that follows."""

    def look(self, new: set[str]) -> None:
        """Kill if it is time. `new`: kinds of the events that have just come."""
        now, chance = time.monotonic(), self.chance
        # A run ends after three failures without a new step between them: of two restarts in a row
        # one is left alone.
        if self._again and "restart" in new:
            self._again = False
            if chance.random() < 0.6:
                self._due = now + chance.uniform(0, chance.choice((0.05, 0.3, 0.8)))
        elif self._due == math.inf and self.stream.goes_on and not self._again:
            self._due = now + chance.choice((0, 0.1, 0.3)) * chance.random()
        if now >= self._due and self.stream.killed < self.most:
            self._due = math.inf
            if self._kill():
                self._again, self.stream.goes_on = self.stream.goes_on, False

    def _kill(self) -> bool:
        """Kill some ranks; return whether there were any."""
        stream, before = self.stream, self.stream.killed
        count = min(self.chance.choice((1, 1, 1, 1, 2, 2, 3)), self.most - before)
        for rank in self.chance.sample(sorted(stream.pids), count):
            # A process that has ended, and is not replaced yet, is none.
            with contextlib.suppress(ProcessLookupError):
                os.kill(stream.pids[rank], signal.SIGKILL)
                stream.killed += 1
        return stream.killed > before


def storm(stream: Stream, words: tuple[str, ...], kills: int, seed: int) -> None:
    """Train in a new folder, that of the stream; kill so many ranks."""
    folder = stream.path.parent.parent
    folder.mkdir()
    (folder / "stormy.py").write_text(JOB)
    job = () if any(word.startswith("job=") for word in words) else ("job=stormy.py:job",)
    command = [sys.executable, "-m", "raydist.train", *job, *WORDS, *words]
    killer = Killer(stream, random.Random(seed), kills)
    with (folder / "screen.txt").open("w") as screen:
        run = subprocess.Popen(command, cwd=folder, stdout=screen, stderr=screen)
    try:
        while run.poll() is None:
            killer.look(stream.read())
            if time.monotonic() - stream.changed > SILENT_S:
                raise Storm(f"no event for {SILENT_S:.0f} s, the last is {stream.last}")
            time.sleep(LOOK_S)
        stream.read()
        if run.returncode:
            text = (folder / "screen.txt").read_text()[-3000:]
            raise Storm(f"exit code {run.returncode}: {text}")
    finally:
        if run.poll() is None:
            with (folder / "stacks.txt").open("w") as stacks:
                command = [sys.executable, "-m", "raydist.cli", "stacks", "run"]
                subprocess.run(command, cwd=folder, stdout=stacks, stderr=stacks, check=False)
            run.send_signal(signal.SIGINT)
            run.wait()


def state_of(folder: Path) -> dict[str, Any]:
    """Return what a run ended with: of each rank, and the newest checkpoint."""
    import torch

    from tests.checkpoints import state_on_disk

    states = {}
    for path in sorted((folder / "run").glob("*.pt")):
        states[path.stem] = torch.load(path, weights_only=True)
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    return {**states, newest.name: state_on_disk(newest)}


@dataclass
class Alone:
    """A run without a kill."""

    losses: dict[int, float]
    state: dict[str, Any]


def left_alone(folder: Path, words: tuple[str, ...]) -> Alone:
    """Train in this new folder, without a kill."""
    stream = Stream(folder / "run" / "events.jsonl")
    storm(stream, words, 0, 0)
    return Alone(stream.losses, state_of(folder))


def check(stream: Stream, alone: Alone) -> None:
    """Raise Storm if a run does not end as the one that was left alone."""
    from tests.checkpoints import differences

    odd = [
        f"loss of step {step}"
        for step in sorted(stream.losses.keys() | alone.losses.keys())
        if stream.losses.get(step) != alone.losses.get(step)
    ]
    odd += differences(state_of(stream.path.parent.parent), alone.state)
    left = [pid for pid in stream.pids.values() if Path(f"/proc/{pid}/status").exists()]
    odd += [f"process {pid} is left" for pid in left]
    if odd:
        raise Storm(f"{len(odd)} differences: {', '.join(odd[:6])}")


@dataclass
class Outcome:
    """What came of the runs with one division."""

    runs: list[Stream] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Which runs hung, failed, or ended otherwise than the one that was left alone."""

    @property
    def killed(self) -> int:
        """How many ranks were killed."""
        return sum(each.killed for each in self.runs)

    @property
    def kept(self) -> list[int]:
        """How many ranks kept their processes in each restart that made a step."""
        return [kept for each in self.runs for kept in each.kept]

    def row(self) -> str:
        """Return the cells of the table."""
        took = [seconds for each in self.runs for seconds in each.took]
        anew = sum(not kept for kept in self.kept)
        middle = statistics.median(took) if took else math.nan
        cells = (self.killed, len(self.runs), len(self.kept), anew, f"{middle:.2f} s")
        return " | ".join(map(str, (*cells, len(self.failed))))

    def reasons(self) -> list[str]:
        """Return why ranks were started anew that had not failed, and how often."""
        why = [each for run in self.runs for each in run.why_not]
        return [f"{why.count(each)} x {each}" for each in sorted({*why})]


def division(
    folder: Path, words: tuple[str, ...], kills: int, seed: int, steps: int = STEPS
) -> Outcome:
    """Kill so many ranks of runs with this division, in this folder."""
    words = (*words, f"train.steps={steps}")
    alone = left_alone(folder / "alone", words)
    outcome = Outcome()
    while outcome.killed < kills and len(outcome.failed) < FAILURES:
        number = len(outcome.runs) + 1
        stream = Stream(folder / f"{seed}-{number}" / "run" / "events.jsonl")
        outcome.runs.append(stream)
        left = kills - outcome.killed
        try:
            storm(stream, (*words, "restart.in_place=on"), left, seed + number)
            check(stream, alone)
        except Storm as error:
            outcome.failed.append(f"{stream.path.parent}: {error}")
        print(f"  run {number}: {stream.killed} ranks killed", flush=True)
    print("\n".join(f"  {line}" for line in (*outcome.reasons(), *outcome.failed)), flush=True)
    return outcome


def main(rounds: int = 200) -> list[str]:
    """The table's rows. `rounds`: ranks that are killed, for each division."""
    heads = ("", "ranks killed", "runs", "restarts", "of all ranks", "median", "failed runs")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    failed = False
    for number, (name, words) in enumerate(DIVISIONS.items()):
        print(name, flush=True)
        where = folder / str(number)
        where.mkdir()
        outcome = division(where, words, rounds, number * 1000)
        failed |= bool(outcome.failed)
        lines.append(f"| {name} | {outcome.row()} |")
    if not failed:  # otherwise the logs and stacks are of use
        shutil.rmtree(folder)
    return lines
