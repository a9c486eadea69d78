"""Every use of Ray's private API: Ray has no public API for these. (driver)

A part is looked up by its path when it is used. `OPTIONAL` lists the parts that a run can do
without: if the installed Ray lacks one, the run warns once and continues. For any other part it is
a LaunchError that names the part.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from raydist.cluster import local_ray
from raydist.shared.errors import LaunchError

SERIALIZERS = "ray.util.serialization_addons:apply"
LOG_EVERY_S = 0.5
"""Seconds between two reads of a growing log by Ray."""
CONNECT_S = 30.0
"""Limit on connecting to the dashboard for a log."""
STATE, SERVICES = "ray._private.state", "ray._private.services"
MESSAGES, STUBS = "ray.core.generated.gcs_service_pb2", "ray.core.generated.gcs_service_pb2_grpc"
NODE_MESSAGES = "ray.core.generated.node_manager_pb2"
NODE_STUBS = "ray.core.generated.node_manager_pb2_grpc"
GCS_CLIENT = "ray._private.worker:global_worker.gcs_client"
AUTHENTICATION = "ray._private.authentication"
TOKEN_SETUP = f"{AUTHENTICATION}.authentication_token_setup"
WRONG_TOKEN = f"{AUTHENTICATION}.authentication_constants:TOKEN_INVALID_ERROR_MESSAGE"
USES_TOKENS = f"{AUTHENTICATION}.authentication_utils:is_token_auth_enabled"
PRESTART = (f"{NODE_MESSAGES}:PrestartWorkersRequest", f"{NODE_STUBS}:NodeManagerServiceStub")
POPEN = f"{SERVICES}:ConsolePopen"
"""What starts each process of Ray."""
KILL = "ray._private.node:Node.kill_all_processes"
STARTED = "ray._private.worker:_global_node.all_processes"
DRIVER_FOLDERS = "_py_driver_sys_path"
NOT_NEEDED = tuple(
    f"ray._private.node:Node.{name}"
    for name in ("start_monitor", "start_log_monitor", "start_api_server")
)
"""What starts services that a Ray for one program does not need.

They are the autoscaler, the forwarder of workers' output, and the dashboard's process. They take
2 s of CPU, out of the 4.5 s of a Ray that is started for one program, while torch is being imported
at the same time.
"""
STORE = tuple(
    f"{GCS_CLIENT}.{name}"
    for name in (
        *(f"internal_kv_{name}" for name in ("put", "get", "del", "keys", "multi_get")),
        "get_all_job_info",
    )
)
"""What the queue needs of the GCS."""
OPTIONAL = {
    f"{STATE}:state.get_draining_nodes": "raydist notices a drained node only when it is gone",
    f"{STATE}:state.get_cluster_config": "raydist reads the autoscaler's node types from its file",
    **dict.fromkeys(PRESTART, "the actors of a further run take half a second longer to start"),
    WRONG_TOKEN: "a wrong token is reported as a missing one",
    USES_TOKENS: "a Ray without tokens, which refuses those of this process, is not named",
    SERIALIZERS: "each command takes a fifth of a second longer",
    POPEN: "a signal to the whole process group ends Ray before the ranks",
    KILL: "a Ray that raydist started takes a second longer to end",
    STARTED: "processes of a Ray that raydist started may outlive it by a minute",
    **dict.fromkeys(NOT_NEEDED, "a Ray that raydist starts uses two more seconds of CPU"),
    **dict.fromkeys(STORE, "a run is in the queue only with queue=on, and then fails"),
}
"""module:attribute -> the consequence for a run if this Ray lacks it."""
KV_NAMESPACE = b"raydist"
"""Namespace of raydist's keys in the GCS's key-value store."""
KV_S = 5.0
"""Limit on a call to that store. It answers within a millisecond."""
WORKING_DIRS = "/working_dir_files/"
"""A part of the path of each folder that Ray unpacks for a working_dir."""


def find_part(path: str) -> Any:
    """Return the object at `module:attribute`; None if this Ray lacks it."""
    module, _, names = path.partition(":")
    try:
        return functools.reduce(getattr, names.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return None


def require(path: str) -> Any:
    """Return the object at `module:attribute`; LaunchError if this Ray lacks it."""
    if (part := find_part(path)) is None:
        raise missing_part(path)
    return part


def missing_part(path: str) -> LaunchError:
    """Return the error for a part that this Ray lacks."""
    import ray

    return LaunchError(
        f"ray {ray.__version__} has no {path}, which raydist needs: pip install -U raydist ray"
    )


def raylet_pid(environ: Mapping[str, str] = os.environ) -> int:
    """Return the process id of the raylet that started this process; 0 if it is no worker of Ray.

    Does not import Ray.
    """
    return int(environ.get("RAY_RAYLET_PID", "0"))


def missing_parts() -> list[str]:
    """Return a warning for each optional part that the installed Ray lacks."""
    import ray

    return [
        f"ray {ray.__version__} has no {path}: {why}"
        for path, why in OPTIONAL.items()
        if find_part(path) is None
    ]


async def read_log(
    client: Any, node: str, name: str, follow: bool, every_s: float = LOG_EVERY_S
) -> AsyncIterator[bytes]:
    """Read a file below Ray's log folder on a node, through a JobSubmissionClient.

    `follow`: continue with what is added to it, which Ray looks for every `every_s` seconds, until
    the connection breaks. FileNotFoundError: no such file; another OSError: the connection broke.
    """
    import asyncio  # hardly any command needs these

    import aiohttp

    headers = client_headers(client)
    kind = f"stream?interval={every_s}&" if follow else "file?"
    address = (
        f"{client.get_address()}/api/v0/logs/{kind}lines=-1&node_id={node}&filename={quote(name)}"
    )
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limits, trust_env=True) as session,
            session.get(address) as reply,
        ):
            if reply.status >= 400:  # Ray answers 500 if there is no such file
                raise FileNotFoundError(f"{name}: {reply.status} {reply.reason}")
            keep_alive(reply)
            async for block in reply.content.iter_any():
                yield block
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise ConnectionError(f"{name}: {error}") from error


def client_headers(client: Any) -> dict[str, str]:
    """Return the headers of a JobSubmissionClient, which have the token."""
    if (headers := getattr(client, "_headers", None)) is None:
        raise missing_part("JobSubmissionClient._headers")
    return dict(headers)


def send_package(client: Any, name: str, content: bytes) -> None:
    """Put bytes into the GCS's store through the dashboard, as an uploaded package is.

    They stay until `take_package`. OSError: the dashboard refuses it, or does not answer.
    """
    address = f"{client.get_address()}/api/packages/gcs/{name}"
    headers = {**client_headers(client), "Content-Type": "application/octet-stream"}
    request = Request(address, content, headers, method="PUT")
    with urlopen(request, timeout=CONNECT_S):
        pass


def take_package(address: str, name: str) -> bytes | None:
    """Return what `send_package` has put into the store of the GCS at host:port, and remove it.

    None: there is nothing of that name. ConnectionError: the GCS does not answer.
    """
    import grpc

    key = {"key": f"gcs://{name}".encode()}
    try:
        with grpc_channel(address) as channel:
            store = require(f"{STUBS}:InternalKVGcsServiceStub")(channel)
            found = store.InternalKVGet(
                require(f"{MESSAGES}:InternalKVGetRequest")(**key), timeout=KV_S
            )
            if not found.value:
                return None
            store.InternalKVDel(require(f"{MESSAGES}:InternalKVDelRequest")(**key), timeout=KV_S)
    except grpc.RpcError as error:
        raise ConnectionError(str(error)) from error
    value: bytes = found.value
    return value


def keep_alive(reply: Any) -> None:
    """Make the system notice within a minute that the other end of a silent stream is gone.

    A laptop that slept keeps a connection that its router has long forgotten.
    """
    sock = None if reply.connection is None else reply.connection.transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # macOS has other names
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def log_folder() -> Path:
    """Return the log folder of the Ray on this machine to which this process is connected."""
    return Path(require("ray._private.worker:_global_node.get_logs_dir_path")())


def started_processes() -> list[int]:
    """Return the process ids of the Ray that this process started."""
    started = find_part(STARTED) or {}
    return [info.process.pid for infos in started.values() for info in infos]


def is_dead(actor: str) -> bool:
    """Report whether the actor with this id has ended; False if Ray does not know it."""
    return bool(require(f"{STATE}:actors")(actor).get("State") == "DEAD")


def default_address() -> str | None:
    """Return the host:port of RAY_ADDRESS, else of the last Ray started on this machine.

    None if ray.init would start one. Only RAY_ADDRESS requires importing Ray.
    """
    if os.environ.get("RAY_ADDRESS"):
        address: str | None = require(f"{SERVICES}:canonicalize_bootstrap_address")(None)
        return address
    return local_ray.noted_address()


def job_config_without_folders() -> Any:
    """Return a JobConfig for ray.init with which workers get no folder of the driver.

    Otherwise Ray puts its current folder and that of its script first on their search paths.
    """
    import ray.job_config

    class Nothing(list[str]):
        def extend(self, folders: Iterable[str]) -> None:
            """Add nothing: ray.init calls this with the folders."""

    config = ray.job_config.JobConfig()
    if not isinstance(getattr(config, DRIVER_FOLDERS, None), list):
        raise missing_part(f"JobConfig.{DRIVER_FOLDERS}")
    setattr(config, DRIVER_FOLDERS, Nothing())
    return config


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that a Ray started here would have."""
    manager = require("ray._private.accelerators.nvidia_gpu:NvidiaGPUAcceleratorManager")
    visible = manager.get_current_process_visible_accelerator_ids()
    return int(manager.get_current_node_num_accelerators() if visible is None else len(visible))


def free_resources() -> dict[str, dict[str, float]]:
    """Return node id -> resources that are not reserved."""
    free: dict[str, dict[str, float]] = require(f"{STATE}:available_resources_per_node")()
    return free


def cluster_config() -> Any:
    """Return the autoscaler's ClusterConfig message; None without one."""
    get_config = find_part(f"{STATE}:state.get_cluster_config")
    return get_config() if get_config else None


def draining_nodes() -> dict[str, int]:
    """Return node id -> deadline of each node that Ray drains.

    A deadline is in ms since the epoch; 0 means none.
    """
    get_draining = find_part(f"{STATE}:state.get_draining_nodes")
    deadlines: dict[str, int] = get_draining() if get_draining else {}
    return deadlines


def upload_folder(folder: str, include_gitignore: bool, excludes: Sequence[str] = ()) -> str:
    """Upload a folder to Ray's store unless it is already there; return its URI.

    `excludes`: patterns as in .gitignore.
    """
    connect_kv()
    uploaded = require("ray._private.runtime_env.working_dir:upload_working_dir_if_needed")(
        {"working_dir": folder, "excludes": [*excludes]},
        include_gitignore=include_gitignore,
        scratch_dir=require("ray._private.worker:global_worker.node.get_runtime_env_dir_path")(),
    )
    return str(uploaded["working_dir"])


@contextlib.contextmanager
def few_processes_in_own_sessions() -> Iterator[None]:
    """Make ray.init start only the processes that a single program needs, each in a new session.

    This applies inside the block. `timeout`, a shell or a batch system sends SIGTERM to the whole
    process group. If that ended the GCS, every call of Ray would wait for a minute, and Ray would
    then abort this process.
    """
    with contextlib.ExitStack() as stack:
        if popen := find_part(POPEN):
            stack.enter_context(replaced(POPEN, functools.partial(popen, start_new_session=True)))
        for path in NOT_NEEDED:
            stack.enter_context(replaced(path, lambda self, **_: None))
        yield


@contextlib.contextmanager
def replaced(path: str, value: Any) -> Iterator[None]:
    """Give the part at a path another value while the block runs, if this Ray has the part."""
    if (original := find_part(path)) is None:
        yield
        return
    replace(path, value)
    try:
        yield
    finally:
        replace(path, original)


def replace(path: str, value: Any) -> None:
    """Give the part at a path, which this Ray has, another value."""
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    setattr(functools.reduce(getattr, owners, importlib.import_module(module)), name, value)


@contextlib.contextmanager
def killed_on_shutdown() -> Iterator[None]:
    """Make ray.shutdown() kill the processes that this program started, inside the block.

    By default Ray ends them one after the other and waits for each: more than a second, when Ctrl-C
    allows two.
    """
    kill = find_part(KILL)

    def kill_at_once(node: Any, **how: Any) -> None:
        if "allow_graceful" in how:
            how["allow_graceful"] = False
        kill(node, **how)

    with replaced(KILL, kill_at_once):
        yield


def quiet_loggers() -> None:
    """Silence two warnings of ray.init.

    One tells how to switch off its token, without which others could run programs here. The other
    is that it installs no SIGTERM handler in a thread; raydist has its own.
    """
    for name in (TOKEN_SETUP, "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.ERROR)


def refused_token(message: str) -> bool:
    """Report whether an AuthenticationError with this message is due to a wrong token.

    The alternative is a missing token.
    """
    wrong = find_part(WRONG_TOKEN)
    return bool(wrong) and wrong in message


def load_auth_token() -> None:
    """Use this user's token for clusters from now on, if the user has one.

    Ray's own commands do the same.
    """
    require(f"{TOKEN_SETUP}:maybe_enable_token_auth_if_token_available")(warn_if_disabled=False)


@contextlib.contextmanager
def grpc_channel(address: str) -> Iterator[Any]:
    """Open a gRPC channel to the GCS, or to the raylet, at host:port.

    Ray's own GCS client ends the whole process if the GCS is gone.
    """
    channel = require("ray._private.grpc_utils:init_grpc_channel")(address)
    try:
        yield channel
    finally:
        channel.close()


def check_alive(address: str, timeout: float) -> None:
    """Ask the GCS at host:port whether it is alive; grpc.RpcError if it does not answer."""
    with grpc_channel(address) as channel:
        _check_alive(channel, timeout)


def _check_alive(channel: Any, timeout: float) -> None:
    stub = require(f"{STUBS}:NodeInfoGcsServiceStub")(channel)
    stub.CheckAlive(require(f"{MESSAGES}:CheckAliveRequest")(), timeout=timeout)


def needs_no_token(address: str, timeout: float) -> bool:
    """Return whether the GCS at host:port answers without a token, though this process has one."""
    import grpc

    enabled = find_part(USES_TOKENS)
    if enabled is None or not enabled() or os.environ.get("RAY_USE_TLS", "0") in ("1", "true"):
        return False
    with contextlib.closing(grpc.insecure_channel(address)) as channel:
        try:
            _check_alive(channel, timeout)
        except grpc.RpcError:
            return False
        return True


def prestart_workers(address: str, number: int, keep_s: float, timeout: float) -> None:
    """Make the raylet at host:port start this number of workers.

    The next actor without a runtime_env, whichever it is, can use them. The raylet ends those that
    nobody has used within `keep_s` seconds. grpc.RpcError if it does not answer.
    """
    request, stub = map(find_part, PRESTART)
    if request is None or stub is None:
        return
    with grpc_channel(address) as channel:
        stub(channel).PrestartWorkers(
            request(num_workers=number, keep_alive_duration_secs=int(keep_s)), timeout=timeout
        )


def skip_serializers() -> None:
    """Keep Ray from importing pydantic and pyarrow into this process.

    The process sends and receives only raydist's messages. Ray imports them before the first
    message, in case it contains their objects: 0.08 s each, in driver and actor.
    """
    if find_part(SERIALIZERS) is not None:
        replace(SERIALIZERS, lambda context: None)


def submission_id() -> str:
    """Return the id under which this program was submitted to Ray as a job; empty if it was not."""
    try:
        return str(
            json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]["job_submission_id"]
        )
    except (KeyError, ValueError, TypeError):
        return ""


def change_job_entry(
    address: str, id: str, change: Callable[[bytes], bytes | None], timeout: float
) -> None:
    """Read the entry of a submitted job from the GCS at host:port; write back `change`'s result.

    `change`: JSON bytes -> JSON bytes, or None to write nothing. Raises grpc.RpcError, and
    LaunchError if this Ray stores its jobs in another way.
    """
    key = (
        require("ray.dashboard.modules.job.common:JobInfoStorageClient")
        .JOB_DATA_KEY.format(job_id=id)
        .encode()
    )
    entry = {"key": key, "namespace": require("ray._private.ray_constants:KV_NAMESPACE_JOB")}
    with grpc_channel(address) as channel:
        store = require(f"{STUBS}:InternalKVGcsServiceStub")(channel)
        reply = store.InternalKVGet(
            require(f"{MESSAGES}:InternalKVGetRequest")(**entry), timeout=timeout
        )
        if (changed := change(reply.value)) is not None:
            request = require(f"{MESSAGES}:InternalKVPutRequest")(
                **entry, value=changed, overwrite=True
            )
            store.InternalKVPut(request, timeout=timeout)


def connect_kv() -> None:
    """Connect this process to the GCS's store, as ray.init does.

    This is needed if an earlier Cluster of this process has ended and cut the connection.
    """
    if not require("ray.experimental.internal_kv:_internal_kv_initialized")():
        require("ray.experimental.internal_kv:_initialize_internal_kv")(require(GCS_CLIENT))


def internal_kv(key: str, namespace: str | None = None) -> bytes | None:
    """Return the value of a key in the GCS's store; None if it has none."""
    connect_kv()
    value: bytes | None = require("ray.experimental.internal_kv:_internal_kv_get")(
        key, namespace=namespace
    )
    return value


def has_store() -> bool:
    """Return whether this Ray has all that the queue needs of the GCS."""
    return all(find_part(path) is not None for path in STORE)


def kv_put(key: str, value: bytes, overwrite: bool = True) -> None:
    """Write raydist's value of this key into the GCS's store.

    Not `overwrite`: unless it has one.
    """
    _gcs_method("internal_kv_put")(key.encode(), value, overwrite, KV_NAMESPACE, KV_S)


def kv_get(key: str) -> bytes | None:
    """Return raydist's value of this key in the GCS's store; None if it has none."""
    value: bytes | None = _gcs_method("internal_kv_get")(key.encode(), KV_NAMESPACE, KV_S)
    return value


def kv_delete(key: str) -> None:
    """Remove raydist's value of this key from the GCS's store, if it has one."""
    _gcs_method("internal_kv_del")(key.encode(), False, KV_NAMESPACE, KV_S)


def kv_values(prefix: str) -> dict[str, bytes]:
    """Return raydist's keys in the GCS's store that begin so, with their values."""
    keys = _gcs_method("internal_kv_keys")(prefix.encode(), KV_NAMESPACE, KV_S)
    found: dict[bytes, bytes] = _gcs_method("internal_kv_multi_get")(keys, KV_NAMESPACE, KV_S)
    return {key.decode(): value for key, value in found.items()}


def dead_jobs() -> set[str]:
    """Return the ids of the Ray jobs whose driver has ended, according to the GCS."""
    jobs = _gcs_method("get_all_job_info")(
        skip_submission_job_info_field=True, skip_is_running_tasks_field=True, timeout=KV_S
    )
    return {id.hex() for id, job in jobs.items() if job.is_dead}


def _gcs_method(name: str) -> Any:
    """Return a method of this process's client of the GCS.

    ConnectionError: ray.shutdown() has removed the client. LaunchError: this Ray's has no such
    method.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("this process is not connected to Ray")
    return require(f"{GCS_CLIENT}.{name}")
