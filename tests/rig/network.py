"""The hosts together: the switch between them, faults of the network, and Ray on all of them.
(driver)"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.rig.host import Host, write_disk
from tests.rig.namespaces import CAPTURED, NET, CommandFailed, Space, finish

# Values for ray_up(env=...): a silent host is declared dead after 5 s instead of 62. Ray's default
# threshold of 5 stays, since two busy cores can well miss one or two checks.
QUICK_DEATH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
}

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_RAY_PORT = 6379


@dataclass
class Rig:
    """The hosts and the switch between them."""

    hosts: Sequence[Host]
    switch: Space
    gateway: str  # this machine's own address among the hosts
    ray_address: str = ""

    def cut(self, host: Host, nic: str | None = None) -> None:
        """Pull the cable of a NIC, or of all, at the switch: the host loses its carrier, and no
        connection is reset."""
        self.switch.ip(*(f"link set {host.port(each)} down" for each in _nics(host, nic)))

    def restore(self, host: Host, nic: str | None = None) -> None:
        self.switch.ip(*(f"link set {host.port(each)} up" for each in _nics(host, nic)))

    def slow(self, host: Host, rate: str, nic: str | None = None) -> None:
        """Limit the rate of a NIC, or of all, in both directions, like tc: `100mbit`. Raises
        NotImplementedError if the kernel cannot."""
        for each in _nics(host, nic):
            for space, device in ((self.switch, host.port(each)), (host.space, each)):
                words = (
                    f"tc qdisc replace dev {device} root tbf rate {rate} burst 64kb latency 100ms"
                )
                done = finish(space.spawn(words.split(), **CAPTURED), check=False)
                if done.returncode:
                    raise NotImplementedError(f"{words!r} on {host.name}: {done.stderr.strip()}")

    def ray_up(
        self,
        cpus: int = 2,
        *,
        head_cpus: int | None = None,
        dashboard: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Start Ray on every host, the head on the first, and return its address. `env` is for
        Ray's own processes. `head_cpus`: 0 keeps ranks away from the first host."""
        head, *others = self.hosts
        self.ray_address = f"{head.address()}:{_RAY_PORT}"
        address = f"--dashboard-host={head.address()}"  # for this machine, with the token
        first = [
            f"--port={_RAY_PORT}",
            f"--include-dashboard={str(dashboard).lower()}",
            address,
            "--disable-usage-stats",
        ]
        own = cpus if head_cpus is None else head_cpus
        finish(_ray_start(head, own, ["--head", *first], env))
        for host, starting in [(host, self._ray_join(host, cpus, env)) for host in others]:
            self._finish_join(host, starting, cpus, env)
        for host in self.hosts:
            host.environment["RAY_ADDRESS"] = self.ray_address
        return self.ray_address

    def ray_join(self, host: Host, cpus: int = 2, env: Mapping[str, str] | None = None) -> None:
        """Start Ray on one more host, or on one that was killed and booted again."""
        self._finish_join(host, self._ray_join(host, cpus, env), cpus, env)

    def _finish_join(
        self,
        host: Host,
        starting: subprocess.Popen[str],
        cpus: int,
        env: Mapping[str, str] | None,
    ) -> None:
        """Wait until Ray runs on a host; if it does not start, start it once more.

        Ray gives a new node 30 s to register at the head, which a busy machine may exceed.
        """
        try:
            finish(starting)
        except CommandFailed:
            finish(host.popen([*_RAY, "stop"], **CAPTURED))
            finish(self._ray_join(host, cpus, env))

    def _ray_join(
        self, host: Host, cpus: int, env: Mapping[str, str] | None
    ) -> subprocess.Popen[str]:
        return _ray_start(host, cpus, [f"--address={self.ray_address}"], env)

    def ray_down(self) -> None:
        for stopping in [
            host.popen([*_RAY, "stop", "--force"], **CAPTURED)
            for host in self.hosts
            if host.space.alive
        ]:
            finish(stopping)
        for host in self.hosts:
            host.environment.pop("RAY_ADDRESS", None)


@contextmanager
def hosts(count: int, nics: Sequence[str] = ("eth0", "ib0")) -> Iterator[Rig]:
    """Make `count` hosts with these NICs, each NIC on a separate switch and subnet
    (10.<n>.<position of the NIC>.0/24).

    The block cleans up at its end. If this process is killed, the kernel ends the hosts with it,
    and the next rig removes the folder.
    """
    _sweep()
    with ExitStack() as stack:
        switch = Space(NET, "")
        stack.callback(switch.end)
        switch.ip(*(f"link add {nic} up type bridge" for nic in nics))
        number = _plug_in(switch, nics[0])
        stack.callback(_ip, f"link del rig{number}")
        folder = Path(
            tempfile.gettempdir(), f"rig{number}"
        )  # no longer: the path of a socket of Ray's ends at 107 bytes
        folder.mkdir(mode=0o700)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        rig = Rig(_make_hosts(count, nics, number, folder, switch), switch, f"10.{number}.0.254")
        for host in rig.hosts:
            host.boot()
            stack.callback(host.end)
        yield rig


def _plug_in(switch: Space, nic: str) -> int:
    """Connect this machine to the first switch by a NIC that is named after an unused number; the
    name of the NIC is the lock."""
    taken = _ip("-4 route show table all").stdout
    for number in (n for n in range(80, 250) if f" 10.{n}." not in f" {taken}"):
        result = _ip(
            f"link add rig{number} type veth peer name outside netns /proc/{switch.pid}/ns/net",
            check=False,
        )
        if result.returncode == 0:
            switch.ip(f"link set outside up master {nic}")
            _ip(f"link set rig{number} up")
            _ip(f"addr add 10.{number}.0.254/24 brd + dev rig{number}")
            return number
        if "File exists" not in result.stderr:
            raise RuntimeError(f"no NIC rig{number} can be made: {result.stderr.strip()}")
    raise RuntimeError(
        "all of 10.80.0.0/16 to 10.249.0.0/16 is in use on this machine; see `ip route`"
    )


def _make_hosts(
    count: int, nics: Sequence[str], number: int, folder: Path, switch: Space
) -> list[Host]:
    result = []
    names = {
        f"host{i}": {nic: f"10.{number}.{net}.{i + 1}" for net, nic in enumerate(nics)}
        for i in range(count)
    }
    token = secrets.token_hex(32)
    for name, addresses in names.items():
        others = [f"{other[nics[0]]} {peer}\n" for peer, other in names.items() if peer != name]
        each_nic = [
            f"{address} {peer}-{nic}\n"
            for peer, its in names.items()
            for nic, address in its.items()
        ]
        known = "".join(others + each_nic)
        result.append(
            Host(name, addresses, folder / name, switch, write_disk(folder / name, known, token))
        )
    return result


def _ray_start(
    host: Host, cpus: int, words: list[str], env: Mapping[str, str] | None
) -> subprocess.Popen[str]:
    # A node would use the temporary folder of the head. 256 MiB of object store are enough for
    # tests. The log monitor sends workers' output to drivers; its start takes more than a second of
    # CPU.
    own = [f"--temp-dir={host.environment['RAY_TMPDIR']}/ray", f"--object-store-memory={2**28}"]
    own += [
        f"--node-ip-address={host.address()}",
        f"--num-cpus={cpus}",
        "--include-log-monitor=false",
    ]
    return host.popen([*_RAY, "start", *words, *own], env=env, **CAPTURED)


def _sweep() -> None:
    """Remove the folders of killed rigs: those without a NIC, since the NIC ends with its rig."""
    for folder in Path(tempfile.gettempdir()).glob("rig*"):
        if not Path("/sys/class/net", folder.name).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _ip(words: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return finish(subprocess.Popen(["ip", *words.split()], text=True, **CAPTURED), check=check)


def _nics(host: Host, nic: str | None) -> list[str]:
    return [nic] if nic else list(host.addresses)
