"""(settings, facts of a node) -> problems with the site's variables and lists of HCAs. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from raydist.network import rdma
from raydist.network.facts import Facts
from raydist.network.finding import Finding
from raydist.settings.config import Job

HARMFUL = {
    "NCCL_IB_DISABLE": ("1",),
    "NCCL_NET": ("socket",),
    "NCCL_P2P_DISABLE": ("1",),
    "NCCL_SHM_DISABLE": ("1",),
    "NCCL_NET_PLUGIN": ("none",),
    "NCCL_ALGO": (),
    "NCCL_PROTO": (),
    "NCCL_BUFFSIZE": (),
    "NCCL_NVLS_ENABLE": ("0",),
    "NCCL_MIN_NCHANNELS": (),
    "NCCL_MAX_NCHANNELS": (),
}
"""Variables that slow a job down or break it -> the harmful values; empty: any value."""
NO_RDMA = ("NCCL_IB_DISABLE", "NCCL_NET")
GLOO = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
ENVIRONMENT = "the environment"


def check_site(job: Job, node: Facts) -> Iterator[Finding]:
    """Find variables set on the node that slow a job down or keep it from its network."""
    for name, (value, origin) in site_settings(job, node).items():
        if name in job.env:
            continue
        harmful = HARMFUL.get(name)
        if harmful is not None and (not harmful or value.lower() in harmful):
            level = "fail" if job.fabric.strict and name in NO_RDMA else "warn"
            yield _site_finding(
                node,
                level,
                f"{name}={value} is set in {origin}",
                f"remove it there, or override it: env.{name}=...",
            )
        if name == "NCCL_IB_GID_INDEX" and rdma.nccl_finds_gid(node):
            yield _site_finding(
                node,
                "warn",
                f"{name}={value} is set in {origin}: since 2.21 NCCL itself finds each HCA's index",
                f"remove it there, or override it: env.{name}=-1",
            )
        if name == "NCCL_SOCKET_IFNAME" and (problem := _nccl_interface_problem(value, node)):
            yield _site_finding(
                node,
                "fail",
                f"{name}={value} in {origin}: {problem}",
                f"env.{name}=={node.interface}",
            )
        if (
            name in GLOO
            and origin == ENVIRONMENT
            and (problem := _gloo_interface_problem(value, node))
        ):
            yield _site_finding(
                node,
                "fail",
                f"{name}={value} in {origin}: {problem}",
                f"env.{name}={node.interface}",
            )


def check_gloo_overridden(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a value of the site that keeps gloo from fabric.interface."""
    if job.fabric.interface and job.fabric.kind != "site":
        names = GLOO if job.backend.name == "horovod" else GLOO[:1]
        planned = [(name, node.interface) for name in names]
        yield from _overridden(job, node, f"fabric.interface={job.fabric.interface}", planned)


def check_nccl_overridden(job: Job, node: Facts) -> Iterator[Finding]:
    """Find a value of the site that keeps NCCL from fabric.interface, .hca or .kind=ethernet."""
    fabric = job.fabric
    if fabric.interface and fabric.kind != "site":
        planned = [("NCCL_SOCKET_IFNAME", f"={node.interface}")]
        yield from _overridden(job, node, f"fabric.interface={fabric.interface}", planned)
    if fabric.hca:
        hcas = ",".join(fabric.hca)
        yield from _overridden(job, node, f"fabric.hca=[{hcas}]", [("NCCL_IB_HCA", f"={hcas}")])
    if fabric.kind == "ethernet":
        planned = [("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")]
        yield from _overridden(job, node, "fabric.kind=ethernet", planned)


def _overridden(
    job: Job, node: Facts, setting: str, planned: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield a finding for each planned variable for which the site has another value."""
    site = site_settings(job, node)
    for name, value in planned:
        if name in job.env or name not in site:
            continue
        own, origin = site[name]
        if _meaning(name, own, node) != _meaning(name, value, node):
            text = f"{name}={own} is set in {origin}, and wins over {setting}"
            fix = f"'env.{name}=\"{value}\"'" if "," in value else f"env.{name}={value}"
            yield _site_finding(node, "warn", text, fix)


def _meaning(name: str, value: str, node: Facts) -> object:
    """Return what a value of a variable selects on this node."""
    if name == "NCCL_IB_HCA":
        return names_in_value(value, node)
    if name == "NCCL_SOCKET_IFNAME" and node.interfaces:
        return _selected(value, list(node.interfaces))
    return value.lower() if name == "NCCL_NET" else value


def site_settings(job: Job, node: Facts) -> Mapping[str, tuple[str, str]]:
    """Return the variables that are set on the node: {name: (value, origin)}.

    The environment takes precedence over NCCL's files.
    """
    return {
        **node.nccl_conf,
        **{name: (value, ENVIRONMENT) for name, value in node.environment.items()},
    }


def _site_finding(node: Facts, level: str, text: str, fix: str) -> Finding:
    return Finding("site settings", level, (node.hostname,), text, fix)


def _nccl_interface_problem(value: str, node: Facts) -> str:
    """Return the problem of a value of NCCL_SOCKET_IFNAME; empty if it has none.

    Syntax: NCCL's parseStringList.
    """
    if value.startswith("^"):
        no_loopback = any(
            "lo".startswith(name) for name in value[1:].removeprefix("=").split(",") if name
        )
        return (
            ""
            if no_loopback
            else "a list that begins with ^ and does not name lo lets NCCL take lo"
        )
    exact, names = value.startswith("="), value.removeprefix("=").split(",")
    fits = any(
        real == name if exact else real.startswith(name)
        for real in node.interfaces
        for name in names
    )
    return (
        ""
        if fits or not node.interfaces
        else f"the node has no such interface ({', '.join(node.interfaces)})"
    )


def _gloo_interface_problem(value: str, node: Facts) -> str:
    """Return the problem of gloo's interface names; empty if they have none.

    They have no prefixes, and gloo ignores values of one character or less.
    """
    unknown = [name for name in value.split(",") if name not in node.interfaces]
    if len(value) < 2 or not unknown or not node.interfaces:
        return ""
    return (
        f"the node has no interface {unknown[0]} ({', '.join(node.interfaces)}); gloo takes "
        "whole names only"
    )


def check_hcas(job: Job, node: Facts) -> Iterator[Finding]:
    """Check lists of HCAs that a person wrote.

    They are NCCL_IB_HCA (of the job or of the site) and fabric.hca.
    """
    usual = rdma.choose_devices(replace(job, fabric=replace(job.fabric, hca=[])), node)
    reasons = dict(usual.aside)
    best = ",".join(hca.name for hca in usual.hcas or node.hcas if hca.active)
    settings = dict(site_settings(job, node))
    if "NCCL_IB_HCA" in job.env:
        settings["NCCL_IB_HCA"] = (str(job.env["NCCL_IB_HCA"]), "env.NCCL_IB_HCA")
    value, origin = settings.get("NCCL_IB_HCA", ("", ""))
    named, setting = names_in_value(value, node), f"NCCL_IB_HCA={value} in {origin}"
    fix = f"'env.NCCL_IB_HCA=\"={best}\"'"
    active = {hca.name for hca in node.hcas if hca.active}
    if value and active and not active & set(named):
        text = f"{setting} names no active HCA ({', '.join(sorted(active))}): NCCL would use TCP"
        yield _storage_finding(node, "fail", text, fix)
    for prefix, others in _prefixes(value, node):
        text = f"{setting}: without a = before the list {prefix} also selects {', '.join(others)}"
        yield _storage_finding(node, "warn", text, f"'env.NCCL_IB_HCA=\"={value}\"'")
    for names, source, source_fix in (
        (named, setting, fix),
        (job.fabric.hca, f"fabric.hca=[{','.join(job.fabric.hca)}]", f"fabric.hca=[{best}]"),
    ):
        if unfit := [f"{name} {reasons[name]}" for name in names if name in reasons]:
            yield _storage_finding(node, "warn", f"{source}: {'; '.join(unfit)}", source_fix)


def _storage_finding(node: Facts, level: str, text: str, fix: str) -> Finding:
    return Finding("storage hcas", level, (node.hostname,), text, fix)


def names_in_value(value: str, node: Facts) -> list[str]:
    """Return the node's HCAs that a value of NCCL_IB_HCA selects; ports are ignored."""
    return _selected(value, [hca.name for hca in node.hcas])


def _selected(value: str, devices: Sequence[str]) -> list[str]:
    """Return the devices that a list of names selects. Syntax: NCCL's matchIfList."""
    if not value:
        return []
    names = value.removeprefix("^")
    listed = [entry.partition(":")[0] for entry in names.removeprefix("=").split(",") if entry]
    fits = {
        device
        for device in devices
        for entry in listed
        if (device == entry if names.startswith("=") else device.startswith(entry))
    }
    return [device for device in devices if (device in fits) != value.startswith("^")]


def _prefixes(value: str, node: Facts) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of an HCA in the list, other HCAs whose names begin with it).

    None for lists with = or ^.
    """
    if value.startswith(("^", "=")):
        return
    listed = [entry.partition(":")[0] for entry in value.split(",")]
    hcas = [hca.name for hca in node.hcas]
    for entry in listed:
        others = [hca for hca in hcas if hca.startswith(entry) and hca not in listed]
        if entry in hcas and others:
            yield entry, others
