"""MLflow: a server, or a database. (driver)"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.watch.trackers import Ending, Measured, Task, by_full_name

if TYPE_CHECKING:
    from mlflow.entities import Param

STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
METRICS, PARAMS, LONGEST, NAME = 1000, 100, 6000, 250
"""Maximum number of metrics and params of one request, and of characters of a param and of a name.

Source: mlflow.utils.validation.
"""


class Mlflow:
    """A run in MLflow, with the name of the run folder.

    The user's MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME apply.
    """

    def __init__(self, task: Task, run: str) -> None:
        # MLflow's own retries last minutes; a call that raised is repeated anyway.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        import mlflow

        with one_at_a_time(task):
            self._client = mlflow.MlflowClient()
            self.id = run or os.environ.get("MLFLOW_RUN_ID", "")
            self._unsent: list[Param] = []
            """The settings of a run that this object has created."""
            if self.id:
                self._client.update_run(self.id, status="RUNNING")
            else:
                self._unsent, self.id = params_of(task), self._create_run(task)
                # `write` tries again: an error here would make another run of the next try.
                with suppress(Exception):
                    self._send_settings()
        uri = mlflow.get_tracking_uri()
        self.link = f"{uri} run {self.id}"
        self.variables = {"MLFLOW_RUN_ID": self.id, "MLFLOW_TRACKING_URI": uri}

    def _create_run(self, task: Task) -> str:
        tags = {"raydist.sweep": task.sweep, "raydist.trial": task.trial} if task.sweep else {}
        made = self._client.create_run(self._experiment(task.project), run_name=task.run, tags=tags)
        return str(made.info.run_id)

    def _experiment(self, project: str) -> str:
        if made := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return made
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", project)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _send_settings(self) -> None:
        from mlflow.exceptions import MlflowException

        while some := self._unsent[:PARAMS]:
            try:
                self._client.log_batch(self.id, params=some)
            except MlflowException as error:
                # The program has a param of the same name, or the server takes shorter ones only:
                # it would refuse them each time, and the metrics that come after them.
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
            del self._unsent[:PARAMS]

    def write(self, rows: Sequence[Measured]) -> None:
        from mlflow.entities import Metric

        self._send_settings()
        metrics = (
            Metric(plain(name), value, int(t * 1000), int(t) if step is None else step)
            for t, step, values, _ in rows
            for name, value in values.items()
        )
        # The server ignores metrics that it already has.
        while some := list(islice(metrics, METRICS)):
            self._client.log_batch(self.id, metrics=some)

    def page(self, path: Path) -> None:
        # A resumed run, which has pages of the same names, continues this one.
        self._client.log_text(self.id, path.read_text(), f"{path.parent.name}/{path.name}")

    def close(self, ending: Ending) -> None:
        tags = {"raydist.status": ending.status, "raydist.culprit": ending.text}
        for name, text in tags.items():
            self._client.set_tag(self.id, name, text)
        self._client.set_terminated(self.id, STATUS[ending.status], int(time.time() * 1000))
        self._send_settings()


def params_of(task: Task) -> list[Param]:
    """Return the settings of the run, as MLflow takes them."""
    from mlflow.entities import Param

    settings = by_full_name(task.settings)
    return [Param(plain(name), str(value)[:LONGEST]) for name, value in settings.items()]


@contextmanager
def one_at_a_time(task: Task) -> Iterator[None]:
    """Let one trial of a sweep at a time run the block.

    Trials begin together: of two that create a database or an experiment at once, one would
    fail.
    """
    if not task.sweep:
        yield
        return
    with Path(task.folder).with_name(".mlflow.lock").open("w") as lock:
        with suppress(OSError):  # a disk without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def plain(name: str) -> str:
    """Return a name that MLflow accepts: of these characters, and like a path without `..`.

    One that it does not would stop all others, which are sent with it.
    """
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    kept = [part.replace(".", "_") if part in (".", "..") else part for part in parts if part]
    return "/".join(kept)[:NAME].rstrip("/") or "_"
