"""Hosts on one machine, with separate addresses, NICs, names, files and processes, and a Ray
cluster on them. (driver)

    with hosts(3) as rig:
        rig.ray_up(cpus=2)
        rig.hosts[0].run(["python", "-m", "raydist.train", "scale=cluster"])
        rig.cut(rig.hosts[2])

Each host is a set of Linux namespaces. Its NICs are connected to a switch in a separate network
namespace, so the firewall and bridges of the machine do not act between hosts. The machine itself
sees only one NIC `rig<n>` and one folder. `python -m tests.rig 3` gives a shell
on the first of three hosts. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.rig.host import Host
from tests.rig.namespaces import CommandFailed
from tests.rig.network import QUICK_DEATH, Rig, hosts

__all__ = ["QUICK_DEATH", "CommandFailed", "Host", "Rig", "hosts", "requires_root"]

requires_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "mount"))),
    reason="hosts are made of network namespaces: run as root, with iproute2 and mount installed",
)
