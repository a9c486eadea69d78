"""The rig is what it says: hosts apart from each other, faults like real ones, and nothing left.
(driver)"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.leftovers import processes_of
from tests.rig import CommandFailed, Host, Rig, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, requires_root]

# Says what comes in on port 5000 back to the sender.
ECHO = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    while said := peer.recv(1 << 16):
        peer.sendall(said)
"""

# Connects to ECHO on argv[1]; for each line of its input says what became of it within a second.
CALL = """
import socket, sys
line = socket.create_connection((sys.argv[1], 5000), timeout=5)
line.settimeout(1)
print("connected", flush=True)
for said in sys.stdin:
    try:
        if said.strip():
            line.sendall(said.encode())
        print(line.recv(1 << 16).decode().strip() or "closed", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""

# One all-reduce of 16 MB per rank; argv: rank, world size, address of rank 0, seconds that gloo
# gets to connect.
ALL_REDUCE = """
import datetime, sys, torch, torch.distributed as dist
rank, world, master, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
store = dist.TCPStore(master, 29500, world, is_master=rank == 0, timeout=datetime.timedelta(seconds=60))
store.set(f"here {rank}", "")
store.wait([f"here {other}" for other in range(world)])
limit = datetime.timedelta(seconds=limit)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
values = torch.full((1 << 22,), float(rank + 1))
dist.all_reduce(values)
print(values.min().item(), values.max().item())
dist.destroy_process_group()
"""

TRAP = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("set", flush=True)
signal.pause()
"""

# TAKE takes all that GIVE gives: 1 MiB.
TAKE = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 16): pass
"""
GIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as line: line.sendall(bytes(1 << 20))
"""

# 2 MiB of datagrams to nobody.
SEND = """
import socket, sys
line = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(2048):
    line.sendto(bytes(1024), (sys.argv[1], 9))
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        yield rig


@pytest.fixture
def pair() -> Iterator[Rig]:
    with hosts(2) as rig:
        yield rig


def program(host: Host, text: str, *words: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    return host.popen(["python", "-c", text, *words], **pipes)


def tell(process: subprocess.Popen[str], line: str) -> str:
    """Type a line, and read the line it answers."""
    assert process.stdin
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return hear(process)


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def connect(caller: Host, server: Host) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """Open a TCP connection between two hosts and send one word over it; return both programs."""
    echo = program(server, ECHO)
    assert hear(echo) == "listening"
    call = program(caller, CALL, server.address())
    assert hear(call) == "connected"
    assert tell(call, "hello") == "hello"
    return call, echo


def carrier(host: Host, nic: str) -> bool:
    return (host.root / "sys/class/net" / nic / "carrier").read_text() == "1\n"


def traces(folder: Path) -> list[str]:
    """Return the leftovers of a rig: its folder and NIC have the same name, and its programs have
    it in their environment."""
    there = [str(path) for path in (folder, Path("/sys/class/net", folder.name)) if path.exists()]
    return there + processes_of(str(folder))


def running(pid: str) -> bool:
    """Not so for a zombie, which its new parent reaps when it likes."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


# What each host has separately


def test_each_host_has_its_own_name_and_addresses(rig: Rig) -> None:
    for number, host in enumerate(rig.hosts):
        assert host.run(["hostname"]).stdout == f"host{number}\n"
        listed = json.loads(host.run(["ip", "-json", "-4", "addr"]).stdout)
        addresses = {
            nic["ifname"]: nic["addr_info"][0]["local"] for nic in listed if nic["addr_info"]
        }
        assert addresses == {"lo": "127.0.0.1", **host.addresses, "docker0": "172.17.0.1"}
    assert len({host.address(nic) for host in rig.hosts for nic in ("eth0", "ib0")}) == 6
    assert socket.gethostname() not in {host.name for host in rig.hosts}


def test_the_own_name_leads_to_loopback_and_the_others_to_their_first_nic(rig: Rig) -> None:
    for host in rig.hosts:
        for other in rig.hosts:
            address = host.run(
                ["python", "-c", f"import socket; print(socket.gethostbyname({other.name!r}))"]
            ).stdout
            assert address.strip() == ("127.0.1.1" if other is host else other.address("eth0"))


def test_docker0_is_up_with_carrier_and_the_same_address_everywhere(rig: Rig) -> None:
    for host in rig.hosts:
        assert (host.root / "sys/class/net/docker0/bridge").is_dir()
        wait_until(partial(carrier, host, "docker0"), "docker0 has a carrier")
        assert "inet 172.17.0.1/16" in host.run(["ip", "addr", "show", "docker0"]).stdout


def test_each_host_has_its_own_identity(rig: Rig) -> None:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        seen = [host.run(["cat", path]).stdout for host in rig.hosts]
        assert len({*seen, Path(path).read_text() if Path(path).exists() else ""}) == 4


@pytest.mark.parametrize(
    "path", ["etc/rig-test.conf", "dev/shm/rig-test-block", "run/rig-test.pid"]
)
def test_files_are_seen_on_their_own_host_only(rig: Rig, path: str) -> None:
    first, second, _ = rig.hosts
    (first.root / path).write_text("mine\n")
    assert first.run(["cat", f"/{path}"]).stdout == "mine\n"
    assert not (second.root / path).exists()
    assert not Path("/", path).exists()


def test_home_and_temporary_folders_are_the_hosts_own_and_hold_the_token(rig: Rig) -> None:
    tokens = set()
    for host in rig.hosts:
        output = host.run(
            [
                "python",
                "-c",
                "import tempfile, pathlib; print(tempfile.gettempdir(), pathlib.Path.home())",
            ]
        )
        assert [Path(path).parent for path in output.stdout.split()] == [host.folder, host.folder]
        token = host.folder / "home/.ray/auth_token"
        assert token.stat().st_mode & 0o077 == 0
        tokens.add(token.read_text())
    assert len(tokens) == 1
    assert re.fullmatch("[0-9a-f]{64}", tokens.pop())


def test_the_environment_of_the_test_stays_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wrong")
    monkeypatch.setenv("RAY_ADDRESS", "wrong:1")
    seen = rig.hosts[0].run(["env"], env={"NCCL_DEBUG": "INFO"}).stdout.splitlines()
    assert "NCCL_DEBUG=INFO" in seen
    assert not [line for line in seen if "wrong" in line]


# Programs


def test_a_host_sees_its_own_processes_only(rig: Rig) -> None:
    first, second, _ = rig.hosts
    with first.popen(["sleep", "1000"]) as sleeping:
        assert list(first.processes().values()) == ["sleep 1000"]
        assert second.processes() == {}
        seen = first.run(
            ["python", "-c", "import os; print(*filter(str.isdigit, os.listdir('/proc')))"]
        ).stdout
        assert len(seen.split()) == 3  # process 1, the sleep, and who asks
        sleeping.kill()
    assert first.processes() == {}


def test_signals_and_exit_status_are_the_programs_own(rig: Rig) -> None:
    host = rig.hosts[0]
    with program(host, TRAP) as trapped:
        assert hear(trapped) == "set"
        trapped.terminate()
        assert trapped.wait() == 7
    with host.popen(["sleep", "1000"]) as sleeping:
        sleeping.send_signal(signal.SIGINT)
        assert sleeping.wait() == -signal.SIGINT


def test_a_failed_command_says_what_it_said(rig: Rig) -> None:
    with pytest.raises(CommandFailed, match=r"(?s)exit status 3.*no such thing"):
        rig.hosts[0].run(["sh", "-c", "echo no such thing >&2; exit 3"])
    assert rig.hosts[0].run(["sh", "-c", "exit 3"], check=False).returncode == 3


def test_a_command_over_its_time_is_killed(rig: Rig) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        rig.hosts[0].run(["sleep", "1000"], timeout=0.1)
    assert rig.hosts[0].processes() == {}


def test_programs_stand_where_the_test_stands_or_is_told(rig: Rig, tmp_path: Path) -> None:
    assert rig.hosts[0].run(["pwd"]).stdout.strip() == str(Path.cwd())
    assert rig.hosts[0].run(["pwd"], cwd=tmp_path).stdout.strip() == str(tmp_path)


def test_orphans_leave_no_zombie(rig: Rig) -> None:
    host = rig.hosts[0]
    host.run(["sh", "-c", "sleep 0.05 >/dev/null 2>&1 &"])
    wait_until(lambda: host.processes() == {}, "the orphan is reaped")


def test_programs_started_by_several_threads_land_on_their_own_hosts(rig: Rig) -> None:
    names: dict[str, set[str]] = {host.name: set() for host in rig.hosts}

    def ask(host: Host) -> None:
        for _ in range(10):
            names[host.name].add(host.run(["sh", "-c", "hostname; echo $$"]).stdout.split()[0])

    threads = [threading.Thread(target=ask, args=(host,)) for host in rig.hosts]
    for thread in threads:
        thread.start()
    here = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    for thread in threads:
        thread.join()
    assert names == {host.name: {host.name} for host in rig.hosts}
    assert here == socket.gethostname()


# The network


def test_a_host_has_the_nics_that_are_asked_for() -> None:
    with hosts(2, nics=("eth0", "ib0", "ib1")) as rig:
        first, second = rig.hosts
        first.run(["python", "-c", SEND, second.address("ib1")])
        wait_until(lambda: second.bytes("ib1")[0] > 1 << 20, "the bytes have come in on ib1")
        assert max(second.bytes("ib0")) < 1 << 20
        name = "import socket; print(socket.gethostbyname('host1-ib1'))"
        assert first.run(["python", "-c", name]).stdout.strip() == second.address("ib1")


def test_this_machine_reaches_the_hosts_and_they_reach_it(rig: Rig) -> None:
    host = rig.hosts[1]
    with program(host, ECHO) as echo:
        assert hear(echo) == "listening"
        with socket.create_connection((host.address(), 5000), timeout=5) as line:
            line.sendall(b"hello")
            assert line.recv(100) == b"hello"
        echo.kill()
    with socket.create_server((rig.gateway, 0)) as server:
        port = server.getsockname()[1]
        host.run(
            [
                "python",
                "-c",
                f"import socket; socket.create_connection(({rig.gateway!r}, {port}), timeout=5)",
            ]
        )
        assert server.accept()[1][0] == host.address("eth0")


def test_a_cut_link_is_silence_and_a_restored_one_goes_on(pair: Rig) -> None:
    caller, server = pair.hosts
    call, _ = connect(caller, server)
    pair.cut(server, "eth0")
    assert (carrier(server, "eth0"), carrier(server, "ib0")) == (False, True)
    assert tell(call, "are you there") == "TimeoutError"  # and no reset
    pair.restore(server, "eth0")
    wait_until(lambda: tell(call, "") == "are you there", "what was sent into the cut link arrives")


def test_a_cut_without_a_nic_cuts_all(pair: Rig) -> None:
    host = pair.hosts[1]
    pair.cut(host)
    assert (carrier(host, "eth0"), carrier(host, "ib0")) == (False, False)


def test_a_killed_host_says_no_goodbye_and_boots_again(pair: Rig) -> None:
    caller, server = pair.hosts
    call, echo = connect(caller, server)
    (server.folder / "home/mark").write_text("kept")
    (server.root / "dev/shm/mark").write_text("lost")
    server.kill()
    assert echo.wait() == -signal.SIGKILL
    assert not server.space.alive
    assert tell(call, "are you there") == "TimeoutError"
    server.boot()
    assert server.run(["sh", "-c", "hostname; cat ~/mark"]).stdout == "host1\nkept"
    assert not (server.root / "dev/shm/mark").exists()
    connect(caller, server)


def test_a_slowed_link_holds_its_rate_and_says_so(pair: Rig) -> None:
    caller, server = pair.hosts
    try:
        pair.slow(server, "8mbit", "eth0")
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    with program(server, TAKE) as taking:
        assert hear(taking) == "listening"
        began = time.monotonic()
        caller.run(["python", "-c", GIVE, server.address()])
        assert taking.wait() == 0
    assert (
        time.monotonic() - began > 0.8
    )  # 8.4 Mbit at 8 Mbit/s can't be faster, however quick the machine is
    with pytest.raises(NotImplementedError, match=r"tc qdisc .* nonsense .* on host1"):
        pair.slow(server, "nonsense", "eth0")


def all_reduce(rig: Rig, env: dict[str, str], limit: int) -> list[tuple[int | None, str]]:
    """Exit status and output of each rank, one on each host."""
    world, master = str(len(rig.hosts)), rig.hosts[0].address("eth0")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [
        host.popen(
            ["python", "-c", ALL_REDUCE, str(rank), world, master, str(limit)], env=env, **pipes
        )
        for rank, host in enumerate(rig.hosts)
    ]
    output = [rank.communicate(timeout=240)[0] for rank in ranks]
    return [(rank.returncode, own_lines(text)) for rank, text in zip(ranks, output, strict=True)]


def own_lines(output: str) -> str:
    """Leave out the lines that the gloo of torch 2.8 prints by itself."""
    lines = output.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] "))


def test_gloo_without_an_interface_follows_the_hostname_to_loopback_and_fails(pair: Rig) -> None:
    ended = all_reduce(pair, {}, limit=2)
    assert all(status != 0 for status, _ in ended)
    assert any("Connection refused, remote=[127.0.1.1]" in text for _, text in ended)


@pytest.mark.parametrize(("used", "idle"), [("ib0", "eth0")])
def test_gloo_uses_the_interface_it_is_told_and_the_bytes_prove_it(
    pair: Rig, used: str, idle: str
) -> None:
    ended = all_reduce(pair, {"GLOO_SOCKET_IFNAME": used}, limit=120)
    assert ended == [(0, "3.0 3.0\n")] * 2
    for host in pair.hosts:
        assert min(host.bytes(used)) > 1 << 24
        assert sum(host.bytes(idle)) < 0.05 * sum(host.bytes(used))


# Ray


# Nothing is left

OWNER = """
import sys, time
from tests.rig import hosts
with hosts(2) as rig:
    rig.hosts[1].popen(["sleep", "1000"])
    print(rig.hosts[0].folder.parent, rig.gateway, *[host.space.pid for host in rig.hosts], flush=True)
    while True:
        time.sleep(0.1)  # a signal just before a sleep does not shorten it
"""


def test_nothing_is_left_after_the_block_or_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), hosts(2) as rig:  # noqa: PT012
        folder = rig.hosts[0].folder.parent
        rig.hosts[0].popen(["sh", "-c", "sleep 1000 & sleep 1000"])
        rig.hosts[1].kill()
        rig.hosts[1].boot()
        inside = rig.hosts[1].popen(["sleep", "1000"])
        assert len(traces(folder)) > 3  # the folder, the NIC and what sleeps
        _ = 1 / 0
    assert traces(folder) == []
    assert inside.returncode == -signal.SIGKILL


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_is_ended(signum: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout
        folder, _, *inits = owner.stdout.readline().split()
        owner.send_signal(signum)
        owner.communicate()
    nic = Path(folder).name
    wait_until(lambda: not Path("/sys/class/net", nic).exists(), f"{nic} is gone")
    wait_until(lambda: not any(map(running, inits)), "the hosts are gone")
    if signum == signal.SIGKILL:
        assert Path(folder).exists()  # nobody was left to remove it
        with hosts(1):
            pass
    assert traces(Path(folder)) == []


def test_two_rigs_at_a_time_do_not_meet() -> None:
    with hosts(1) as one, hosts(1) as other:
        assert one.gateway != other.gateway
        assert one.hosts[0].address() != other.hosts[0].address()
        for rig in (one, other):
            with program(rig.hosts[0], ECHO) as echo:
                assert hear(echo) == "listening"
                socket.create_connection((rig.hosts[0].address(), 5000), timeout=5).close()
                echo.kill()
    with hosts(1) as again:
        assert again.gateway == one.gateway  # its number was given back


def test_a_host_that_cannot_be_set_up_says_why(rig: Rig) -> None:
    host = rig.hosts[0]
    with pytest.raises(RuntimeError, match=r"(?s)host0-eth0.*File exists"):
        Host(host.name, host.addresses, host.folder, host.switch, host.environment).boot()
    assert host.run(["hostname"]).stdout == "host0\n"


@pytest.mark.ray
def test_the_command_gives_a_shell_on_the_first_of_the_hosts_and_a_way_into_each() -> None:
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
    }
    with subprocess.Popen([sys.executable, "-m", "tests.rig", "2"], **pipes) as shell:
        assert hear(shell).startswith("Ray at 10.")
        for name in ("host0", "host1"):
            enter = hear(shell).split()[-1]
            assert (
                subprocess.run([enter, "hostname"], capture_output=True, text=True).stdout
                == f"{name}\n"
            )
        assert tell(shell, "hostname") == "host0"
        nodes = "import ray; ray.init(); print(len(ray.nodes()), 'nodes')"
        assert tell(shell, f'python -c "{nodes}"') == "2 nodes"
        shell.communicate("exit 5\n")
    assert shell.returncode == 5
    assert not Path(enter).exists()


def test_without_root_the_reason_to_skip_is_given() -> None:
    script = (
        "import os; os.geteuid = lambda: 1000; from tests.rig import requires_root as r; "
        "print(r.args, r.kwargs)"
    )
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout.startswith("(True,) ")
    assert "run as root" in output.stdout
