"""What a run came to, in the metadata of the Ray job that it runs in, for `ray job list` and the dashboard. (driver)"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from raydist.errors import Stopped
from raydist.events import Event

WORDS = "raydist.words"
"""The words of the job, as tools.submit has put them there."""
MOST = 40
"""Metrics that are told; the rest is in result.json."""
LONGEST = 300
"""Characters of the culprit's line."""
ANSWER_S = 5.0
"""Longest wait for the head's store, for each of two calls."""


def facts(result: Mapping[str, Any]) -> dict[str, str]:
    """A result, as of result.json, in the words of a job's metadata: one level, all text."""
    told = {
        "result": result["status"],
        "run_dir": result["dir"],
        "attempts": str(1 + len(result["restarts"])),
        "goodput": f"{result['goodput']:.3f}",
        "checkpoint": result["checkpoint"] or "",
        "signal": str(result["signal"] or ""),
        "culprit": result["failure"].partition("\n")[0][:LONGEST],
    }
    numbers = [(name, value) for name, value in result["metrics"].items() if is_number(value)]
    told |= {f"metrics.{name}": f"{float(value):.6g}" for name, value in numbers[:MOST]}
    return {f"raydist.{name}": text for name, text in told.items() if text}


def is_number(value: Any) -> bool:
    """Whether it is one, or one that JSON has no form for."""
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def merged(entry: Mapping[str, Any], told: Mapping[str, str]) -> dict[str, Any] | None:
    """A job's entry in Ray's store with these facts in place of those of a run before; None where Ray has ended it."""
    if entry["status"] != "RUNNING":
        return None
    before = entry.get("metadata") or {}
    kept = {name: text for name, text in before.items() if name == WORDS or not name.startswith("raydist.")}
    return {**entry, "metadata": {**kept, **told}}


class Metadata:
    """A reader of events. Outside of a job that was submitted to Ray it does nothing.

    Ray has no call for it: the job's entry is read from the head's store and written back. While the job's process
    lives nobody else writes there (job_supervisor.py, Ray 2.60: RUNNING before it starts, the status of the end once it
    has gone). Where a Ray keeps it otherwise nothing is told, and nothing is said of that.
    """

    def __init__(self) -> None:
        self._id, self._dir = submission_id(), ""

    def __call__(self, happened: Event) -> None:
        if not self._id:
            return
        match happened["kind"]:
            case "run":
                self._dir = happened["dir"]
            case "cluster":
                self._tell({"raydist.run_dir": self._dir})
            case "result":
                self._tell(facts(happened))

    def _tell(self, told: Mapping[str, str]) -> None:
        try:
            put(self._id, told)
        except Stopped:
            raise
        except Exception:
            return


def submission_id() -> str:
    """The id under which this program was submitted to Ray as a job; empty where it was not."""
    try:
        return str(json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"])
    except (KeyError, ValueError, TypeError):
        return ""


def put(id: str, told: Mapping[str, str]) -> None:
    """Add facts to the metadata of a running job. Raises whatever goes wrong."""
    # Not Ray's own client of the store, which ends the whole process where the store is gone.
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import KV_NAMESPACE_JOB
    from ray.core.generated.gcs_service_pb2 import InternalKVGetRequest, InternalKVPutRequest
    from ray.core.generated.gcs_service_pb2_grpc import InternalKVGcsServiceStub
    from ray.dashboard.modules.job.common import JobInfoStorageClient

    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=id).encode()
    channel = init_grpc_channel(os.environ["RAY_ADDRESS"])  # Ray's job server sets it to the address of the store
    try:
        store = InternalKVGcsServiceStub(channel)
        found = store.InternalKVGet(InternalKVGetRequest(key=key, namespace=KV_NAMESPACE_JOB), timeout=ANSWER_S)
        if (entry := merged(json.loads(found.value), told)) is not None:
            value = json.dumps(entry).encode()
            request = InternalKVPutRequest(key=key, namespace=KV_NAMESPACE_JOB, value=value, overwrite=True)
            store.InternalKVPut(request, timeout=ANSWER_S)
    finally:
        channel.close()
