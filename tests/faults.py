"""Faults as data (what goes wrong, on which rank, at which step), and trainings in which they
happen."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist
from raydist.worker import checkpoint, context
from tests.losses import next_token
from tests.waiting import wait_until

SAMPLES = 256
"""Samples of the training."""
_due: list[Fault] = []
"""The faults of this rank that have not happened yet."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong after `step` steps."""

    act: str
    """kill, stop (SIGSTOP), wait (for a file `go` in the working directory), raise, lose (raise gloo's
    error of a lost peer), exit, abort, skip (the next step's collectives), fill (the disk of the run folder), damage (the newest checkpoint, and
    kill)."""
    rank: int
    step: int
    attempts: tuple[int, ...] = (0,)
    """The attempts in which it happens; empty means all."""

    def due(self, step: int) -> bool:
        """Return whether it happens now. Steps of a GPU may be reported two at a time, so a step
        may be skipped."""
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        mine = self.rank == raydist.rank().rank and attempt in (self.attempts or (attempt,))
        return mine and step >= self.step

    def strike(self) -> None:
        """Trigger the fault in this process."""
        if self.act in ("fill", "damage"):
            checkpoint.settle()
        match self.act:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wait":
                wait_until(Path("go").exists, timeout=600)
            case "raise":
                raise ValueError(f"struck at step {self.step}")
            case "lose":
                raise RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer")
            case "exit":
                sys.exit(3)
            case "abort":
                os.abort()
            case "skip":
                time.sleep(1000)
            case "fill":
                fill(raydist.rank().run_dir / "ballast")
            case "damage":
                newest = max((raydist.rank().run_dir / "checkpoints").glob("step-*"))
                (newest / "state.pt").write_bytes(b"cut off")
                os.kill(os.getpid(), signal.SIGKILL)


def fill(path: Path) -> None:
    """Fill the disk of this file."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def kill(rank: int, step: int, *attempts: int) -> Fault:
    return Fault("kill", rank, step, attempts or (0,))


def add_faults(*faults: Fault) -> None:
    """Add faults of this rank. They are not passed in an environment variable, since a kept fork
    server belongs to one environment."""
    _due.extend(faults)


def strike(step: int) -> None:
    """Trigger the faults that are due at this step."""
    for fault in [each for each in _due if each.due(step)]:
        _due.remove(fault)
        fault.strike()


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss. It is computed after the previous steps, so faults happen here."""
    strike(context.current().step)
    return nn.functional.cross_entropy(output, target)


def training(config: Any, pause: float = 0.0, struck: tuple[Fault, ...] = ()) -> dict[str, Any]:
    """Train a small model with dropout and momentum; return its final state to the last bit. An
    epoch has 16 steps on 2 ranks."""
    add_faults(*struck)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 10, generator=generator)
    targets = torch.randint(3, (SAMPLES,), generator=generator)
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 3)
    )
    model.tp_plan = {"0": "colwise_rep"}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        return cross_entropy(output, target)

    figures = raydist.fit(config, train=TensorDataset(inputs, targets), test=TensorDataset(inputs, targets),
                          loss=loss, model=model)  # fmt: skip
    return {
        "figures": figures,
        "weights": whole_weights(model),
        "random": torch.get_rng_state().tolist(),
    }


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model that may be divided; of a pipeline that of this rank's stage."""
    return {
        name: getattr(value, "full_tensor", lambda value=value: value)().tolist()
        for name, value in model.state_dict().items()
        if not value.is_meta  # another stage's
    }


def compiled(config: Any, struck: tuple[Fault, ...] = ()) -> dict[str, Any]:
    """Train a small language model of 12 steps; return its final state to the last bit. Faults happen
    in a hook: the loss is compiled. aot_eager takes a tenth of the time of inductor."""
    from raydist.training.gpt import GPT

    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    add_faults(*struck)
    tokens = torch.randint(64, (64, 17), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    torch.manual_seed(0)
    model = GPT(vocab=64, layers=2, width=16, heads=2, kv_heads=1, hidden=32)

    def on_step(step: int, values: Any) -> None:
        strike(step)

    figures = raydist.fit(
        config, train=data, test=data, loss=next_token, model=model, on_step=on_step
    )
    return {"figures": figures, "weights": whole_weights(model)}


def two_trainings(config: Any, struck: tuple[Fault, ...] = (), first: int = 20) -> dict[str, float]:
    """Pretrain for 20 steps, then fine-tune for 10 steps with faults; return the final figures."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 10, generator=generator), torch.randint(3, (64,), generator=generator)
    )
    for steps, faults in ((first, ()), (10, struck)):
        add_faults(*faults)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3))
        settings = replace(config, train=replace(config.train, steps=steps))
        figures = raydist.fit(settings, train=data, loss=cross_entropy, model=model)
    return figures


def custom_loop(steps: int = 40, struck: tuple[Fault, ...] = ()) -> tuple[int, float]:
    """Run a hand-written loop that saves every tenth step; return the step it resumed from and the
    final weight."""
    from raydist.worker import checkpoint

    add_faults(*struck)
    weight, begin = torch.zeros(1), 0
    if (latest := checkpoint.latest()) is not None:
        weight, begin = latest.state["weight"], latest.step
    for step in range(begin + 1, steps + 1):
        total = torch.ones(1) * step
        torch.distributed.all_reduce(total)
        weight += total
        if step % 10 == 0:
            checkpoint.save(step, {"weight": weight})
        raydist.report(step=step, loss=float(weight))
        strike(step)
    return begin, float(weight)
