"""Write the result into the metadata of the Ray job, which `ray job list` shows. (driver)

The setting is watch.job_metadata=true.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from raydist.cluster import ray_private
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.kinds import Event

OVERRIDES = "raydist.words"
"""Key of the job's command line, which tools.submit sets."""
MAX_METRICS = 40
"""Maximum number of metrics that are written; result.json has all of them."""
LONGEST = 300
"""Maximum number of characters of the culprit's line."""
ANSWER_S = 5.0
"""Longest wait for the GCS, for each of two calls."""


def result_metadata(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a result: names with the prefix raydist. -> text.

    `result`: the dict of result.json.
    """
    texts = {
        "result": result["status"],
        "run_dir": result["dir"],
        "attempts": str(1 + len(result["restarts"])),
        "goodput": f"{result['goodput']:.3f}",
        "checkpoint": result["checkpoint"] or "",
        "signal": str(result["signal"] or ""),
        "culprit": result["failure"].partition("\n")[0][:LONGEST],
    }
    numbers = [(name, value) for name, value in result["metrics"].items() if is_number(value)]
    texts |= {f"metrics.{name}": f"{float(value):.6g}" for name, value in numbers[:MAX_METRICS]}
    return {f"raydist.{name}": text for name, text in texts.items() if text}


def is_number(value: Any) -> bool:
    """Report whether this is a number, or the text for a number that JSON lacks."""
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def merged(entry: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a job's entry with this metadata instead of that of an earlier run.

    None if Ray has recorded the job's end.
    """
    if entry["status"] != "RUNNING":
        return None
    before = entry.get("metadata") or {}
    kept = {
        name: text
        for name, text in before.items()
        if name == OVERRIDES or not name.startswith("raydist.")
    }
    return {**entry, "metadata": {**kept, **metadata}}


class JobMetadata:
    """A reader of events that writes the result into the job's metadata.

    It does nothing without watch.job_metadata, or outside of a job submitted to Ray. Ray has no API
    to change a job's metadata, so this reads the job's entry from the GCS and writes it back. Ray
    itself writes the entry only before the job's process starts and after it has ended
    (job_supervisor.py, Ray 2.60). If a Ray stores its jobs in another way, this reader raises an
    exception: the run warns of it and continues.
    """

    def __init__(self, settings: Watch) -> None:
        self._id = ray_private.submission_id() if settings.job_metadata else ""
        self._dir = ""

    def __call__(self, event: Event) -> None:
        if not self._id:
            return
        match event:
            case kinds.Run():
                self._dir = event.dir
            case kinds.Cluster():
                self._write({"raydist.run_dir": self._dir})
            case kinds.Result():
                self._write(result_metadata(event.to_json()))

    def _write(self, metadata: Mapping[str, str]) -> None:
        import grpc

        def change(entry: bytes) -> bytes | None:
            changed = merged(json.loads(entry), metadata)
            return None if changed is None else json.dumps(changed).encode()

        # If the GCS does not answer, other parts of the run report that.
        with contextlib.suppress(grpc.RpcError):
            # Ray's job server sets RAY_ADDRESS to the address of the GCS.
            ray_private.change_job_entry(os.environ["RAY_ADDRESS"], self._id, change, ANSWER_S)
