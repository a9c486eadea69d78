"""Ray's private parts, each as the installed Ray has it; and what a run says where one is
missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import raydist
from raydist.cluster import ray_private
from raydist.shared.errors import LaunchError
from tests.conftest import ROOT
from tests.records import read_events


def test_no_other_file_reaches_into_ray() -> None:
    parts = ("ray._private", "ray.core", "ray._raylet", "ray.experimental.internal_kv", "torch._C")
    reach = {
        path.name
        for path in (ROOT / "raydist").rglob("*.py")
        if any(part in path.read_text() for part in parts)
    }
    assert reach == {"ray_private.py", "torch_private.py"}


def test_this_ray_lacks_nothing() -> None:
    assert ray_private.missing_parts() == []
    assert all(
        ray_private.find_part(f"ray._private.node:Node.{name}") for name in ray_private.NOT_NEEDED
    )


def test_what_shutdown_imports_is_imported_before() -> None:
    code = """
import sys, threading, ray
from raydist.cluster import ray_private
ray_private.import_for_shutdown()
for each in threading.enumerate():
    if each.daemon:
        each.join()
before = {*sys.modules}
ray.shutdown()
print([name for name in sys.modules if name not in before])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


ACTORS = """
import contextlib
from pathlib import Path

def look():
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended
            if (folder / "cmdline").read_bytes().startswith(b"ray::NodeActor"):
                print("actor", "pydantic_core" in (folder / "maps").read_text())
"""
COMMAND = """
import sys
from raydist import train
from raydist.shared.ending import run_to_the_end

def main():
    code = train.main(["job=actors.py:look", "scale=1x2"])
    print("command", "pydantic" in sys.modules, flush=True)
    return code

run_to_the_end(main)
"""
PROGRAM = """
import sys, raydist
raydist.run("actors.py:look", "scale=1x2")
print("program", "pydantic" in sys.modules, flush=True)
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    ("code", "at_end"), [(COMMAND, "command False"), (PROGRAM, "program True")]
)
def test_ray_imports_pydantic_only_where_objects_of_it_may_be_sent(
    tmp_path: Path, ray_address: str, code: str, at_end: str
) -> None:
    pytest.importorskip("pydantic")
    (tmp_path / "actors.py").write_text(ACTORS)
    env = {**os.environ, "RAY_ADDRESS": ray_address}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert at_end in done.stdout
    (log,) = tmp_path.glob("runs/*/*/logs/rank-0.log")
    assert {*log.read_text().splitlines()} == {"actor False"}


def test_what_is_needed_and_missing_is_named() -> None:
    assert ray_private.find_part("ray._private.worker:no_such") is None
    with pytest.raises(
        LaunchError, match=r"ray .* has no ray\._private\.no_such:thing, which raydist needs"
    ):
        ray_private.require("ray._private.no_such:thing")


def test_ray_does_not_say_how_to_switch_its_token_off(caplog: pytest.LogCaptureFixture) -> None:
    ray_private.quiet_loggers()
    say = ray_private.find_part(f"{ray_private.TOKEN_SETUP}:_warn_token_auth_enabled")
    if say is None:
        pytest.skip("this Ray does not say it")
    say()
    assert not caplog.records


def test_a_ray_that_may_run_is_looked_for_where_ray_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.utils import write_ray_address

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_private.default_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "10.1.2.2:6379")
    assert ray_private.default_address() == "10.1.2.2:6379"
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "ray").mkdir()
    write_ray_address("10.1.2.3:6380")
    assert ray_private.default_address() == "10.1.2.3:6380"


@pytest.mark.ray
def test_each_part_answers(on_ray: Path, ray_address: str) -> None:
    import ray
    from ray.experimental import internal_kv

    (node,) = ray.nodes()
    assert ray_private.current_node() is not None
    assert ray_private.default_address() == ray_address
    assert set(ray_private.free_resources()) == {node["NodeID"]}
    assert ray_private.free_resources()[node["NodeID"]]["CPU"] <= 4
    assert ray_private.draining_nodes() == {}
    assert ray_private.count_gpus() >= 0
    assert ray_private.cluster_config() is None
    internal_kv._internal_kv_reset()  # as ray.cluster_utils.Cluster.shutdown() does
    assert ray_private.internal_kv("no such key") is None
    (on_ray / "send").mkdir()
    (on_ray / "send" / "file.txt").write_text("x")
    internal_kv._internal_kv_reset()  # as ray.cluster_utils.Cluster.shutdown() does
    assert ray_private.upload_folder(str(on_ray / "send"), include_gitignore=True).startswith(
        "gcs://"
    )
    ray_private.check_alive(ray_address, 10)


@pytest.mark.ray
def test_a_jobs_entry_is_changed(on_ray: Path, ray_address: str) -> None:
    from ray.dashboard.modules.job.common import JobInfoStorageClient
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

    ray_private.connect_kv()
    key, namespace = JobInfoStorageClient.JOB_DATA_KEY.format(job_id="here"), "job"
    _internal_kv_put(key, json.dumps({"status": "RUNNING"}), namespace=namespace)
    ray_private.change_job_entry(
        ray_address, "here", lambda entry: entry.replace(b"RUNNING", b"CHANGED"), 5
    )
    assert json.loads(_internal_kv_get(key, namespace=namespace)) == {"status": "CHANGED"}
    ray_private.change_job_entry(ray_address, "here", lambda entry: None, 5)
    assert json.loads(_internal_kv_get(key, namespace=namespace)) == {"status": "CHANGED"}
    _internal_kv_del(key, namespace=namespace)


@pytest.mark.ray
def test_a_run_on_a_ray_that_lacks_a_part_says_so_once_and_goes_on(
    on_ray: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        ray_private.OPTIONAL, "ray._private.state:state.gone", "drained nodes are not noticed"
    )
    done = raydist.run(os.getpid, "scale=1x2", "watch.progress=none")
    assert done.status == "finished"
    warnings = [
        each["text"] for each in read_events(done.dir / "events.jsonl") if each["kind"] == "warning"
    ]
    assert (
        len(
            [
                text
                for text in warnings
                if "has no ray._private.state:state.gone: drained nodes" in text
            ]
        )
        == 1
    )
