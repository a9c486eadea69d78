"""Ray's private parts, each as the installed Ray has it; and what a run says where one is
missing."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import raydist
from raydist.cluster import connect, gcs, ray_private
from raydist.launch import runtime_env
from raydist.shared.errors import LaunchError
from tests.conftest import ROOT
from tests.records import read_events

JOB = "_ray_internal_job_info_gone"
"""The key of a submitted job's entry in the GCS's store."""


def private_uses(file: Path) -> list[str]:
    """The private modules and names of Ray and torch that a file imports or reads."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                names += [each.name for each in node.names]
            case ast.ImportFrom():
                names += [f"{node.module}.{each.name}" for each in node.names]
            case ast.Attribute():
                names.append(ast.unparse(node))
    inner = re.compile(r"(ray|torch)\.([\w.]*\.)?_(?!_)")
    return [name for name in names if inner.match(name)]


def test_no_other_file_reaches_into_ray_or_torch() -> None:
    parts = ("ray._private", "ray.core", "ray._raylet", "ray.experimental.internal_kv", "torch._C")
    reach = {
        path.name
        for path in (ROOT / "raydist").rglob("*.py")
        if private_uses(path) or any(part in path.read_text() for part in parts)
    }
    assert reach == {"ray_private.py", "torch_private.py"}


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    """Take these private parts away from raydist, as a Ray without them does."""
    find_part = ray_private.find_part
    monkeypatch.setattr(
        ray_private, "find_part", lambda path: None if path in hidden else find_part(path)
    )


@pytest.mark.ray
@pytest.mark.usefixtures("on_ray")
def test_this_ray_lacks_nothing() -> None:
    assert ray_private.missing_parts() == []


@pytest.mark.ray
@pytest.mark.usefixtures("on_ray")
@pytest.mark.parametrize("part", ray_private.OPTIONAL)
def test_each_optional_part_may_be_missing(
    part: str, monkeypatch: pytest.MonkeyPatch, ray_address: str
) -> None:
    import ray
    from ray._private.authentication import authentication_constants

    hide(monkeypatch, part)
    assert [text.partition(":")[2] for text in ray_private.missing_parts()] == [
        f"{part.partition(':')[2]}: {ray_private.OPTIONAL[part]}"
    ]
    (node,) = ray.nodes()
    assert ray_private.draining_nodes() == {}
    assert ray_private.cluster_config() is None
    assert ray_private.started_processes() == []
    connect.keep_workers({node["NodeID"]: 0}, 1.0)
    raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    ray_private.prestart_workers(raylet, 0, 1.0, 10.0)
    wrong = authentication_constants.TOKEN_INVALID_ERROR_MESSAGE
    assert ray_private.refused_token(f"401: {wrong}") == (part != ray_private.WRONG_TOKEN)
    assert not ray_private.needs_no_token(ray_address, 10.0)
    with ray_private.few_processes_in_own_sessions(), ray_private.killed_on_shutdown():
        pass
    ray_private.skip_serializers()


@pytest.mark.ray
@pytest.mark.usefixtures("on_ray")
def test_a_needed_part_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_address: str
) -> None:
    from ray.experimental import internal_kv

    def connect_anew() -> None:
        internal_kv._internal_kv_reset()  # as ray.cluster_utils.Cluster.shutdown() does
        ray_private.connect_kv()

    def take_package() -> None:
        internal_kv._internal_kv_put("gcs://package", b"x")
        assert ray_private.take_package(ray_address, "package") == b"x"

    def change_job() -> None:
        internal_kv._internal_kv_put(JOB, json.dumps({"status": "RUNNING"}), namespace="job")
        try:
            ray_private.change_job_entry(ray_address, "gone", lambda entry: entry, 5)
        finally:
            internal_kv._internal_kv_del(JOB, namespace="job")

    client, messages = ray_private.GCS_CLIENT, ray_private.MESSAGES
    needed: dict[str, Callable[[], object]] = {
        f"{ray_private.STATE}:available_resources_per_node": connect.alive_nodes,
        f"{ray_private.STATE}:actors": lambda: ray_private.is_dead("f" * 32),
        f"{ray_private.SERVICES}:canonicalize_bootstrap_address": connect.running_address,
        "ray._private.worker:_global_node.get_logs_dir_path": ray_private.log_folder,
        "ray._private.worker:global_worker.node.get_runtime_env_dir_path": lambda: (
            runtime_env.upload(str(tmp_path), ())
        ),
        "ray._private.runtime_env.working_dir:upload_working_dir_if_needed": lambda: (
            runtime_env.upload(str(tmp_path), ())
        ),
        "ray.experimental.internal_kv:_internal_kv_initialized": ray_private.connect_kv,
        "ray.experimental.internal_kv:_internal_kv_get": lambda: ray_private.internal_kv("key"),
        "ray._private.grpc_utils:init_grpc_channel": lambda: gcs.answers(ray_address),
        f"{ray_private.STUBS}:NodeInfoGcsServiceStub": lambda: gcs.answers(ray_address),
        f"{ray_private.MESSAGES}:CheckAliveRequest": lambda: gcs.answers(ray_address),
        "ray._private.accelerators.nvidia_gpu:NvidiaGPUAcceleratorManager": ray_private.count_gpus,
        f"{ray_private.TOKEN_SETUP}:maybe_enable_token_auth_if_token_available": lambda: (
            gcs.answers(ray_address)
        ),
        f"{ray_private.STUBS}:InternalKVGcsServiceStub": take_package,
        f"{messages}:InternalKVGetRequest": take_package,
        f"{messages}:InternalKVDelRequest": take_package,
        f"{messages}:InternalKVPutRequest": change_job,
        "ray.dashboard.modules.job.common:JobInfoStorageClient": change_job,
        "ray._private.ray_constants:KV_NAMESPACE_JOB": change_job,
        client: connect_anew,
        "ray.experimental.internal_kv:_initialize_internal_kv": connect_anew,
        f"{client}.internal_kv_put": lambda: ray_private.kv_put("raydist/test", b"x"),
        f"{client}.internal_kv_get": lambda: ray_private.kv_get("raydist/test"),
        f"{client}.internal_kv_keys": lambda: ray_private.kv_values("raydist/test"),
        f"{client}.internal_kv_multi_get": lambda: ray_private.kv_values("raydist/test"),
        f"{client}.internal_kv_del": lambda: ray_private.kv_delete("raydist/test"),
        f"{client}.get_all_job_info": ray_private.dead_jobs,
    }
    for part, function in needed.items():
        function()
        with monkeypatch.context() as without:
            hide(without, part)
            with pytest.raises(LaunchError, match=re.escape(f"has no {part}, which raydist needs")):
                function()
        ray_private.connect_kv()


def test_without_a_connection_the_store_of_the_queue_does_not_answer() -> None:
    code = "from raydist.cluster import ray_private; ray_private.kv_get('key')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ConnectionError: this process is not connected to Ray" in done.stderr


def test_a_client_without_a_token_for_logs_is_named() -> None:
    async def read() -> None:
        async for _ in ray_private.read_log(object(), "node", "file", follow=False):
            pass

    with pytest.raises(LaunchError, match=r"has no JobSubmissionClient\._headers"):
        asyncio.run(read())


BARE = """
import os, sys, raydist
from raydist.cluster import ray_private

def pids():
    return os.getppid()

if __name__ == "__main__":
    find_part = ray_private.find_part
    ray_private.find_part = lambda path: None if path in ray_private.OPTIONAL else find_part(path)
    done = raydist.run(pids, "scale=1x2", "group=ray", "watch.progress=none")
    print(done.status, os.environ.get("RAY_ADDRESS", "started"), flush=True)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
def test_a_program_works_on_a_ray_without_any_optional_part(
    tmp_path: Path, ray_address: str, joined: bool
) -> None:
    (tmp_path / "bare.py").write_text(BARE)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "bare.py"],
        cwd=tmp_path,
        env={**env, "RAY_ADDRESS": ray_address} if joined else env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"finished {ray_address if joined else 'started'}" in done.stdout
    (file,) = tmp_path.glob("runs/*/*/events.jsonl")
    texts = [each["text"] for each in read_events(file) if each["kind"] == "warning"]
    assert len([text for text in texts if " has no " in text]) == len(ray_private.OPTIONAL)


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
    assert ray_private.log_folder().is_dir()
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


SEARCH_PATH = """
import ray, sys
from raydist.cluster import connect
from raydist.settings.config import Job

connect.start_or_join(Job())
print(ray.get(ray.remote(lambda: sys.path).remote()))
"""


@pytest.mark.ray
@pytest.mark.parametrize(("mode", "there"), [(0o755, True), (0o1777, False)], ids=["own", "open"])
def test_workers_get_no_folder_of_the_driver_that_is_open_to_all(
    ray_address: str, mode: int, there: bool
) -> None:
    """From a driver in /tmp, each node imported what another user had put into its /tmp."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, mode)
        program = subprocess.run(
            [sys.executable, "-c", SEARCH_PATH],
            cwd=folder,
            env={**os.environ, "RAY_ADDRESS": ray_address},
            capture_output=True,
            text=True,
            check=True,
        )
        assert (folder in ast.literal_eval(program.stdout)) is there


def test_a_job_config_without_the_list_of_folders_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.job_config.JobConfig", lambda: SimpleNamespace())
    with pytest.raises(LaunchError, match=r"has no JobConfig\._py_driver_sys_path"):
        ray_private.job_config_without_folders()
