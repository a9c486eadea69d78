"""Weights & Biases: its cloud, a server, or a folder for `wandb sync`. (driver)"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydist.reporting.points import series
from raydist.watch.trackers import Ending, Measured, Task

INIT_S = 20.0
"""Longest wait for its server; without an answer the run is written to the run folder."""


class Wandb:
    """A run in W&B, with the name of the run folder.

    The user's WANDB_… variables apply. `step` is a separate value: W&B's internal step must grow
    with each call, and the nodes' metrics have none.
    """

    def __init__(self, task: Task, run: str) -> None:
        import wandb

        quiet = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            disable_git=True,
            disable_code=True,
            init_timeout=INIT_S,
        )
        facts: Any = {
            "project": os.environ.get("WANDB_PROJECT", task.project),
            "name": task.run,
            "id": run,
            "resume": "allow",
            "dir": task.folder,
            "config": dict(task.settings),
            "settings": quiet,
            "allow_val_change": True,
            **(
                {"group": os.environ.get("WANDB_RUN_GROUP", task.sweep), "notes": task.trial}
                if task.sweep
                else {}
            ),
        }
        try:
            self._run = wandb.init(**facts)
        except (wandb.errors.Error, OSError) as error:  # no key, no network, no such server
            if "WANDB_MODE" in os.environ:
                raise
            self._run = wandb.init(**facts, mode="offline")
            self.why_offline = f"{type(error).__name__}: {error}".splitlines()[0]
        self.id = run
        self.variables = {"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"}
        self.link = self._run.url or f"wandb sync {Path(self._run.dir).parent}"
        self._teardown = wandb.teardown
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step", step_sync=False)
        self._run.define_metric("system/*", step_metric="system/t")
        self._fits = {1}
        """The calls of raydist.fit whose curves have an axis."""

    def write(self, rows: Sequence[Measured]) -> None:
        for t, step, values, fit in rows:
            axis = series("step", fit)
            if fit not in self._fits:
                self._fits.add(fit)
                self._run.define_metric(axis, hidden=True)
                self._run.define_metric(series("*", fit), step_metric=axis, step_sync=False)
            self._run.log({**values, **({"system/t": t} if step is None else {axis: step})})

    def page(self, path: Path) -> None:
        # With the name of its folder: a resumed run, which has pages of the same names, continues
        # this one.
        self._run.save(str(path), base_path=str(path.parent.parent), policy="now")

    def close(self, ending: Ending) -> None:
        self._run.summary.update({"raydist.status": ending.status, "raydist.culprit": ending.text})
        self._run.finish(exit_code=0 if ending.status == "finished" else 1)
        self._teardown()
