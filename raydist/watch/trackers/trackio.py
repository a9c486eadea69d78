"""Trackio: a database of the user, a server, or a Space of Hugging Face. (driver)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raydist.watch.trackers import Ending, Measured, Task, by_full_name


class Trackio:
    """A run in Trackio, with the name of the run folder, which is also its id.

    The user's TRACKIO_… variables apply.
    """

    def __init__(self, task: Task, run: str) -> None:
        import trackio

        self.id = run or task.run
        self._run = trackio.init(
            project=task.project,
            name=self.id,
            config=by_full_name(task.settings),
            resume="allow" if run else "never",
            group=task.sweep or None,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.link = f"trackio show --project {task.project}"
        self.variables = dict[str, str]()

    def write(self, rows: Sequence[Measured]) -> None:
        for _, step, values, _ in rows:
            if step is None:
                self._run.log_system(dict(values))
            else:
                self._run.log(dict(values), step=step)

    def page(self, path: Path) -> None:
        import trackio

        self._run.alert(path.stem, path.read_text(), trackio.AlertLevel.ERROR)

    def close(self, ending: Ending) -> None:
        import trackio

        level = trackio.AlertLevel.INFO if ending.status == "finished" else trackio.AlertLevel.ERROR
        self._run.alert(ending.status, ending.text or None, level)
        self._run.finish()
