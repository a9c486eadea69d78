"""A real fork server, with messages over its socket as an agent sends them."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import psutil
import pytest

import raydist
from raydist.messages.server import (
    Ended,
    Failed,
    Forked,
    GetNewestState,
    ImportModules,
    NewestState,
    OpenStore,
    Ping,
    Pong,
    ProgramSpec,
    RankSpec,
    ServerMessage,
    SignalProcess,
    StoreOpened,
    Warm,
    WriteCheckpoint,
)
from raydist.messages.wire import PACKET, decode, encode, numbered, split_number
from raydist.messages.writer import (
    CommitShards,
    DropShards,
    ListShards,
    ReadRandomStates,
    WriterDone,
)
from raydist.node import fork_launcher, kept_server
from raydist.node.fork_client import ForkClient
from raydist.node.fork_launcher import ForkServer
from raydist.node.warm_imports import ends_with, uses_gpu
from raydist.settings.config import Job, as_dict
from raydist.state import checkpoint_files
from raydist.state.snapshot_layout import LAST_SLOT
from raydist.worker.heartbeat import BEAT_PAGE, read_beat
from tests.leftovers import alive, ended
from tests.node.test_huge_pages import can_collapse, huge_of
from tests.waiting import wait_until

Kind = TypeVar("Kind")
GATED = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)"
"""A module that is imported once a file is there."""
UNDYING = """
import os
from raydist.node import agent_server as server
server.WRITE_S = server.END_S = 0.2
os.kill = os.killpg = lambda pid, number: None
"""
"""A module with which SIGKILL ends no child of the server, as in state D of the kernel."""
FOREIGN = """
import os
kill, killpg = os.kill, os.killpg
def permitted(function):
    def signal(pid, number):
        if os.path.exists({!r}):
            raise PermissionError(1, "Operation not permitted")
        function(pid, number)
    return signal
os.kill, os.killpg = permitted(os.kill), permitted(os.killpg)
"""
"""A module with which no process may be signalled once a file is there, as one of `sudo`."""


class Node:
    """A fork server in a separate folder."""

    def __init__(
        self, folder: Path, start: str = "fork", modules: tuple[str, ...] = ("json",)
    ) -> None:
        self.folder = folder
        self.server = ForkServer.launch(folder, start, 1, modules=modules)

    def dial(self) -> Line:
        return Line(self.folder)

    def close(self) -> None:
        """Let go, and return when the server is gone."""
        assert self.server.end()


class Line:
    """An agent's connection."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        self.socket.connect(str(folder / "fork"))
        self.warm = self.imported()

    def imported(self, *modules: str) -> Warm:
        """Return the reply of the server once it has imported these."""
        self.send(ImportModules(modules))
        return self.receive(Warm)

    def receive(self, kind: type[Kind]) -> Kind:
        """Return the next message, which must be of this kind."""
        message = decode(self.socket.recv(PACKET))
        assert isinstance(message, kind), message
        return message

    def send(self, message: ServerMessage, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [encode(message)], fds)

    def open_store(self, address: str) -> tuple[int, StoreOpened]:
        """Open a store on this address; return the pid of its process and its reply."""
        ours, its = socket.socketpair()
        self.send(OpenStore("tcp", address), (its.fileno(),))
        its.close()
        pid = self.receive(Forked).pid
        with ours:
            opened = decode(ours.recv(PACKET))
        assert isinstance(opened, StoreOpened)
        return pid, opened

    def fork(
        self, function: Callable[[], Any], rank: int = 0, env: dict[str, str] | None = None
    ) -> int:
        """Fork a rank that calls `function` outside any process group (backend `here`); return its
        pid."""
        base = self.folder / f"rank-{rank}"
        (self.folder / f"rank-{rank}.call").write_bytes(cloudpickle.dumps((function, (), {})))
        beat = os.open(f"{base}.beat", os.O_RDWR | os.O_CREAT)
        os.ftruncate(beat, BEAT_PAGE)
        self.beat = mmap.mmap(beat, BEAT_PAGE)
        log = os.open(f"{base}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self.events, its = socket.socketpair()
        job = as_dict(Job())
        job["backend"]["name"] = "gloo"
        spec = RankSpec(
            rank=rank, job=json.dumps(job), cwd=str(self.folder), sys_path=tuple(sys.path), argv=("x",),
            env={**os.environ, "OMP_NUM_THREADS": "1", "MARK": "mine", **(env or {})},
            script="", call=f"{base}.call", value=f"{base}.value",
        )  # fmt: skip
        self.send(spec, (log, its.fileno(), beat))
        for descriptor in (log, beat):
            os.close(descriptor)
        its.close()
        return self.receive(Forked).pid

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text(errors="replace")

    def value(self, rank: int = 0) -> Any:
        return cloudpickle.loads((self.folder / f"rank-{rank}.value").read_bytes())


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A server with torch in it, for all tests that do not end it."""
    node = Node(
        tmp_path_factory.mktemp("node") / "f",
        modules=("torch", "raydist.worker.backends.ddp", "cloudpickle"),
    )
    yield node
    node.close()


# A rank from its fork to its end


def test_a_rank_has_its_environment_folder_log_and_main_thread(warm: Node) -> None:
    def job() -> tuple[Any, ...]:
        import threading

        import torch

        print("out")
        print("err", file=sys.stderr)
        here = threading.current_thread() is threading.main_thread()
        return (
            os.environ["MARK"],
            os.getcwd(),
            sys.argv,
            here,
            torch.get_num_threads(),
            os.getsid(0) == os.getpid(),
        )

    line = warm.dial()
    pid = line.fork(job)
    ended = line.receive(Ended)
    assert (ended.pid, ended.code, ended.signal) == (pid, 0, 0)
    assert line.value() == ("mine", str(warm.folder), ["x"], True, 1, True)
    assert line.log().endswith("out\nerr\n")  # torch 2.8's gloo prints before


def test_threads_of_each_level_of_nesting_can_be_set(warm: Node) -> None:
    def job() -> int:
        import torch

        return torch.get_num_threads()

    line = warm.dial()
    line.fork(job, env={"OMP_NUM_THREADS": "2,1"})
    assert line.receive(Ended).code == 0
    assert line.value() == 2


@pytest.mark.parametrize(
    ("how", "code", "number"),
    [("raise ValueError(1)", 1, 0), ("sys.exit(3)", 3, 0), ("sys.exit('no')", 1, 0), ("os._exit(7)", 7, 0),
     ("os.kill(os.getpid(), 9)", 0, 9), ("ctypes.string_at(0)", 0, 11), ("os.abort()", 0, 6)],
)  # fmt: skip
def test_every_kind_of_end_is_reported(warm: Node, how: str, code: int, number: int) -> None:
    def job() -> None:
        import ctypes

        exec(how, {"sys": sys, "os": os, "ctypes": ctypes})

    line = warm.dial()
    line.fork(job)
    ended = line.receive(Ended)
    assert (ended.code, ended.signal) == (code, number)


def test_a_crash_in_native_code_leaves_its_stack_in_the_log(warm: Node) -> None:
    def job() -> None:
        import ctypes

        ctypes.string_at(0)

    line = warm.dial()
    line.fork(job)
    line.receive(Ended)
    assert "Segmentation fault" in line.log()
    assert "string_at" in line.log()


def test_the_heartbeat_outlives_the_rank(warm: Node) -> None:
    def job() -> None:
        import raydist

        raydist.report(step=42)
        os.kill(os.getpid(), signal.SIGKILL)

    line = warm.dial()
    line.fork(job)
    line.receive(Ended)
    assert read_beat(line.beat)[0] == 42


def test_atexit_of_the_job_runs_and_that_of_the_server_does_not_break_it(warm: Node) -> None:
    def job() -> None:
        import atexit

        atexit.register(lambda: print("at exit"))

    line = warm.dial()
    line.fork(job)
    assert line.receive(Ended).code == 0
    assert line.log().endswith("at exit\n")


def test_a_value_for_which_the_disk_has_no_space_is_not_there(warm: Node) -> None:
    """A part of it stayed, and the driver of a run whose ranks had all finished failed."""

    def job() -> bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16,) * 2)
        return bytes(1 << 20)

    line = warm.dial()
    line.fork(job, rank=9)
    assert line.receive(Ended).code == 0
    written = {file.suffix for file in line.folder.glob("rank-9.value*")}
    assert written == {".end", ".stacks"}
    assert b"a bytes can't be written for the driver: " in line.events.recv(PACKET)


def test_children_of_a_dead_rank_end_with_it(warm: Node) -> None:
    def job() -> None:
        subprocess.Popen(["sleep", "300"])
        os.system("sleep 301 &")
        os.kill(os.getpid(), signal.SIGKILL)

    line = warm.dial()
    pid = line.fork(job)
    line.receive(Ended)
    wait_until(lambda: not [p for p in psutil.process_iter() if _session(p.pid) == pid])


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def test_an_agent_that_disconnects_ends_only_its_own_rank(warm: Node) -> None:
    one, other = warm.dial(), warm.dial()
    first, second = one.fork(lambda: time.sleep(300), 1), other.fork(lambda: time.sleep(300), 2)
    one.socket.close()
    wait_until(lambda: not alive(first))
    assert alive(second)
    other.socket.close()
    wait_until(lambda: not alive(second))


def test_the_server_disconnects_once_all_processes_of_an_agent_are_gone(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", modules=("raydist.worker.backends.ddp",))
    line = node.dial()

    def job() -> None:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        time.sleep(300)

    pid = line.fork(job)
    wait_until(lambda: len(psutil.Process(pid).children()) == 1)
    child = psutil.Process(pid).children()[0].pid
    line.socket.shutdown(socket.SHUT_WR)
    while line.socket.recv(PACKET):
        pass
    assert not alive(pid)
    assert not alive(child)
    node.dial()  # and is ready for the next
    node.close()


def memories_in(pid: int) -> list[str]:
    """Return the snapshot memories that a process has open."""
    open_files = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return sorted(name.split()[0] for name in open_files if "raydist-snapshot" in name)


def test_the_ranks_of_a_run_hold_no_memory_of_another(warm: Node, tmp_path: Path) -> None:
    """The memory of a finished trial of a sweep stayed taken while the others ran."""
    line, other = warm.dial(), warm.dial()
    other.folder = tmp_path
    first = line.fork(lambda: time.sleep(300))
    second = other.fork(lambda: time.sleep(300), rank=1, env={"LOCAL_RANK": "1"})
    store, _ = other.open_store("127.0.0.1")
    one, two = "/memfd:raydist-snapshot-0", "/memfd:raydist-snapshot-1"
    # A child closes what it has inherited after the server has reported it.
    wait_until(lambda: memories_in(second) == [one, two])
    assert (memories_in(first), memories_in(store)) == ([one], [])
    for each in (line, other):
        each.socket.close()
    wait_until(lambda: not alive(first) and not alive(second))


A_RUN_AFTER_ANOTHER = """
import socket
from pathlib import Path
from raydist.node.agent_server import AgentServer
from raydist.node.snapshots import SnapshotBuffers

server = AgentServer(socket.socket(), "fork")
for run in (Path("first"), Path("second")):
    agent, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.watch(agent, lambda: None)
    server.memories[agent] = SnapshotBuffers(run, run, agents={agent})
    server.disconnect(agent)
    server.reap()
    print(len(server.memories), end=" ")
"""


def test_a_server_that_is_kept_forgets_the_runs_that_are_over(tmp_path: Path) -> None:
    command = [sys.executable, "-c", A_RUN_AFTER_ANOTHER]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "0 0 ", done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_new_rank_can_be_ended_at_once(warm: Node, number: signal.Signals) -> None:
    for _ in range(
        20
    ):  # the server ignores SIGTERM, and a child that is a moment old is still like it
        line = warm.dial()
        pid = line.fork(lambda: time.sleep(300))
        line.send(SignalProcess(pid, number))
        assert line.receive(Ended).signal == number


def test_only_processes_of_the_agent_are_killed(warm: Node) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    line = warm.dial()
    line.send(SignalProcess(stranger.pid, signal.SIGKILL))
    line.fork(lambda: None)
    line.receive(Ended)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


# Stores and imports


def test_the_store_listens_on_its_address_only_and_is_held(warm: Node) -> None:
    line = warm.dial()
    pid, store = line.open_store("127.0.0.1")
    held = [
        c.laddr for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]
    assert held == [("127.0.0.1", store.port)]
    line.socket.close()
    wait_until(lambda: not alive(pid))


def test_the_error_of_a_store_that_can_not_listen(warm: Node) -> None:
    line = warm.dial()
    _, store = line.open_store("203.0.113.7")  # TEST-NET-3: no machine's own
    assert "Cannot assign requested address" in store.error


def test_the_server_never_touches_cuda_and_names_what_could_not_be_imported(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", modules=("raydist_no_such_module", "json"))
    line = node.dial()
    warm = line.imported("raydist_no_such_module", "json", "torch")
    assert warm.cuda is False
    assert list(warm.failed) == ["raydist_no_such_module"]
    assert not line.imported("json").failed  # what another run named is not this one's
    node.close()


def test_modules_are_imported_before_the_next_fork(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", modules=())
    line = node.dial()
    counts = []
    for name in ("colorsys", "chunk_that_is_not_there", "colorsys"):
        line.imported(name)
        line.fork(lambda: "colorsys" in sys.modules)
        line.receive(Ended)
        counts.append(line.value())
    assert counts == [True, True, True]
    node.close()


# What ends with the server


def test_everything_ends_with_the_lifeline_and_the_folder_is_gone(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", modules=("raydist.worker.backends.ddp",))
    line = node.dial()

    def job() -> None:
        subprocess.Popen(
            ["sleep", "300"], start_new_session=True
        )  # escapes its group and its session
        time.sleep(300)

    pid = line.fork(job)
    wait_until(lambda: len(psutil.Process(pid).children()) == 1)
    child = psutil.Process(pid).children()[0].pid
    node.close()
    assert not alive(pid)
    wait_until(lambda: not alive(child))
    assert not node.folder.exists()


def test_the_lifeline_ends_it_while_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raydist_slow_module.py").write_text("import time; time.sleep(300)")
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("raydist_slow_module",))
    node.close()
    assert not node.folder.exists()


def test_ranks_end_with_a_killed_server(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", modules=("raydist.worker.backends.ddp",))
    pid = node.dial().fork(lambda: time.sleep(300))
    psutil.Process(pid).parent().kill()
    wait_until(lambda: not alive(pid))


# Spawned ranks


def test_spawn_gives_a_fresh_interpreter(tmp_path: Path) -> None:
    node = Node(tmp_path / "f", start="spawn")

    def job() -> tuple[str, int]:
        return os.environ["MARK"], os.getppid()

    line = node.dial()
    line.fork(job)
    assert line.receive(Ended).code == 0
    mark, parent = line.value()
    assert mark == "mine"
    assert "raydist.node.fork_server" in psutil.Process(parent).cmdline()
    node.close()


def test_the_ends_of_spawned_ranks_are_reported_while_others_are_spawned(tmp_path: Path) -> None:
    """`subprocess` reaped a rank that had ended when the next one was spawned, and nobody was
    told."""
    node = Node(tmp_path / "f", start="spawn")
    lines = [node.dial() for _ in range(4)]
    pids = [
        line.fork(lambda: None, rank, {"PYTHONHASHSEED": "wrong"})
        for rank, line in enumerate(lines)
    ]
    assert [line.receive(Ended).pid for line in lines] == pids
    node.close()


def test_a_spawned_rank_ends_with_a_server_that_dies_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked to end with its parent only after its imports."""
    begun = tmp_path / "begun"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        f"if 'raydist.worker.main' in sys.orig_argv: open({str(begun)!r}, 'w').close(); "
        "time.sleep(300)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", start="spawn")
    line = node.dial()
    pid = line.fork(lambda: None)
    wait_until(begun.exists, timeout=60)
    os.kill(line.warm.pid, signal.SIGKILL)
    assert ended(pid)


def test_a_child_whose_parent_has_ended_before_it_could_ask_ends_too() -> None:
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            "from raydist.worker.main import *; die_with_parent(os.getpid()); print('on')",
        ]
    )
    assert child.returncode == 1


# Hanging kernels, full queues, dead servers


def test_a_process_that_the_kernel_cannot_end_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raydist_undying.py").write_text(UNDYING)
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("raydist_undying", "raydist.worker.backends.ddp"))
    line = node.dial()
    pid = line.fork(lambda: time.sleep(300))
    node.close()
    assert not node.folder.exists()
    assert ended(pid)


def test_a_process_of_another_user_ends_neither_the_server_nor_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo` in a rank, or by `raydist exec`: it ended the server, and with it all ranks of the
    node."""
    foreign = tmp_path / "foreign"
    (tmp_path / "raydist_foreign.py").write_text(FOREIGN.format(str(foreign)))
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("raydist_foreign", "raydist.worker.backends.ddp"))
    line, other = node.dial(), node.dial()

    def job() -> int:
        left = subprocess.Popen(["sleep", "300"])
        foreign.touch()
        return left.pid

    line.fork(job)
    assert line.receive(Ended).code == 0
    left = line.value()
    command = other.fork(lambda: time.sleep(300), 1)
    other.socket.shutdown(socket.SHUT_WR)
    assert other.socket.recv(PACKET) == b""  # the agent of the command does not wait for its end
    line.send(Ping())
    line.receive(Pong)
    node.close()
    os.kill(left, signal.SIGKILL)
    assert ended(command)


def save_in_a_rank(line: Any, folder: Path) -> None:
    """Start a rank that saves step 7 below this folder and continues; wait until it has told its
    agent."""

    def job() -> None:
        raydist.checkpoint.save(7, {"step": 7})
        time.sleep(300)

    line.fork(job, env={"RANK": "0", "RAYDIST_CHECKPOINTS": str(folder)})
    while b'"save"' not in (message := line.events.recv(PACKET)):
        assert message, line.log()


def test_the_last_state_is_written_where_the_kernel_refuses_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the server, and the state was lost with it."""
    (tmp_path / "raydist_full.py").write_text(
        "import os\n"
        "fork = os.fork\n"
        "def refused():\n"
        f"    if os.path.exists({str(tmp_path / 'full')!r}): raise BlockingIOError(11, 'Resource "
        "unavailable')\n"
        "    return fork()\n"
        "os.fork = refused\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(
        tmp_path / "f",
        modules=("raydist_full", "torch", "raydist.worker.backends.ddp", "cloudpickle"),
    )
    line = node.dial()
    save_in_a_rank(line, tmp_path)
    (tmp_path / "full").touch()
    line.socket.close()
    node.close()
    assert checkpoint_files.newest_step(tmp_path) == 7


def test_an_agent_waits_where_the_queue_of_the_server_is_full(tmp_path: Path) -> None:
    """The kernel may hold no more than 128 that connect while a server imports modules."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "fork"))
    listener.listen(0)

    async def main() -> bool:
        first = await ForkClient.connect(tmp_path)
        waiting = [asyncio.create_task(ForkClient.connect(tmp_path)) for _ in range(2)]
        accepted = [await asyncio.to_thread(listener.accept) for _ in range(3)]
        others = await asyncio.gather(*waiting)
        connected = all(client.connected for client in (first, *others))
        for sock, _ in accepted:
            sock.close()
        for client in (first, *others):
            await client.close()
        return connected

    assert asyncio.run(main())
    listener.close()


def test_a_server_that_has_died_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydist.node.fork_client.REFUSED_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "fork"))
    (tmp_path / "server.log").write_text("Fatal Python error: Segmentation fault\n")
    with pytest.raises(OSError, match="the fork server of this node ended: Fatal Python error"):
        asyncio.run(ForkClient.connect(tmp_path))


# Messages


def test_a_message_larger_than_a_packet_goes_by_a_file(warm: Node) -> None:
    """The environment of a rank may take more: it ended the server, and with it all ranks of the
    node."""
    large = "x" * (3 * PACKET)

    async def main() -> tuple[Any, ...]:
        client = await ForkClient.connect(warm.folder)
        await client.ask(ImportModules(()), Warm)
        log = os.open(os.devnull, os.O_WRONLY)
        program = ProgramSpec(
            ("/bin/sh", "-c", "test ${#LARGE} = 120000"),
            {"LARGE": large[:120_000], "A": large},
            "/",
        )
        del program.env["A"]
        program.env.update({f"V{number}": large[:1000] for number in range(500)})
        _, ended = await client.fork(program, [log])
        end = await ended
        os.close(log)
        await client.close()
        return end.code, end.signal

    assert asyncio.run(main()) == (0, 0)


def test_what_the_server_cannot_do_is_answered_and_ends_nothing(warm: Node) -> None:
    line, other = warm.dial(), warm.dial()
    line.socket.send(b"no message")
    assert "JSONDecodeError" in line.receive(Failed).error
    line.socket.send(b"{" + b" " * PACKET + b"}")
    assert "cut off" in line.receive(Failed).error
    pid, store = line.open_store("no address")
    assert store.error
    assert line.receive(Ended).pid == pid
    line.send(
        RankSpec(0, {}, "", (), "", "", (), str(warm.folder / "x"))
    )  # without its descriptors
    assert "needs a log" in line.receive(Failed).error
    assert other.fork(lambda: 7)
    assert other.receive(Ended).code == 0
    assert other.value() == 7


@pytest.mark.parametrize(
    "sent",
    [
        WriteCheckpoint(),
        ListShards(),
        ReadRandomStates(1, 1),
        CommitShards(1, "mark", 1, {}, 1, None),
        DropShards(1, "mark"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_agent_that_has_forked_no_rank_has_nothing_to_write(
    warm: Node, sent: ServerMessage
) -> None:
    """It ended the server, and with it the ranks of all other agents."""
    line = warm.dial()
    ours, its = socket.socketpair()
    with ours:
        line.send(sent, (its.fileno(),))
        its.close()
        assert ours.recv(PACKET) == b""
    line.imported()
    assert line.fork(lambda: 7)
    assert line.receive(Ended).code == 0


# The newest state and its checkpoint


def test_ranks_are_ended_while_the_file_server_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server listed the checkpoints itself."""
    os.mkfifo(tmp_path / "hangs")
    (tmp_path / "raydist_hanging.py").write_text(
        "from raydist.state import checkpoint_files\n"
        f"checkpoint_files.is_saved = lambda folder, step: "
        f"bool(open({str(tmp_path / 'hangs')!r}).read())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(
        tmp_path / "f",
        modules=("raydist_hanging", "torch", "raydist.worker.backends.ddp", "cloudpickle"),
    )
    line = node.dial()

    def job() -> None:
        import torch

        from raydist.worker.checkpoint import own_memory, save_request

        memory = own_memory()
        assert memory is not None
        memory.fill_request(LAST_SLOT, save_request(1, {}))
        memory.write(1, {"own": {"loss": 0.5, "random": torch.zeros(1)}, "model": {}})
        Path("kept").touch()
        time.sleep(300)

    pid = line.fork(job)
    wait_until(lambda: (node.folder / "kept").exists(), line.log, timeout=60)
    mine, its = socket.socketpair()
    line.send(WriteCheckpoint(), (its.fileno(),))
    its.close()
    line.send(SignalProcess(pid, signal.SIGKILL))
    assert line.receive(Ended).signal == signal.SIGKILL
    wait_until(lambda: answered(tmp_path / "hangs"))  # the writer waits for it
    assert decode(mine.recv(PACKET)) == WriterDone()  # it is saved already
    node.close()


def test_a_checkpoint_that_the_agent_did_not_pass_on_is_written_when_it_is_gone(
    tmp_path: Path,
) -> None:
    """A stopped agent, or one that is killed at this moment, left it in memory, and it went with
    the run."""
    node = Node(tmp_path / "f", modules=("torch", "raydist.worker.backends.ddp", "cloudpickle"))
    line = node.dial()
    save_in_a_rank(line, tmp_path)
    held = [
        kept_server.ask(node.folder, GetNewestState(str(run))) for run in (node.folder, tmp_path)
    ]
    assert held == [NewestState(7), NewestState(-1)]  # another run has none
    line.socket.close()
    wait_until(lambda: checkpoint_files.newest_step(tmp_path) == 7, line.log, timeout=60)
    node.close()


SLOW_WRITER = """
import time
from raydist.node import agent_server as server, snapshots
server.WRITE_S, server.PROGRESS_S = 3.0, 0.1
write = snapshots.write_checkpoint
def write_slowly(*given):
    with open({!r}, "wb", buffering=0) as file:
        for _ in range(20):
            time.sleep(0.2)
            file.write(b"a block")
    return write(*given)
snapshots.write_checkpoint = write_slowly
"""
"""A module with which a state takes longer to write than a server waits without progress."""
WAITING_WRITER = """
from raydist.node import snapshots
write = snapshots.write_checkpoint
def write_late(*given):
    open({!r}).read()
    return write(*given)
snapshots.write_checkpoint = write_late
"""
"""A module with which a state is written once something can be read from a FIFO."""


def end_with_state_in_memory(folder: Path, writer: str) -> tuple[Node, bool]:
    """End a server that has an unwritten state, in which this module is imported; what `end`
    returned."""
    (folder / "raydist_writer.py").write_text(writer)
    modules = ("raydist_writer", "torch", "raydist.worker.backends.ddp", "cloudpickle")
    node = Node(folder / "f", modules=modules)
    save_in_a_rank(node.dial(), folder)
    return node, node.server.end()


def test_a_large_state_is_waited_for_while_its_writing_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_launcher, "END_S", 3.0)
    monkeypatch.syspath_prepend(tmp_path)
    _, ended_in_time = end_with_state_in_memory(
        tmp_path, SLOW_WRITER.format(str(tmp_path / "blocks"))
    )
    assert ended_in_time
    assert checkpoint_files.newest_step(tmp_path) == 7


def test_a_state_whose_writing_makes_no_progress_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_launcher, "END_S", 1.0)
    monkeypatch.syspath_prepend(tmp_path)
    os.mkfifo(tmp_path / "later")
    node, ended_in_time = end_with_state_in_memory(
        tmp_path, WAITING_WRITER.format(str(tmp_path / "later"))
    )
    assert not ended_in_time
    assert checkpoint_files.newest_step(tmp_path) == -1
    wait_until(lambda: answered(tmp_path / "later"))  # the server goes on by itself
    wait_until(lambda: not node.folder.exists(), "the end of the server", timeout=60)
    assert checkpoint_files.newest_step(tmp_path) == 7


def answered(fifo: Path) -> bool:
    """Return whether a process waits for this FIFO, which then gets 5 bytes."""
    try:
        descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(descriptor, b"later")
    os.close(descriptor)
    return True


# Several agents


def test_a_process_of_another_agent_gets_no_signal(warm: Node) -> None:
    line, other = warm.dial(), warm.dial()
    pid = line.fork(lambda: time.sleep(60))
    other.send(SignalProcess(pid, signal.SIGKILL))
    other.imported()
    assert alive(pid)
    line.send(SignalProcess(pid, signal.SIGKILL))
    assert line.receive(Ended).signal == signal.SIGKILL


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    """With a small pid_max the kernel gives a rank the pid of an old checkpoint writer within
    hours."""
    path = tmp_path / "fork"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    async def main() -> list[tuple[int, int, int]]:
        client = await ForkClient.connect(tmp_path)
        server, _ = listener.accept()
        processes = []
        for serial in range(1, 6):
            server.send(encode(Ended(77, 0, 0, 1.0)))  # a writer's, which nobody waits for
            server.send(b"what?")
            forking = asyncio.create_task(client.fork(ProgramSpec((), {}, "/"), []))
            number, _ = split_number(await asyncio.to_thread(server.recv, PACKET))
            server.send(numbered(number, encode(Forked(77, serial))))
            if serial % 2:
                server.send(encode(Ended(77, serial, 0, 1.0, serial)))
            pid, ended = await forking
            if not serial % 2:
                server.send(encode(Ended(77, serial, 0, 1.0, serial)))
            end = await asyncio.wait_for(ended, 5)
            processes.append((pid, end.code, len(client._ends) + len(client._began)))
        server.close()
        await client.close()
        return processes

    assert asyncio.run(main()) == [(77, serial, 0) for serial in range(1, 6)]
    listener.close()


def test_a_rank_has_the_oom_score_of_its_agent(warm: Node) -> None:
    """Ray raises that of its workers: the kernel is to end ranks first. The driver's own is
    lower."""
    own = Path("/proc/self/oom_score_adj")
    before = int(own.read_text())
    own.write_text("900")
    try:
        line = warm.dial()
        line.fork(lambda: int(Path("/proc/self/oom_score_adj").read_text()))
        assert line.receive(Ended).code == 0
    finally:
        own.write_text(str(before))
    assert line.value() == 900


def test_an_import_that_fails_leaves_no_handler_that_ends_the_server(warm: Node) -> None:
    """The end of the lifeline would have ended it later, without the last state."""
    ours, its = socket.socketpair()
    before = signal.getsignal(signal.SIGIO), fcntl.fcntl(its, fcntl.F_GETFL)
    with pytest.raises(RuntimeError), ends_with(its.fileno(), ()):
        raise RuntimeError
    assert (signal.getsignal(signal.SIGIO), fcntl.fcntl(its, fcntl.F_GETFL)) == before
    ours.close()
    its.close()


def test_a_reply_belongs_to_its_request_whatever_the_order(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "fork"))
    listener.listen()

    async def main() -> list[Any]:
        client = await ForkClient.connect(tmp_path)
        server, _ = listener.accept()
        asking = [
            asyncio.create_task(client.ask(ImportModules((name,)), Warm))
            for name in ("a", "b", "c", "d")
        ]
        numbers = {}
        for _ in asking:
            number, packet = split_number(await asyncio.to_thread(server.recv, PACKET))
            message = decode(packet)
            assert isinstance(message, ImportModules)
            numbers[message.modules[0]] = number
        asking[1].cancel()  # nobody takes its reply
        await asyncio.sleep(0)
        for name in ("d", "b", "c"):
            server.send(numbered(numbers[name], encode(Warm({name: "no"}))))
        server.close()
        replies = await asyncio.gather(*asking, return_exceptions=True)
        await client.close()
        return [each.failed if isinstance(each, Warm) else type(each) for each in replies]

    assert asyncio.run(main()) == [OSError, asyncio.CancelledError, {"c": "no"}, {"d": "no"}]
    listener.close()


def test_a_server_that_imports_for_another_agent_is_not_taken_for_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stopped its rank meanwhile killed the server, and with it the ranks of all
    other trials."""
    gate = tmp_path / "gate"
    (tmp_path / "raydist_gated.py").write_text(GATED.format(str(gate)))
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f")

    async def main() -> tuple[float, bool]:
        client = await ForkClient.connect(node.folder)
        await client.ask(ImportModules(()), Warm)
        line = await asyncio.to_thread(node.dial)
        line.send(ImportModules(("raydist_gated",)))
        while client._busy_since is None:
            await asyncio.sleep(0.01)
        client.quiet(0.0)
        await asyncio.sleep(0.05)
        quiet = client.quiet(0.0)
        gate.touch()
        await asyncio.to_thread(line.receive, Warm)
        await client.ask(ImportModules(()), Warm)
        answers = client._busy_since is None
        await client.close()
        return quiet, answers

    assert asyncio.run(asyncio.wait_for(main(), 60)) == (0.0, True)
    node.close()


def test_others_are_served_while_a_store_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "raydist_late_store.py").write_text(
        "from raydist.node import rendezvous\n"
        "def open_store(address):\n    " + GATED.format(str(gate)).replace("\n", "\n    ") + "\n"
        "    raise OSError('late')\n"
        "rendezvous.open_store = open_store\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("raydist_late_store",))
    line, other = node.dial(), node.dial()
    ours, its = socket.socketpair()
    line.send(OpenStore("tcp", "127.0.0.1"), (its.fileno(),))
    its.close()
    pid = line.receive(Forked).pid
    assert not other.imported("json").failed
    gate.touch()
    assert decode(ours.recv(PACKET)) == StoreOpened(error="OSError: late")
    ours.close()
    assert line.receive(Ended).pid == pid
    node.close()


# GPUs, memory, MPI


def test_a_server_that_has_used_a_gpu_is_found_out_though_torch_says_no(tmp_path: Path) -> None:
    for number, target in enumerate(("/dev/null", "/dev/nvidiactl", "socket:[1]")):
        (tmp_path / str(number)).symlink_to(target)
    assert not uses_gpu(tmp_path)
    (tmp_path / "9").symlink_to("/dev/nvidia-uvm")
    assert uses_gpu(tmp_path)


def test_a_server_that_has_used_a_gpu_spawns_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison.py").write_text(
        "import raydist.node.warm_imports as w, os, torch\n"
        "w.GPU_DRIVERS = (os.readlink('/proc/self/fd/0'),)\n"
        "assert os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] == '1'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("cloudpickle",))
    line = node.dial()
    assert not line.warm.cuda
    warm = line.imported("poison")
    assert (warm.cuda, dict(warm.failed)) == (True, {})
    pid = line.fork(lambda: (os.getppid(), "poison" in sys.modules))
    assert line.receive(Ended) == Ended(pid, 0, 0, unittest.mock.ANY, unittest.mock.ANY)
    assert not line.value()[1]
    node.close()


RANK_ZERO = """
from os import environ
rank = int(environ.get("LOCAL_RANK", environ.get("RANK", 0)))
"""


def test_a_package_that_reads_its_rank_at_import_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning's rank_zero_only: each rank was rank 0. The first server finds it out, and has
    its ranks import everything; the next one forks them without this package."""
    (tmp_path / "lit").mkdir()
    (tmp_path / "lit/__init__.py").write_text("from lit import ranks")
    (tmp_path / "lit/ranks.py").write_text(RANK_ZERO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def see() -> tuple[int, bool]:
        os.environ["LOCAL_RANK"] = "3"
        forked = "raydist.node.warm_imports" in sys.modules
        return importlib.import_module("lit").ranks.rank, forked

    for number, (readers, forked) in enumerate(((["lit"], False), ([], True), ([], True))):
        node = Node(tmp_path / str(number), modules=("cloudpickle",))
        line = node.dial()
        warm = line.imported("lit", "lit:ranks")
        assert (list(warm.rank_readers), dict(warm.failed)) == (readers, {})
        # the driver's server was asked by the driver first, which does not read the answer
        assert list(line.imported("lit", "lit:ranks").rank_readers) == readers
        line.fork(see)
        assert line.receive(Ended).code == 0
        assert line.value() == (3, forked)
        node.close()
    later = 2 * 10**9
    os.utime(tmp_path / "lit/__init__.py", (later, later))  # another version of it
    node = Node(tmp_path / "again", modules=("cloudpickle",))
    assert list(node.dial().imported("lit").rank_readers) == ["lit"]
    node.close()


@can_collapse
def test_its_memory_is_in_huge_pages_once_it_has_no_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forks are faster. A child that shares the memory would keep the old pages."""
    (tmp_path / "large.py").write_text("block = [*range(10**6)]")
    monkeypatch.syspath_prepend(tmp_path)
    node = Node(tmp_path / "f", modules=("large",))
    line = node.dial()
    stays, ends = line.fork(lambda: time.sleep(60)), line.fork(lambda: None, rank=1)
    assert line.receive(Ended).pid == ends
    assert huge_of(line.warm.pid) == 0
    line.send(SignalProcess(stays, signal.SIGKILL))
    assert line.receive(Ended).pid == stays
    wait_until(lambda: huge_of(line.warm.pid) > 20 * 2**20)
    line.fork(lambda: sys.modules["large"].block[-1])
    assert line.receive(Ended).code == 0
    assert line.value() == 10**6 - 1
    node.close()


def test_ranks_find_done_what_each_would_do_and_do_not_tidy_up(tmp_path: Path) -> None:
    """torch deregisters its operators at exit, for 0.1 s of CPU in each rank."""

    def look() -> tuple[bool, set[bool]]:
        operators = {
            each.atexit
            for each in weakref.finalize._registry  # type: ignore[attr-defined]
            if each.peek()[1].__module__ == "torch.library"
        }
        return "raydist.worker.step_timer" in sys.modules, operators

    node = Node(tmp_path / "f", modules=("torch",))
    line = node.dial()
    pid = line.fork(look)
    assert line.receive(Ended) == Ended(pid, 0, 0, unittest.mock.ANY, unittest.mock.ANY)
    assert line.value() == (True, {False})
    node.close()


def test_ctrl_c_reaches_a_program_though_a_ray_worker_blocks_sigint(tmp_path: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        node = Node(tmp_path / "f")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    line = node.dial()
    with (tmp_path / "log").open("w") as log:
        interrupted = ("sh", "-c", "kill -INT $$; exit 3")
        line.send(ProgramSpec(interrupted, {"PATH": os.environ["PATH"]}, "/"), (log.fileno(),))
    line.receive(Forked)
    assert line.receive(Ended).signal == signal.SIGINT
    node.close()


@pytest.mark.parametrize("mpi", [False, True])
def test_segments_of_mpi_are_removed_only_after_a_program_of_mpi(tmp_path: Path, mpi: bool) -> None:
    """Another container with the same /dev/shm has processes that map them, and that are not in
    this /proc."""
    node = Node(tmp_path / "f")
    line = node.dial()
    if mpi:
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        line.send(ProgramSpec(("true",), {"PATH": os.environ["PATH"]}, "/"), (log,))
        os.close(log)
        line.receive(Forked)
        line.receive(Ended)
    segment = Path(f"/dev/shm/sm_segment.{os.urandom(4).hex()}.0.1")
    try:
        segment.touch()
        node.close()
        assert segment.exists() is not mpi
    finally:
        segment.unlink(missing_ok=True)
