"""Progress to Kubeflow Trainer: what `kubectl describe trainjob` shows as Trainer Status. (driver)

The pods of a TrainJob get the three variables if its controller has the feature gate TrainJobStatus
(alpha in 2.2). The request follows its documentation, docs/user-guides/trainjob-progress.md:
POST {"trainerStatus": {…}} with the token in a file, which is replaced from time to time.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from raydist.reporting.points import numbers
from raydist.reporting.progress import Progress
from raydist.watch.trackers import Ending, Measured, Task

URL, TOKEN, CA = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "TOKEN", "CA_CERT"))
EVERY_S = 5.0
"""Minimum time between two requests."""
ANSWER_S = 5.0
METRICS = 16
"""Maximum number of metrics that are sent: they are stored in the TrainJob object."""


class Kubeflow:
    """A tracker that shows the newest state, not each step."""

    def __init__(self, task: Task, run: str) -> None:
        self.id = task.run
        self.link = os.environ[URL]
        self.variables = dict[str, str]()
        self.progress = Progress()
        """The progress of the main loop, once it is set."""
        self._due = 0.0

    def write(self, rows: Sequence[Measured]) -> None:
        if time.monotonic() >= self._due:
            self._send(99)
            self._due = time.monotonic() + EVERY_S

    def page(self, path: Path) -> None:
        """Do nothing: Kubeflow has no page for it."""

    def close(self, ending: Ending) -> None:
        self._send(100 if ending.status == "finished" else 99)

    def _send(self, most: int) -> None:
        """Send the progress; 100 percent is reserved for a run that has finished."""
        body = json.dumps({"trainerStatus": status(self.progress, most)}).encode()
        headers = {
            "Authorization": f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}",
            "Content-Type": "application/json",
        }
        request = urllib.request.Request(os.environ[URL], body, headers)
        trusted = ssl.create_default_context(cafile=os.environ.get(CA))
        urllib.request.urlopen(request, timeout=ANSWER_S, context=trusted).close()


def status(progress: Progress, most: int) -> Mapping[str, object]:
    """Return the known fields of TrainJob.status.trainerStatus."""
    found: dict[str, object] = {"lastUpdatedTime": datetime.now(timezone.utc).isoformat()}
    step = progress.step or 0
    steps = progress.totals.get("steps")
    rate, _ = progress.rates()
    if most == 100:
        found |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif steps:
        found["progressPercentage"] = max(0, min(most, int(100 * step / steps)))
        if rate > 0:
            found["estimatedRemainingSeconds"] = max(0, round((steps - step) / rate))
    values = numbers({**progress.values, **progress.last_evaluation})
    if values:
        found["metrics"] = [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in list(values.items())[:METRICS]
        ]
    return found
