"""(settings, facts of one node) -> what the site's own settings, and a list of HCAs, do to the network. (pure)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from raydist import fabric_network
from raydist.config import Job
from raydist.findings import Finding
from raydist.node.facts import Facts

SABOTAGE = {
    "NCCL_IB_DISABLE": ("1",), "NCCL_NET": ("socket",), "NCCL_P2P_DISABLE": ("1",), "NCCL_SHM_DISABLE": ("1",),
    "NCCL_NET_PLUGIN": ("none",), "NCCL_ALGO": (), "NCCL_PROTO": (), "NCCL_BUFFSIZE": (), "NCCL_NVLS_ENABLE": ("0",),
    "NCCL_MIN_NCHANNELS": (), "NCCL_MAX_NCHANNELS": (),
}  # fmt: skip
"""Settings that slow a job down or break it; with the values that do, or whatever the value."""
NO_RDMA = ("NCCL_IB_DISABLE", "NCCL_NET")
GLOO = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")


def site(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 10."""
    for name, (value, origin) in settings(job, here).items():
        if name in job.env:
            continue
        bad = SABOTAGE.get(name)
        if bad is not None and (not bad or value.lower() in bad):
            level = "fail" if job.fabric.strict and name in NO_RDMA else "warn"
            yield _found(here, level, f"{name}={value} is set in {origin}",
                         f"remove it there, or overrule it: env.{name}=...")  # fmt: skip
        if name == "NCCL_IB_GID_INDEX" and fabric_network.finds_gid(here):
            yield _found(here, "warn", f"{name}={value} is set in {origin}: NCCL finds it by itself since 2.21, and "
                         "right for each HCA", f"remove it there, or overrule it: env.{name}=-1")  # fmt: skip
        if name == "NCCL_SOCKET_IFNAME" and (text := _interface(value, here)):
            yield _found(here, "fail", f"{name}={value} in {origin}: {text}", f"env.{name}=={here.interface}")
        if name in GLOO and origin == ENVIRONMENT and (text := _exact(value, here)):
            yield _found(here, "fail", f"{name}={value} in {origin}: {text}", f"env.{name}={here.interface}")


ENVIRONMENT = "the environment"


def settings(job: Job, here: Facts) -> Mapping[str, tuple[str, str]]:
    """What is set on the node, {name: (value, where)}: the environment wins over NCCL's files."""
    return {**here.nccl_conf, **{name: (value, ENVIRONMENT) for name, value in here.environment.items()}}


def _found(here: Facts, level: str, text: str, mend: str) -> Finding:
    return Finding("site settings", level, (here.hostname,), text, mend)


def _interface(value: str, here: Facts) -> str:
    """What is wrong with NCCL_SOCKET_IFNAME; empty: nothing. The syntax: NCCL's parseStringList."""
    if value.startswith("^"):
        barred = any("lo".startswith(one) for one in value[1:].removeprefix("=").split(",") if one)
        return "" if barred else "a list that begins with ^ and does not name lo lets NCCL take lo"
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    fits = any(name == one if exact else name.startswith(one) for name in here.interfaces for one in wanted)
    return "" if fits or not here.interfaces else f"there is no such interface ({', '.join(here.interfaces)})"


def _exact(value: str, here: Facts) -> str:
    """What is wrong with gloo's names, which are whole ones; of one character or less they count as unset."""
    gone = [one for one in value.split(",") if one not in here.interfaces]
    if len(value) < 2 or not gone or not here.interfaces:
        return ""
    return f"there is no interface {gone[0]} ({', '.join(here.interfaces)}), and gloo takes whole names only"


def hcas(job: Job, here: Facts) -> Iterator[Finding]:
    """Check 9, of a list that somebody wrote: NCCL_IB_HCA, typed or the site's, and fabric.hca."""
    usual = fabric_network.choose(replace(job, fabric=replace(job.fabric, hca=[])), here)
    odd = dict(usual.aside)
    best = ",".join(hca.name for hca in usual.hcas or here.hcas if hca.active)
    told = dict(settings(job, here))
    if "NCCL_IB_HCA" in job.env:
        told["NCCL_IB_HCA"] = (str(job.env["NCCL_IB_HCA"]), "env.NCCL_IB_HCA")
    value, origin = told.get("NCCL_IB_HCA", ("", ""))
    taken, said = named(value, here), f"NCCL_IB_HCA={value} in {origin}"
    mend = f"'env.NCCL_IB_HCA=\"={best}\"'"
    active = {hca.name for hca in here.hcas if hca.active}
    if value and active and not active & set(taken):
        yield _storage(
            here, "fail", f"{said} names no active HCA ({', '.join(sorted(active))}): NCCL would use TCP", mend
        )
    for one, others in _prefixes(value, here):
        text = f"{said}: without a = before the list {one} also means {', '.join(others)}"
        yield _storage(here, "warn", text, f"'env.NCCL_IB_HCA=\"={value}\"'")
    for names, list_of, way in (
        (taken, said, mend),
        (job.fabric.hca, f"fabric.hca=[{','.join(job.fabric.hca)}]", f"fabric.hca=[{best}]"),
    ):
        if wrong := [f"{name} {odd[name]}" for name in names if name in odd]:
            yield _storage(here, "warn", f"{list_of}: {'; '.join(wrong)}", way)


def _storage(here: Facts, level: str, text: str, mend: str) -> Finding:
    return Finding("storage hcas", level, (here.hostname,), text, mend)


def named(value: str, here: Facts) -> list[str]:
    """The node's HCAs that NCCL_IB_HCA means; its syntax is NCCL's matchIfList, a port after a name is left aside."""
    if not value:
        return []
    names, rest = [hca.name for hca in here.hcas], value.removeprefix("^")
    wanted = [one.partition(":")[0] for one in rest.removeprefix("=").split(",") if one]
    fits = {name for name in names for one in wanted
            if (name == one if rest.startswith("=") else name.startswith(one))}  # fmt: skip
    return [name for name in names if (name in fits) != value.startswith("^")]


def _prefixes(value: str, here: Facts) -> Iterator[tuple[str, list[str]]]:
    """(a name in the list, the other HCAs that it also means); none in an exact list, or in one that leaves out."""
    if value.startswith(("^", "=")):
        return
    listed = [one.partition(":")[0] for one in value.split(",")]
    names = [hca.name for hca in here.hcas]
    for one in listed:
        others = [name for name in names if name.startswith(one) and name not in listed]
        if one in names and others:
            yield one, others
