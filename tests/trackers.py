"""The data of a run in its trackers, read by the readers of the trackers, each in a process."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIBRARIES = ("tensorboardX", "tensorboard", "mlflow", "sqlalchemy", "wandb", "trackio")
MISSING = [name for name in LIBRARIES if find_spec(name) is None]
requires_trackers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def tensorboard(folder: str) -> dict[str, Any]:
    """Read a folder of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    texts = {
        name.removesuffix("/text_summary"): [
            each.tensor_proto.string_val[0].decode() for each in reader.Tensors(name)
        ]
        for name in reader.Tags()["tensors"]
    }
    curves = {
        name: [[each.step, each.value] for each in reader.Scalars(name)]
        for name in reader.Tags()["scalars"]
    }
    return {
        "curves": curves,
        "config": texts.get("settings", [""])[0],
        "pages": texts,
        "status": texts["status"],
    }


def hparams(folder: str) -> dict[str, Any]:
    """Read what TensorBoard's tab HPARAMS shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    reader = EventAccumulator(folder)
    reader.Reload()
    contents = {}
    for name, content in reader.PluginTagToContent("hparams").items():
        contents[name.rpartition("/")[2]] = HParamsPluginData.FromString(content)
    begin = contents["session_start_info"].session_start_info.hparams
    differs = {name: value.number_value for name, value in begin.items()}
    metrics = [each.name.tag for each in contents["experiment"].experiment.metric_infos]
    return {"differs": differs, "metrics": metrics, "ended": "session_end_info" in contents}


def mlflow(run: str) -> dict[str, Any]:
    """Read a run from the MLflow store in MLFLOW_TRACKING_URI."""
    from mlflow import MlflowClient

    client = MlflowClient()
    result = client.get_run(run)
    curves = {
        name: [[each.step, each.value] for each in client.get_metric_history(run, name)]
        for name in result.data.metrics
    }
    folders = [each.path for each in client.list_artifacts(run) if each.is_dir]
    pages = [each.path for folder in folders for each in client.list_artifacts(run, folder)]
    runs = client.search_runs([result.info.experiment_id])
    return {"curves": curves, "config": result.data.params, "pages": pages, "status": result.info.status,
            "runs": len(runs), "tags": result.data.tags,
            "culprit": result.data.tags.get("raydist.culprit", "")}  # fmt: skip


def trackio(project: str, run: str) -> dict[str, Any]:
    """Read a run from the Trackio database in TRACKIO_DIR."""
    import trackio

    runs = trackio.Api().runs(project)
    storage = sys.modules["trackio.sqlite_storage"].SQLiteStorage
    curves: dict[str, list[list[float]]] = {}
    for row in storage.get_logs(project, run):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                curves.setdefault(name, []).append([row["step"], value])
    alerts = runs[0].alerts()
    return {"curves": curves, "config": runs[0].config, "pages": [each["title"] for each in alerts],
            "runs": len(runs), "group": runs[0].config["_Group"], "status": [each["title"] for each in alerts][:1],
            "system": [name for row in storage.get_system_logs(project, run) for name in row]}  # fmt: skip


def wandb(folder: str) -> dict[str, Any]:
    """Read a run of W&B from the files that `wandb sync` sends, one of each process that wrote to
    it."""
    from wandb.proto import wandb_internal_pb2

    curves: dict[str, list[list[float]]] = {}
    result: dict[str, Any] = {
        "curves": curves,
        "ids": [],
        "config": {},
        "pages": [],
        "status": [],
        "culprit": "",
        "system": [],
    }
    for file in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb")):
        for raw in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                result["ids"].append(record.run.run_id)
                result |= {"group": record.run.run_group, "notes": record.run.notes}
                result["config"] |= {
                    each.key: json.loads(each.value_json) for each in record.run.config.update
                }
            elif kind == "history":
                row = {
                    each.key or "/".join(each.nested_key): json.loads(each.value_json)
                    for each in record.history.item
                }
                axis = next((name for name in row if name.rpartition("/")[2] == "step"), None)
                result["system"] += [] if axis else [*row]
                for name in row.keys() - {axis} if axis else ():
                    curves.setdefault(name, []).append([row[axis], row[name]])
            elif kind == "files":
                result["pages"] += [each.path for each in record.files.files]
            elif kind == "summary":
                new = {each.key or "/".join(each.nested_key): json.loads(each.value_json)
                       for each in record.summary.update}  # fmt: skip
                result["culprit"] = new.get("raydist.culprit", result["culprit"])
            elif kind == "exit":
                result["status"].append(record.exit.exit_code)
    return result


def records_of(log: bytes) -> list[bytes]:
    """Return the records of a LevelDB log.

    After a header of 7 bytes it has blocks of 32 KiB; each piece begins with checksum, length and
    type.
    """
    records, at, partial = [], 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", log[at : at + 7])
        partial += log[at + 7 : at + 7 + length]
        if kind in (1, 4):  # full, last
            records.append(partial)
            partial = b""
        at += 7 + length
    return records


def read(kind: str, *args: str, env: Mapping[str, str]) -> Any:
    """Read in a separate process: these libraries cannot read twice in one
    process."""
    code = (
        f"import json; from tests import trackers; print('\\n' + "
        f"json.dumps(trackers.{kind}(*{args!r})))"
    )
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
