"""Hosts that lack something: a program trains there, or one line names what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.records import read_events
from tests.rig import Host, Rig, hosts, requires_root
from tests.slow_folder import FUSEPY, SLOW_FOLDER

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900), requires_root]

LAUNCH = "python -m raydist.tools.launch --nproc-per-node 2 sum.py"
TRAIN = "python -m raydist.train group=inline scale=1x2 job=synthetic train.steps=5"
SUM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1000)
dist.all_reduce(total)
print("sum", int(total[0]), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

# As a container's `--user 54321`. The capability stands for an image whose files all may read: this
# checkout may be in a folder of root's.
NOBODY = (
    "setpriv --reuid 54321 --regid 54321 --clear-groups --inh-caps +dac_read_search "
    "--ambient-caps +dac_read_search"
)

SLOW_TORCH = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            time.sleep(LATE_S)

sys.meta_path.insert(0, Slow())
"""
"""The disk that Python is on delivers torch late."""
LATE_S = float(os.environ.get("RAYDIST_TEST_LATE_S", "12"))
"""Seconds for which it does. Twelve are longer than most limits of a launch; 120 were tried too."""


@dataclass(frozen=True)
class Lack:
    """A host that lacks something, and what a command does there."""

    before: str = ""
    """Lines of a shell in mount namespaces of its own, as root, before the command."""
    command: str = LAUNCH
    code: int = 0
    says: str = ""
    """What the only line of the error matches; empty: two ranks train to the end."""
    needs: str = ""
    """What this machine must have for it, as a path."""


# Lacks that can't hide each other share a host.
LACKS = {
    "no HOME, a long TMPDIR, no name for the loopback address, ulimit -n 256": Lack(
        "unset HOME; export TMPDIR=$TMPDIR/$(printf %0120d 0); mkdir $TMPDIR\n"
        "echo 127.0.1.1 $(hostname) >/etc/hosts; ulimit -n 256"
    ),
    "a HOME that can't be written, a TMPDIR mounted noexec, ulimit -s 256": Lack(
        "mount -t tmpfs -o ro none $HOME; mount -t tmpfs -o noexec none $TMPDIR; ulimit -s 256"
    ),
    "a full TMPDIR, localhost of IPv6 only, ulimit -s unlimited": Lack(
        "mount -t tmpfs -o size=1m none $TMPDIR; head -c 2000000 /dev/zero >$TMPDIR/full || :\n"
        "echo ::1 localhost >/etc/hosts; ulimit -s unlimited"
    ),
    "a TMPDIR of 1 MB": Lack("mount -t tmpfs -o size=1m none $TMPDIR", TRAIN),
    "a uid without a password entry, hidepid, ulimit -f 2000": Lack(
        "mount -t proc -o hidepid=2 none /proc; chmod 777 . $TMPDIR; ulimit -f 2000",
        f"env HOME=/ {NOBODY} {TRAIN}",
    ),
    "a TMPDIR and a run folder on a slow file system": Lack(
        "mkdir slow behind; /usr/bin/python3 -I ../slow_folder.py $PWD/behind $PWD/slow >fuse 2>&1 &\n"
        "until grep -q $PWD/slow /proc/mounts; do sleep 0.05; done\n"
        "mkdir slow/tmp slow/runs; export TMPDIR=$PWD/slow/tmp RAYDIST_RUNS=$PWD/slow/runs",
        TRAIN,
        needs=FUSEPY,
    ),
    "a full disk for the run folder": Lack(
        "mkdir full; mount -t tmpfs -o size=64k none full; export RAYDIST_RUNS=$PWD/full\n"
        "head -c 100000 /dev/zero >full/all || :",
        code=2,
        says=r"hydra\.run\.dir=.*/full/.*: nothing can be written there \(No space left on device\)"
        r".*set hydra\.run\.dir=FOLDER",
    ),
    # How far a run comes depends on the user's other processes: each step refuses it in its own way.
    **{
        f"ulimit -u {limit}": Lack(
            "chmod 777 . $TMPDIR",
            f"prlimit --nproc={limit} {NOBODY} {LAUNCH}",
            code=1,
            says=r"the kernel refuses another process or thread: .*ulimit -u.*--pids-limit",
        )
        for limit in (1, 5)
    },
    "no IPv4 at all": Lack(
        "ip -4 addr show | awk '/inet/ {print $2, $NF}' | while read each nic; do\n"
        "ip addr del $each dev $nic; done; echo ::1 localhost >/etc/hosts"
    ),
    "no loopback interface": Lack(
        "ip link set lo down",
        code=1,
        says=r"no loopback address.*: ip link set dev lo up",
    ),
    "Python on a slow disk": Lack(
        "mkdir late; cp ../late_torch.py late/sitecustomize.py; export PYTHONPATH=late:$PYTHONPATH"
    ),
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment |= {"PYTHONPATH": str(ROOT), "RAYDIST_KEEP_WARM_S": "5"}
        yield rig


@pytest.fixture(scope="module")
def bare(rig: Rig) -> Host:
    """The host on which no Ray runs."""
    host = rig.hosts[2]
    write(host, "slow_folder.py", SLOW_FOLDER.read_text())
    write(host, "late_torch.py", f"LATE_S = {LATE_S}\n{SLOW_TORCH}")
    return host


def write(host: Host, name: str, text: str) -> None:
    (host.folder / name).write_text(text)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("lacking", LACKS)
def test_a_host_that_lacks_something(bare: Host, lacking: str) -> None:
    lack = LACKS[lacking]
    if lack.needs and not Path(lack.needs).exists():
        pytest.skip(f"no {lack.needs} here: apt-get install python3-fusepy")
    folder = bare.folder / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "sum.py").write_text(SUM)
    own_net = "--net" if "ip " in lack.before else "--mount"
    lo_up = "ip link set lo up" if own_net == "--net" else ""
    own_hosts = "cp /etc/hosts hosts; mount --bind hosts /etc/hosts"
    script = "\n".join(["set -e", own_hosts, lo_up, lack.before, lack.command])
    command = ["unshare", "--mount", own_net, "bash", "-c", script]
    done = bare.run(command, cwd=folder, check=False, timeout=400 + LATE_S)
    screen = done.stdout + done.stderr
    assert done.returncode == lack.code, screen
    if lack.says:
        assert re.search(f"^error: .*{lack.says}", last_line(done.stderr)), screen
        assert "Traceback" not in screen
    elif TRAIN in lack.command:
        assert "step 5/5" in screen
    else:
        assert done.stdout.count("sum 2") == 2, screen


@pytest.fixture(scope="module")
def pair(rig: Rig) -> Rig:
    """A Ray on two hosts with one name, of which the second's clock is an hour ahead."""
    first, second = rig.hosts[:2]
    for host in (first, second):
        host.run(["sh", "-c", "hostname node; echo 127.0.1.1 node >>/etc/hosts"])
    pair = Rig([first], rig.switch, rig.gateway)
    pair.ray_up(cpus=1)
    write(second, "sitecustomize.py", AN_HOUR_AHEAD)
    pair.ray_join(second, cpus=1, env={"PYTHONPATH": f"{second.folder}:{ROOT}"})
    pair.hosts = [first, second]
    return pair


AN_HOUR_AHEAD = """
import time

def ahead(read, seconds):
    return lambda: read() + seconds

time.time = ahead(time.time, 3600)
time.time_ns = ahead(time.time_ns, 3600 * 10**9)
"""
"""The clock of the Python programs of a host: raydist reads no other. Ray's own part would wait an
hour where it waits for a time of day, as libfaketime makes it."""


def train(pair: Rig, *words: str, code: int = 0) -> tuple[str, str, Path]:
    """Train on both hosts; return the screen, the last line of the errors, and the run folder."""
    first = pair.hosts[0]
    folder = first.folder / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = ["python", "-m", "raydist.train", "scale=2x1", "job=synthetic", "train.steps=5"]
    try:
        done = first.run([*command, *words], cwd=folder, check=False, timeout=400)
    except subprocess.TimeoutExpired:
        for events in folder.glob("runs/*/*/events.jsonl"):
            print(events.read_text())  # pytest shows it: how far the run came
        raise
    screen = done.stdout + done.stderr
    assert done.returncode == code, screen
    (run,) = folder.glob("runs/*/*")
    return screen, last_line(done.stderr or screen), run


@pytest.mark.ray
@pytest.mark.skipif(not shutil.which("nft"), reason="apt-get install nftables")
def test_a_firewall_that_drops_is_named_before_a_rank_starts(pair: Rig) -> None:
    first, second = pair.hosts
    rules = "table inet f { chain i { type filter hook input priority 0; iifname ib0 drop; }; }"
    second.run(["nft", rules])
    try:
        screen, error, run = train(pair, "fabric.interface=ib0", code=1)
    finally:
        second.run(["nft", "delete table inet f"])
    way = rf"\({first.address('ib0')}\) -> .*\({second.address('ib0')}\)"
    assert re.search(rf"^error: .*{way}: no answer within 10 s: a firewall", error), screen
    assert not rank_started(run)


@pytest.mark.ray
@pytest.mark.skipif(not shutil.which("nft"), reason="apt-get install nftables")
def test_a_node_that_accepts_and_does_not_answer_is_named(pair: Rig) -> None:
    second = pair.hosts[1]
    # A firewall that passes connections and no data looks like a node that is too busy.
    rule = "iifname ib0 tcp flags & psh == psh drop"
    second.run(
        ["nft", f"table inet f {{ chain i {{ type filter hook input priority 0; {rule}; }}; }}"]
    )
    try:
        screen, _, run = train(pair, "fabric.interface=ib0", "backend.timeout_s=10", code=1)
    finally:
        second.run(["nft", "delete table inet f"])
    way = rf"node.* -> node.* \({second.address('ib0')}\)"
    assert re.search(rf"{way}: connected, then no answer within 30 s; the ranks start", screen)
    assert rank_started(run)


@pytest.mark.ray
def test_a_path_that_drops_long_packets_is_named_before_a_rank_starts(pair: Rig) -> None:
    second = pair.hosts[1]
    pair.switch.ip(f"link set {second.port('ib0')} mtu 1400")
    for host in pair.hosts:  # a veth lets a bundle pass that no wire would
        host.run(["ip", "link", "set", "ib0", "gso_max_segs", "1"])
    try:
        screen, error, run = train(pair, "fabric.interface=ib0", code=1)
    finally:
        pair.switch.ip(f"link set {second.port('ib0')} mtu 1500")
    assert re.search(r"^error: .*64 KiB did not come back.*ip link set dev ib0 mtu 1400", error), (
        screen
    )
    assert not rank_started(run)


@pytest.mark.ray
def test_two_hosts_with_one_name_and_two_times_of_day_train_on_ipv6_only(pair: Rig) -> None:
    for number, host in enumerate(pair.hosts, 1):
        host.run(["ip", "addr", "flush", "dev", "ib0", "scope", "global"])
        host.run(["ip", "addr", "add", f"fd00::{number}/64", "dev", "ib0", "nodad"])
    before = [host.bytes("ib0")[1] for host in pair.hosts]
    screen, _, run = train(pair, "fabric.interface=ib0")
    assert "step 5/5" in screen
    for host, sent in zip(pair.hosts, before, strict=True):
        assert host.bytes("ib0")[1] - sent > 100_000
    for host in pair.hosts:
        assert f"node ({host.address()})" in screen
    assert re.search(r"the clock of node.* is 3[56]\d\d\.\d s ahead of that of node", screen)
    result = json.loads((run / "result.json").read_text())
    times = [*result["launch"].values(), *result["spent"].values(), result["wall_s"]]
    assert all(0 <= seconds < 600 for seconds in times), result


def rank_started(run: Path) -> bool:
    """Return whether a rank of this run was forked."""
    return any(happened["kind"] == "began" for happened in read_events(run / "events.jsonl"))
