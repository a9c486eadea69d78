"""The facts of this machine: addresses, interfaces, GPUs, versions, variables of the site. (actor)

Each reader takes the root folder that it reads, so that tests can describe any machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from raydist.cluster import ray_private
from raydist.network.facts import Facts as Facts
from raydist.node.probe import cpus, hca, machine, nics
from raydist.shared import sysfs
from raydist.shared.errors import ConfigError, LaunchError
from raydist.shared.version import __version__

SITE = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMPI|HOROVOD|TORCH|MALLOC)_\w+|OMP_NUM_THREADS|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|CACHE_PATH)"
    r"|PYTORCH(_\w+)?_ALLOC_CONF|(TORCHINDUCTOR|TRITON)_CACHE_DIR"
)
"""Environment variables of the network, the devices and the compilers that a site may have set."""
DISTRIBUTIONS = ("torch", "ray")
WHEELS = {
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu11"),
}
"""The wheels of NCCL and of torch's CUDA runtime; only one of each is installed."""


def read_facts(
    ip: str, interface: str | None = None, gpus: Sequence[str] | None = None, root: Path = Path("/")
) -> Facts:
    """Return the facts of this machine.

    `ip`: its address in Ray. `interface`: used instead of the one that owns `ip`. Raises
    ConfigError if the interface does not exist, LaunchError if no interface has that address.
    """
    known = interfaces()
    name, address = choose_interface(known, ip, interface)
    return Facts(
        hostname=(hostname := socket.gethostname()),
        ip=ip,
        interface=name,
        address=address,
        interfaces=known,
        gpus=None if gpus is None else tuple(gpus),
        cpus=cpus.count_cpus(allowed := cpus.allowed_cpus(root), root),
        numa=cpus.read_numa(allowed, root),
        python=".".join(map(str, sys.version_info[:3])),
        versions=read_versions(),
        environment=site_environment(os.environ, root),
        nccl_conf=nccl_conf(os.environ, root),
        nics=nics.nics(root),
        hcas=hca.read_hcas(root),
        devices=hca.read_gpus(root),
        rdma=hca.read_rdma(os.environ, root),
        limits=machine.read_limits(root),
        machine=machine.machine(hostname, os.environ, root),
    )


def site_environment(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the variables of network, devices and compilers that were set before raydist started.

    Those that Ray set are left out.
    """
    found = {name: value for name, value in sorted(environ.items()) if SITE.fullmatch(name)}
    # Ray sets OMP_NUM_THREADS in its workers (set_omp_num_threads_if_unset).
    if ray_private.raylet_pid(environ):
        first = sysfs.read_text(root / "proc/self/environ").split("\0")
        if not any(each.startswith("OMP_NUM_THREADS=") for each in first):
            found.pop("OMP_NUM_THREADS", None)
    return found


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the numeric addresses of each interface that is up and has one, IPv4 first."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, list[str]] = {}
    for label, own in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is the label of an address of eth0
        for one in own:
            if name in up and one.family in (socket.AF_INET, socket.AF_INET6):
                found.setdefault(name, []).append(one.address.partition("%")[0])
    return {
        name: tuple(sorted(own, key=lambda address: ":" in address)) for name, own in found.items()
    }


def choose_interface(
    known: Mapping[str, Sequence[str]], ip: str, interface: str | None
) -> tuple[str, str]:
    """Return the training interface and its address: the requested one, else the owner of `ip`.

    ConfigError: the requested one is not up, or has link-local addresses of IPv6 only.
    """
    if interface is not None:
        if interface not in known:
            cause = f"{socket.gethostname()} ({ip}) has no such interface that is up"
            raise ConfigError.unknown("fabric.interface", interface, known, cause)
        if all(map(needs_scope, known[interface])):
            cause = f"{socket.gethostname()} has only link-local addresses there"
            usable = [name for name, own in known.items() if not all(map(needs_scope, own))]
            right = [f"fabric.interface={name}" for name in usable if ip in known[name]]
            raise ConfigError.of("fabric.interface", interface, cause, *right, known=usable)
        return interface, ip if ip in known[interface] else best_address(known[interface], ip)
    numeric = resolve(ip)
    for name, own in known.items():
        if numeric in own:
            return name, numeric
    raise LaunchError(
        f"no interface of {socket.gethostname()} has the address {ip} that Ray knows it by; "
        "there is "
        f"{known_settings(known)}. Start Ray with --node-ip-address=<one of these>, or set "
        f"fabric.interface={next(iter(known))}"
    )


def needs_scope(address: str) -> bool:
    """Report whether an address is a link-local one of IPv6, which no program can bind alone."""
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6 and parsed.is_link_local


def best_address(own: Sequence[str], ip: str) -> str:
    """Return the address of an interface that other nodes can reach.

    It is of the family of `ip` if possible.
    """
    version = 6 if ":" in ip else 4
    parsed = [ipaddress.ip_address(address) for address in own]
    return str(min(parsed, key=lambda address: (address.is_link_local, address.version != version)))


def resolve(ip: str) -> str:
    """Return a numeric address; Ray may have been started with a host name."""
    try:
        return str(ipaddress.ip_address(ip))
    except ValueError:
        return str(socket.getaddrinfo(ip, None, type=socket.SOCK_STREAM)[0][4][0])


def known_settings(known: Mapping[str, Sequence[str]]) -> str:
    """Return a text such as `eth0 (10.0.0.5), lo (127.0.0.1, ::1)`."""
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in known.items())


def read_versions() -> dict[str, str]:
    """Return the installed versions, without importing anything."""
    found = {"raydist": __version__}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name, wheels in WHEELS.items():
        for wheel in wheels:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found.setdefault(name, metadata.version(wheel))
    return found


def nccl_conf(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, tuple[str, str]]:
    """Return NCCL's settings in its files, each with the file.

    The user's file overrides the machine's. Source: NCCL 2.30 src/misc/param.cc, initEnvFunc and
    setEnvFile.
    """
    files = [environ.get("NCCL_CONF_FILE") or own_nccl_conf(), "/etc/nccl.conf"]
    found: dict[str, tuple[str, str]] = {}
    for file in filter(None, files):
        try:
            text = (root / file.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for name, value in parse_nccl_conf(text):
            found.setdefault(name, (value, file))
    return found


def own_nccl_conf() -> str:
    """Return the path of NCCL's file in the user's home.

    The home is that of the password database, not HOME. Empty for a uid without an entry.
    """
    try:
        return f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf"
    except KeyError:
        return ""


def parse_nccl_conf(text: str) -> list[tuple[str, str]]:
    """Return the NAME=VALUE lines of an nccl.conf.

    Only a # in the first column begins a comment; blanks are kept.
    """
    lines = [line.partition("=") for line in text.split("\n") if not line.startswith("#")]
    return [(name, value) for name, equals, value in lines if equals]


def gpus_of_driver(root: Path = Path("/")) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES allows, without using CUDA.

    They are counted as Ray does.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(
            [
                one
                for one in visible.split(",")
                if one.strip() and one.strip() not in ("-1", "NoDevFiles")
            ]
        )
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0
