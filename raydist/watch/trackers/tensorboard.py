"""TensorBoard: event files in the run folder. (driver)"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydist.watch.trackers import Ending, Measured, Task, by_full_name


class TensorBoard:
    """Event files, written by tensorboardX, which needs no torch.

    A run that resumes adds a file to the folder of the first run. Trials are next to each other in
    the folder of their sweep, with what TensorBoard's tab HPARAMS needs.
    """

    def __init__(self, task: Task, run: str) -> None:
        from tensorboardX import SummaryWriter
        from tensorboardX.summary import hparams

        folder = Path(task.folder)
        first = (
            folder.parent / "tensorboard" / folder.name if task.sweep else folder / "tensorboard"
        )
        self.id = run or str(unused(first))
        shown = Path(self.id).parent if task.sweep else self.id
        self.link = f"tensorboard --logdir {shown}"
        self.variables = dict[str, str]()
        self._writer = SummaryWriter(self.id)
        rows = (f"| {name} | {value} |" for name, value in by_full_name(task.settings).items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))
        differs = {name: number_or_text(value) for name, value in task.differs.items()}
        *begin, self._end = hparams(differs, dict.fromkeys(objective_names(task.settings), 0.0))
        for each in begin if differs else ():
            self._writer.file_writer.add_summary(each)
        self._writer.flush()

    def write(self, rows: Sequence[Measured]) -> None:
        for t, step, values, _ in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, int(t) if step is None else step, walltime=t)
        self._writer.flush()

    def page(self, path: Path) -> None:
        self._writer.add_text(f"failure/{path.stem}", f"```\n{path.read_text()}\n```")

    def close(self, ending: Ending) -> None:
        self._writer.add_text("status", f"{ending.status}\n\n{ending.text}".strip())
        if ending.status == "finished":
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def unused(folder: Path) -> Path:
    """Return this folder, or `NAME-2` and so on if another training in the run folder has it."""
    others = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([folder], others) if not path.is_dir())


def number_or_text(value: str) -> float | str:
    """Return a setting's value as TensorBoard compares it."""
    try:
        return float(value)
    except ValueError:
        return value


def objective_names(settings: Mapping[str, Any]) -> list[str]:
    """Return the names in `sweep.objective=min:test_loss,max:accuracy`."""
    parts = str(settings.get("sweep", {}).get("objective", "")).split(",")
    return [name for part in parts if (name := part.partition(":")[2].strip())]
