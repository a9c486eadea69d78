"""TensorBoard: event files in the run folder. (driver)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raydist.watch.trackers import Ending, Measured, Task, by_full_name


class TensorBoard:
    """Written by tensorboardX, which needs no torch. A run that resumes adds a file to the folder of the first."""

    def __init__(self, task: Task, run: str) -> None:
        from tensorboardX import SummaryWriter

        self.id = run or str(Path(task.folder, "tensorboard"))
        self.link, self.variables = f"tensorboard --logdir {self.id}", dict[str, str]()
        self._writer = SummaryWriter(self.id)
        rows = (f"| {name} | {value} |" for name, value in by_full_name(task.settings).items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))
        self._writer.flush()

    def write(self, rows: Sequence[Measured]) -> None:
        for t, step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, int(t) if step is None else step, walltime=t)
        self._writer.flush()

    def page(self, path: Path) -> None:
        self._writer.add_text(f"failure/{path.stem}", f"```\n{path.read_text()}\n```")

    def close(self, ending: Ending) -> None:
        self._writer.add_text("status", f"{ending.status}\n\n{ending.text}".strip())
        self._writer.close()
