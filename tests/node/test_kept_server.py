"""Fork servers that stay: claimed, refused, found again, and gone when nobody wants them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raydist.messages.agent import Open, WarmServer
from raydist.messages.server import BeginRun, Busy, Claim, ImportModules, Pong, Warm
from raydist.messages.wire import PACKET, decode, encode
from raydist.node import kept_server, left_folders, recorded_end
from raydist.node.fork_client import ForkClient
from raydist.node.fork_launcher import ForkServer, heritage
from raydist.node.kept_server import KeptServer
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.own_path import boot_id
from tests.leftovers import ended
from tests.node import test_fork_server
from tests.waiting import wait_until

OWNER = """
import socket, time
from raydist.node import kept_server
from raydist.messages.server import ImportModules
from raydist.messages.wire import encode

server = kept_server.obtain(1, {}, 60)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
    sock.connect(str(server.folder / "fork"))
    sock.send(encode(ImportModules(())))
    print(sock.recv(99), flush=True)
time.sleep(300)
"""
FORKS = """
import os

if os.fork():
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the servers of a test are; all have gone after it."""
    monkeypatch.delenv("RAYDIST_KEEP_WARM_S", raising=False)
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    with tempfile.TemporaryDirectory(prefix="k-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        for server in kept_server.kept_servers():
            os.kill(server.pid, signal.SIGKILL)
            assert ended(server.pid)


def obtain(keep_s: float = 60, threads: int = 1, **env: str) -> ForkServer:
    """Return a server that has imported all: until then it would end with its owner."""
    server = kept_server.obtain(threads, env, keep_s, ("json",))
    assert server is not None
    wait_until(lambda: kept_server.ask(server.folder, Claim()) is not None)
    return server


def known(server: ForkServer) -> KeptServer:
    """Return the kept server of this folder, once it has begun."""
    servers: list[KeptServer] = []

    def there() -> bool:
        servers[:] = [
            each for each in kept_server.kept_servers() if each.folder == str(server.folder)
        ]
        return bool(servers)

    wait_until(there)
    return servers[0]


def waits() -> bool:
    """Return whether the only server waits for a claim."""
    return [server.free for server in kept_server.kept_servers()] == [True]


def test_one_process_at_a_time_has_a_server_and_the_next_one_gets_it() -> None:
    first = obtain()
    second = obtain()
    assert first.folder != second.folder
    first.end()
    again = obtain()
    assert again.folder == first.folder
    assert again.alive()
    again.end()
    second.end()
    assert [each.free for each in kept_server.kept_servers()] == [True, True]


@pytest.mark.parametrize("other", [{"threads": 2}, {"LAYOUT": "x"}])
def test_another_environment_has_another_server(other: dict[str, int]) -> None:
    first = obtain()
    first.end()
    second = obtain(**other)  # type: ignore[arg-type]
    assert second.folder != first.folder
    second.end()


def test_a_variable_of_the_process_counts_and_those_of_a_terminal_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = kept_server.fingerprint(1, {})
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setenv("RAY_JOB_ID", "77")
    assert kept_server.fingerprint(1, {}) == name
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert kept_server.fingerprint(1, {}) != name


def test_it_ends_by_itself_when_nobody_claims_it(place: Path) -> None:
    server = obtain(keep_s=0.5)
    there = known(server)
    server.end()
    assert ended(there.pid)
    wait_until(lambda: not server.folder.exists())


def test_one_to_be_kept_for_a_moment_waits_for_the_agents_of_its_owner(place: Path) -> None:
    server = obtain(keep_s=0.2)
    pid = known(server).pid
    time.sleep(1)
    assert server.alive()
    server.end()
    assert ended(pid)


def test_it_notices_the_end_of_an_owner_whose_child_lives(place: Path) -> None:
    """The child of a driver's program held the server, and its ranks trained on."""
    program = OWNER.replace("time.sleep", f"{FORKS}time.sleep")
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "TMPDIR": str(place)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert owner.wait() == -signal.SIGKILL
        wait_until(waits)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)  # the child


def test_it_outlives_an_owner_that_is_killed(place: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "TMPDIR": str(place)}, stdout=-1
    )
    assert owner.stdout is not None
    assert (
        owner.stdout.readline()
    )  # the server has imported all: until then it would end with its owner
    owner.kill()
    owner.communicate()
    wait_until(waits)


def test_it_ends_with_the_ray_that_it_was_started_under(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = subprocess.Popen(["sleep", "300"])
    monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
    server = obtain()
    there = known(server)
    server.end()
    wait_until(waits)
    raylet.kill()
    raylet.wait()
    assert ended(there.pid)


@pytest.mark.parametrize("one_more", [False, True])
def test_it_ends_with_the_last_ray_that_it_had_a_run_on(place: Path, one_more: bool) -> None:
    rays = [subprocess.Popen(["sleep", "300"]) for _ in range(1 + one_more)]
    for number, ray in enumerate(rays):
        server = obtain()
        run = place / f"run-{number}"
        assert isinstance(
            kept_server.ask(server.folder, BeginRun(str(run), 60, ray.pid), ImportModules(())), Warm
        )
        server.end()
    there = known(server)
    for ray in rays:
        wait_until(waits)
        ray.kill()
        ray.wait()
    assert ended(there.pid)
    wait_until(lambda: not server.folder.exists())


def test_a_ray_may_end_while_the_run_of_the_next_one_begins(place: Path) -> None:
    """The server hears of both at once: it watches the first no longer, whose descriptor it has
    closed."""
    first, second = (subprocess.Popen(["sleep", "300"]) for _ in range(2))
    server = obtain()
    kept_server.ask(server.folder, BeginRun(str(place / "run-1"), 60, first.pid), ImportModules(()))
    there = known(server)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(str(server.folder / "fork"))
        agent.send(encode(ImportModules(())))
        agent.recv(PACKET)  # the server has accepted it
        os.kill(there.pid, signal.SIGSTOP)
        agent.send(encode(BeginRun(str(place / "run-2"), 60, second.pid)))
        first.kill()
        first.wait()
        os.kill(there.pid, signal.SIGCONT)
        agent.send(encode(ImportModules(())))
        assert isinstance(decode(agent.recv(PACKET)), Warm)
    server.end()
    wait_until(waits)
    second.kill()
    second.wait()
    assert ended(there.pid)


def test_a_folder_that_the_last_server_removes_meanwhile_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def removed() -> None:
        place = kept_server.servers_folder()
        assert place is not None
        place.rmdir()

    monkeypatch.setattr(kept_server, "end_surplus", removed)
    server = obtain()
    assert server.folder.exists()
    server.end()


def test_one_whose_modules_changed_is_not_used_and_ends(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "lib").mkdir()
    (place / "lib" / "edited.py").write_text(f"open({str(place / 'imported')!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", str(place / "lib"))
    first = kept_server.obtain(1, {}, 60, ("edited",))
    assert first is not None
    wait_until((place / "imported").exists)
    there = known(first)
    first.end()
    time.sleep(0.01)  # the clock of a file system ticks slowly
    (place / "lib" / "edited.py").write_text("x = 1")
    second = kept_server.obtain(1, {}, 60, ("edited",))
    assert second is not None
    assert second.folder != first.folder
    assert ended(there.pid)
    second.end()


def test_one_whose_module_changed_while_it_was_imported_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "edited.py").write_text("open(__file__, 'a').write('x = 1')")
    monkeypatch.setenv("PYTHONPATH", str(place))
    first = kept_server.obtain(1, {}, 60, ("edited",))
    assert first is not None
    there = known(first)
    first.end()
    second = kept_server.obtain(1, {}, 60, ("edited",))
    assert second is not None
    assert second.folder != first.folder
    assert ended(there.pid)
    second.end()


def test_the_clock_of_a_file_server_does_not_matter(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was ahead made a server useless: all files seemed to have changed."""
    (place / "ahead.py").write_text("x = 1")
    os.utime(place / "ahead.py", (time.time() + 600,) * 2)
    monkeypatch.setenv("PYTHONPATH", str(place))
    folders = set()
    for _ in range(2):
        server = kept_server.obtain(1, {}, 60, ("ahead",))
        assert server is not None
        assert isinstance(kept_server.ask(server.folder, ImportModules(())), Warm)
        folders.add(server.folder)
        server.end()
    assert len(folders) == 1


def test_one_whose_file_system_is_slow_is_found_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look at thousands of files took longer than anybody waited: each run made a further
    server."""
    slow = place / "slow"
    (place / "slow_disk.py").write_text(
        "import os, time\n"
        "stat = os.stat\n"
        "def late(*args, **options):\n"
        f"    if os.access({str(slow)!r}, 0):\n"
        f"        os.unlink({str(slow)!r})\n"
        f"        time.sleep({1.5 * kept_server.CLAIM_S})\n"
        "    return stat(*args, **options)\n"
        "os.stat = late\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(place))
    first = kept_server.obtain(1, {}, 60, ("slow_disk",))
    assert first is not None
    wait_until(lambda: kept_server.ask(first.folder, ImportModules(())) is not None)
    first.end()
    slow.touch()
    assert waits()
    assert slow.exists()  # who only asks whether it is free does not make it look
    second = kept_server.obtain(1, {}, 60, ("slow_disk",))
    assert second is not None
    assert second.folder == first.folder
    second.end()


def test_what_a_server_imports_for_another_is_no_reply(place: Path) -> None:
    """The notice of its end was taken for the reply, if the server had accepted the question
    before."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        ThreadPoolExecutor() as threads,
    ):
        listener.bind(str(place / "fork"))
        listener.listen()
        asking = threads.submit(kept_server.ask, place, ImportModules(()))
        with listener.accept()[0] as server:
            for message in (Busy(), Pong(), Busy(), Pong(), Warm(pid=7)):
                server.send(encode(message))
            assert asking.result() == Warm(pid=7)


def test_one_that_was_killed_is_not_counted() -> None:
    server = obtain()
    there = known(server)
    os.kill(there.pid, signal.SIGKILL)
    assert ended(there.pid)
    assert kept_server.kept_servers() == []
    assert not server.folder.exists()


def test_one_has_no_module_of_the_folder_in_which_it_was_started(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the person's random.py for Python's, and kept it for the runs of other folders."""
    (place / "project").mkdir()
    (place / "project" / "random.py").write_text(f"open({str(place / 'imported')!r}, 'w').close()")
    monkeypatch.chdir(place / "project")
    server = obtain()
    known(server)
    server.end()
    assert not (place / "imported").exists()


def test_a_relative_search_path_is_that_of_its_folder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    names = set()
    for name in ("a", "b"):
        (place / name).mkdir()
        monkeypatch.chdir(place / name)
        names.add(kept_server.fingerprint(1, {}))
    assert len(names) == 2


def test_another_machine_has_other_servers_in_a_common_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = obtain()
    known(mine)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(kept_server, "boot_id", lambda: "another boot, or another machine")
        assert kept_server.kept_servers() == []
        theirs = obtain()
        assert theirs.folder.parent != mine.folder.parent
        theirs.end()
        assert kept_server.end(str(theirs.folder))
    mine.end()


def test_the_path_of_a_socket_is_never_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    name = kept_server.fingerprint(1, {})
    paths = []
    for length in range(40, 107):
        monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * length)
        paths.append(kept_server.servers_path() / f"{name}-123456" / "fork.new")
    assert max(len(str(path)) for path in paths) <= 107  # unix(7)


def test_limits_and_rights_make_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks had no core dumps, or another umask, where the driver's server was taken for theirs."""
    inherited = heritage()
    name = kept_server.fingerprint(1, {})
    umask = os.umask(0o077)
    try:
        assert heritage() != inherited
        assert kept_server.fingerprint(1, {}) != name
    finally:
        os.umask(umask)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, hard))
    try:
        assert heritage() != inherited
        assert kept_server.fingerprint(1, {}) != name
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    assert heritage() == inherited


def test_folders_of_servers_that_died_with_their_agents_are_removed(place: Path) -> None:
    """A power cut left them, with logs and the pickled function."""
    run, cache = place / f"raydist-{os.getuid()}-run", place / f"raydist-{os.getuid()}-compiled"
    cache.mkdir()
    dead, living = obtain(threads=1), obtain(threads=2)
    assert isinstance(kept_server.ask(dead.folder, BeginRun(str(run), 60), ImportModules(())), Warm)
    there = known(dead)
    known(living)
    os.kill(there.pid, signal.SIGKILL)
    assert ended(there.pid)
    for folder in (run, cache, dead.folder, living.folder):
        os.utime(folder, (time.time() - 7200,) * 2)
    ForkServer.launch(place / "next", "fork", 1).end()
    assert [folder.exists() for folder in (run, cache, dead.folder, living.folder)] == [
        False,
        True,
        False,
        True,
    ]
    living.end()


def test_folders_to_which_another_user_has_made_a_link_stay(place: Path) -> None:
    mine = place / "apps" / "mine"
    mine.mkdir(parents=True)
    (mine / "server.log").touch()
    os.utime(mine, (time.time() - 7200,) * 2)
    (place / f"raydist-{os.getuid()}-x-warm").symlink_to(mine.parent)
    left_folders.remove_left_folders()
    assert mine.exists()


@pytest.mark.parametrize(
    ("kind", "boot", "stays"),
    [
        ("lustre", "of another machine", True),
        ("nfs4", None, True),  # of an older release
        ("lustre", boot_id(), False),
        ("ext4", "of an earlier boot", False),
    ],
)
def test_the_folder_of_a_server_that_may_be_on_another_machine_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, boot: str | None, stays: bool
) -> None:
    """With locks that are each machine's own, that of the server there is not seen here."""
    monkeypatch.setattr(left_folders, "file_system", lambda path: kind)
    server = obtain()
    there = known(server)
    os.kill(there.pid, signal.SIGKILL)
    assert ended(there.pid)
    assert (server.folder / "boot").read_text() == boot_id()
    if boot is None:
        (server.folder / "boot").unlink()
    else:
        (server.folder / "boot").write_text(boot)
    os.utime(server.folder, (time.time() - 7200,) * 2)
    left_folders.remove_left_folders()
    assert server.folder.exists() is stays


def test_the_file_system_of_a_path_is_that_of_its_mount() -> None:
    assert [left_folders.file_system(Path(path)) for path in ("/proc/self", "/sys/kernel")] == [
        "proc",
        "sysfs",
    ]
    assert left_folders.file_system(Path("/")) != ""


def test_a_server_whose_python_does_not_start_says_why(place: Path) -> None:
    with pytest.raises(LaunchError, match=r"could not start: Fatal Python error: .*PYTHONHASHSEED"):
        ForkServer.launch(place / "f", "fork", 1, env={"PYTHONHASHSEED": "wrong"})
    assert not (place / "f").exists()


def test_the_folder_of_a_server_that_was_killed_is_removed() -> None:
    server = obtain()
    there = known(server)
    os.kill(there.pid, signal.SIGKILL)
    assert ended(there.pid)
    assert not server.alive()
    obtain().end()
    assert not server.folder.exists()


def test_a_server_that_has_just_been_bound_is_not_taken_for_dead(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that started at the same time removed its folder: five minutes, then an error."""

    class Listener(socket.socket):
        def listen(self, *backlog: int) -> None:
            assert kept_server.ask(place / "f", Claim()) is None
            super().listen(*backlog)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", Listener)
        server = ForkServer.launch(place / "f", "fork", 1)
    assert (place / "f" / "fork").exists()
    server.end()


def test_end_spares_one_that_is_in_use() -> None:
    server = obtain()
    there = known(server)
    assert not kept_server.end(there.folder)
    server.end()
    assert kept_server.end(there.folder)
    assert ended(there.pid)
    assert kept_server.kept_servers() == []


def test_one_that_could_not_end_a_process_of_its_run_is_not_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the memory of the run's snapshots, and never became idle."""
    (place / "raydist_undying.py").write_text(test_fork_server.UNDYING)
    monkeypatch.setenv("PYTHONPATH", str(place))
    server = kept_server.obtain(1, {}, 60, ("raydist_undying",))
    assert server is not None
    line = test_fork_server.Line(server.folder)
    pid = line.fork(lambda: time.sleep(300))
    there = known(server)
    server.end()
    assert ended(there.pid)
    assert ended(pid)
    assert not server.folder.exists()


def test_a_user_has_few_servers_on_a_node() -> None:
    used = obtain(threads=99)
    for threads in range(1, 7):
        server = obtain(threads=threads)
        wait_until(lambda server=server: kept_server.ask(server.folder, Claim()) is not None)  # type: ignore[misc]
        server.end()
    assert len(kept_server.kept_servers()) == kept_server.MAX_SERVERS
    assert used.alive()
    used.end()


def test_the_folder_of_a_submitted_job_makes_no_other_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    name = kept_server.fingerprint(1, {})
    monkeypatch.setenv(
        "PYTHONPATH", "/tmp/ray/session_x/runtime_resources/working_dir_files/_ray_pkg_1"
    )
    assert kept_server.fingerprint(1, {}) == name
    monkeypatch.setenv("PYTHONPATH", "/home/me/lib")
    assert kept_server.fingerprint(1, {}) != name


@pytest.mark.parametrize("text", ["long", "-1"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RAYDIST_KEEP_WARM_S", text)
    with pytest.raises(
        ConfigError, match=rf"RAYDIST_KEEP_WARM_S={text}: must be a number of seconds"
    ):
        kept_server.obtain(1, {}, 60)


@pytest.mark.parametrize("keep", ["0", "600"])
def test_an_admin_sets_the_most_seconds(monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    monkeypatch.setenv("RAYDIST_KEEP_WARM_S", keep)
    server = kept_server.obtain(1, {}, 60)
    assert (server is None) == (keep == "0")
    if server:
        server.end()


def test_a_folder_that_others_can_reach_is_not_used(place: Path) -> None:
    path = kept_server.servers_folder()
    assert path is not None
    path.chmod(0o755)
    assert kept_server.servers_folder() is None
    path.rename(place / "elsewhere")
    (place / "elsewhere").chmod(0o700)
    path.symlink_to(place / "elsewhere")
    assert kept_server.servers_folder() is None
    assert kept_server.obtain(1, {}, 60) is None


def test_a_run_uses_no_folder_that_another_user_may_have_made(place: Path) -> None:
    """Its name can be read on another node: the ranks ran the pickled function that lay there."""
    run = recorded_end.run_folder_here("r", "node")
    run.mkdir(mode=0o700)
    (run / "rank-0.value.end").write_text("[0, 0, 1.0, 1, 0]")
    server = obtain()
    begin = BeginRun(str(run), 60), ImportModules(())
    assert recorded_end.read_end("r", "node", 0) is not None
    run.chmod(0o777)
    assert kept_server.ask(server.folder, *begin) is None
    assert recorded_end.read_end("r", "node", 0) is None
    with pytest.raises(OSError, match="another user may have made"):
        asyncio.run(ForkClient.connect(run))
    server.end()
    assert run.exists()


def test_an_agent_uses_the_drivers_server_only_if_a_rank_would_inherit_the_same(
    place: Path,
) -> None:
    mine = obtain()
    servers = {
        "equal": (mine.folder, heritage()),
        "other": (mine.folder, ("another limit",)),
        "ended": (place / "ended", heritage()),
    }
    for name, (warm, inherited) in servers.items():
        request = Open(
            run="r", start="fork", modules=("json", "mine"), env={}, interface=None, threads=1, mpirun="auto",
            secret="", installed=("json",), warm_server=WarmServer(str(warm), inherited),
        )  # fmt: skip
        own, folder, modules = kept_server.choose(request, place / name)
        assert (own is None, modules) == (
            (True, ("json",)) if name == "equal" else (False, ("json", "mine"))
        )
        assert folder == (mine.folder if own is None else own.folder)
        if own is not None:
            own.end()
    mine.end()


def test_an_owner_that_dies_as_its_run_begins_leaves_no_folder(place: Path) -> None:
    for number in range(20):
        server, run = obtain(), place / f"run-{number}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
            agent.connect(str(server.folder / "fork"))
            agent.send(encode(BeginRun(str(run), 60)))
            if number % 2:  # in every other turn the server has read it by then
                wait_until((run / "fork").exists)
            server.lifeline.close()
        wait_until(lambda server=server: waits() or not server.folder.exists())  # type: ignore[misc]
        assert not run.exists()
