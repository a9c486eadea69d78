"""The Ray that a program starts, or finds on its machine: no other account of the machine can reach
into it."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.cluster import connect, local_ray, ray_private
from raydist.settings.config import Job
from raydist.shared import signals
from raydist.shared.errors import LaunchError
from raydist.shared.events import Events
from tests.programs import Program
from tests.rig import requires_root

OTHER = 65534
"""The uid of another account."""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a short path in which all users can make files, as /tmp; it is TMPDIR."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(local_ray, "LONGEST", 200)  # a test's folder has a long path
    return folder


def test_rays_folder_is_this_users_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert local_ray.temp_folder() == base / f"ray-{os.getuid()}"
    assert stat.S_IMODE(local_ray.temp_folder().stat().st_mode) == 0o700
    base.chmod(0o700)  # nobody else can enter it anyway
    assert local_ray.temp_folder() == base
    other = base / "scratch"
    other.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(other))
    assert local_ray.temp_folder() == other / f"ray-{os.getuid()}"


def test_a_long_tmpdir_is_not_used_because_of_rays_sockets(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "LONGEST", len(os.fsencode(base)))
    assert local_ray.outer_folder() == base
    monkeypatch.setattr(local_ray, "own_folder", lambda path, make=True: make)
    assert local_ray.temp_folder() == Path(f"/tmp/ray-{os.getuid()}")


@pytest.mark.parametrize("how", ["open", "link", "file", "theirs"])
def test_a_folder_that_another_account_has_made_is_refused(base: Path, how: str) -> None:
    planted = base / f"ray-{os.getuid()}"
    match how:
        case "open":
            planted.mkdir()
            planted.chmod(0o777)
        case "link":
            (base / "target").mkdir(mode=0o700)
            planted.symlink_to(base / "target")
        case "file":
            planted.touch()
        case _ if os.getuid() == 0:
            planted.mkdir(mode=0o700)
            os.chown(planted, OTHER, OTHER)
        case _:
            pytest.skip("only root can give a folder away")
    with pytest.raises(
        LaunchError, match=r"ray-\d+.*set RAY_TMPDIR to a folder that only you can enter"
    ):
        local_ray.temp_folder()


def test_a_ray_that_was_started_here_is_found(base: Path) -> None:
    assert local_ray.noted_address() is None
    for folder, address in ((local_ray.temp_folder(), "10.0.0.1:6379"), (base, "10.0.0.2:6379")):
        (folder / "ray").mkdir()
        (folder / "ray" / "ray_current_cluster").write_text(f"{address}\n")
        assert local_ray.noted_address() == address


@requires_root
@pytest.mark.root
@pytest.mark.parametrize("theirs", ["ray/ray_current_cluster", "ray"])
def test_the_ray_of_another_account_is_not_joined_by_itself(base: Path, theirs: str) -> None:
    """It would get this user's token, and what it returns is unpickled here."""
    note = base / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text("127.0.0.1:6379\n")
    os.chown(base / theirs, OTHER, OTHER)
    assert local_ray.noted_address() is None


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_note_of_a_ray_that_is_no_file_is_not_read(base: Path, kind: str) -> None:
    """Another account linked it to the name of a process of root; a FIFO blocked every command."""
    note = base / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    if kind == "link":
        (base / "comm").write_text("127.0.0.1:6666\n")
        note.symlink_to(base / "comm")
    else:
        os.mkfifo(note)
    found: list[str | None] = []
    reading = threading.Thread(target=lambda: found.append(local_ray.noted_address()), daemon=True)
    reading.start()
    reading.join(30)
    assert found == [None]


def test_an_old_empty_token_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier raydist, or Ray itself, leaves one on a full disk; a new one may be in writing."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.touch(0o600)
    local_ray.protect_token(tmp_path)
    assert token.read_text() == ""
    os.utime(token, (0, 0))
    local_ray.protect_token(tmp_path)
    assert len(token.read_text()) == 64


def test_a_full_disk_leaves_no_empty_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later run would have taken it for Ray's token."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no byte of a file can be written
    try:
        with pytest.raises(OSError, match="File too large"):
            local_ray.protect_token(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    local_ray.protect_token(tmp_path)
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


class FakeRay:
    """Stands for Ray: knows to which one this process is connected, and starts none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.at = ""
        self.started = 0
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", self.shutdown)
        monkeypatch.setattr(ray, "is_initialized", lambda: bool(self.at))
        monkeypatch.setattr(ray, "get_runtime_context", self.context)
        monkeypatch.setattr(connect, "alive_nodes", list)
        monkeypatch.setattr(connect, "answers", lambda address: address == self.at)
        monkeypatch.setattr(connect, "running_address", lambda: None)
        monkeypatch.setattr(ray_private, "submission_id", str)
        monkeypatch.setattr(signals, "take", dict)  # ray.init has changed no handler
        # The next test has this process without a Ray of its own, as this one.
        monkeypatch.setattr(connect, "_local_cpus", 0)
        monkeypatch.setattr(connect, "_local_address", "")

    def init(self, address: str, **how: Any) -> Any:
        if address == "local":
            self.started += 1
            address = f"127.0.0.1:{self.started}"
        self.at = address
        return SimpleNamespace(dashboard_url="")

    def shutdown(self) -> None:
        self.at = ""

    def context(self) -> Any:
        assert self.at, "Ray would start one here"
        return SimpleNamespace(gcs_address=self.at)


@pytest.mark.usefixtures("base")
def test_a_program_may_leave_the_ray_of_its_run_for_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run ended the program's own connection, or a plain Ray was started."""
    ray = FakeRay(monkeypatch)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    cluster = "10.0.0.1:6379"
    with Events(tmp_path / "events.jsonl") as events:

        def run() -> tuple[str, bool]:
            with connect.connect(Job(), events):
                return ray.at, connect.is_local_ray()

        assert run() == ("127.0.0.1:1", True)
        assert run() == ("127.0.0.1:1", True)
        ray.shutdown()
        assert not connect.is_local_ray()
        assert run() == ("127.0.0.1:2", True)
        ray.shutdown()
        ray.init(cluster)
        assert run() == (cluster, False)
        connect.end_local_ray()  # as at the end of the program
        assert ray.at == cluster


# The job looks with the eyes of another account at all that Ray has made. With Ray's own folders
# that is most of it.
LOOK = """
import os

def look():
    folders = [folder for folder, _, _ in os.walk(os.environ["TMPDIR"])][1:]
    assert any("/session_" in folder for folder in folders)
    pid = os.fork()
    if not pid:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        found = [folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)]
        os.write(1, f"open: {found}\\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
"""


@requires_root
@pytest.mark.root
@pytest.mark.ray
def test_another_account_can_write_into_no_folder_of_a_ray_that_a_run_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    with tempfile.TemporaryDirectory(prefix="t-") as short:  # Ray's sockets are in there
        os.chmod(short, 0o1777)
        program = Program(tmp_path, "job=look.py:look", "group=ray", "scale=1x1", tmp=Path(short))
        assert program.wait() == 0, program.screen
    assert (program.run_dir / "logs" / "rank-0.log").read_text() == "open: []\n"
