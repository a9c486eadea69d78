"""`raydist stacks` of ranks that are odd in each of five ways, on other hosts than the driver's."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rig import Rig, hosts, requires_root
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    requires_root,
]
PATIENCE_S = 600.0
ODD = """
    import ctypes, os, signal, time
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Stuck(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            time.sleep(3600)

    def load():
        for batch in DataLoader(Stuck(), num_workers=1):
            print(batch)

    def wait_for_all():
        dist.all_reduce(torch.ones(3))

    def loop():
        while True: time.time()

    def hold_the_gil():
        while True: ctypes.PyDLL(None).sleep(3600)

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    wait_for_all()
    print("rank", rank, "has met the others", flush=True)
    odd = {2: loop, 3: hold_the_gil, 4: load, 5: lambda: os.kill(os.getpid(), signal.SIGSTOP)}
    odd.get(rank, wait_for_all)()
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with hosts(3) as rig:
        for host in rig.hosts:
            host.environment["PYTHONPATH"] = str(ROOT)
        rig.ray_up(cpus=3, head_cpus=0)  # the driver is on the first host, and no rank
        yield rig


def test_stacks_of_odd_ranks_on_other_hosts(rig: Rig, tmp_path: Path) -> None:
    first, *others = rig.hosts
    (tmp_path / "odd.py").write_text(textwrap.dedent(ODD))
    words = ["script=odd.py", "scale=2x3", "hang.end=false", f"hydra.run.dir={tmp_path}/run"]
    argv = ["python", "-m", "raydist.cli"]
    screen = tmp_path / "screen.txt"
    with screen.open("w") as log:
        driver = first.popen([*argv, "train", *words], cwd=tmp_path, stdout=log, stderr=log)

    def operate(*words: str) -> subprocess.CompletedProcess[str]:
        return first.run([*argv, *words], cwd=tmp_path, check=False, timeout=PATIENCE_S)

    try:
        met = "has met the others"
        wait_until(lambda: screen.read_text().count(met) == 6, screen.read_text, PATIENCE_S)
        wait_until(
            lambda: "stopped by a signal" in operate("ranks", "run").stdout, "SIGSTOP", PATIENCE_S
        )
        wait_until(
            lambda: "data loader" in operate("stacks", "run", "rank=4").stdout, "it", PATIENCE_S
        )
        rows = map(json.loads, operate("ranks", "run", "--json").stdout.splitlines())
        assert [row["host"] for row in rows] == [host.name for host in others for _ in range(3)]
        done = operate("stacks", "run")
        said = {text.partition(":")[0]: text for text in re.split(r"\n(?=ranks? )", done.stdout)}
        assert next(iter(said)) == "rank 5", done.stderr  # the one that is stopped
        assert said.keys() == {"ranks 0-1", *(f"rank {n}" for n in range(2, 6))}
        line = {text.strip(): n for n, text in enumerate(textwrap.dedent(ODD).splitlines(), 1)}
        for ranks, place, way in (
            (
                "ranks 0-1",
                f"all_reduce at odd.py:{line['dist.all_reduce(torch.ones(3))']}",
                "thread",
            ),
            ("rank 2", f"odd.py:{line['while True: time.time()']}", "by a thread"),
            ("rank 3", f"odd.py:{line['while True: ctypes.PyDLL(None).sleep(3600)']}", "in C"),
            ("rank 4", "waits for its data loader at odd.py", "by a thread"),
            ("rank 5", "stopped by a signal (SIGSTOP); kill -CONT", ""),
        ):
            head, _, rest = said[ranks].partition("\n")
            assert place in head
            assert way in rest
        assert f"on {others[0].name}, pid" in said["rank 2"]
        assert f"on {others[1].name}, pid" in said["rank 4"]
        assert "waits in all_reduce of [[3]]" in said["ranks 0-1"]
    finally:
        driver.kill()
        driver.wait()
