"""A run that has made way goes on from the memory of its nodes, which they free if it does not."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.leftovers import marked, ray_workers
from tests.programs import HEAD, KEEP_WARM_S, Program
from tests.scenarios.test_kept_warm import LIMITED
from tests.scenarios.test_queue import JOB, JOB_WORDS, losses
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    """The address of a Ray with two nodes, which keep fork servers."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYDIST_KEEP_WARM_S", KEEP_WARM_S)
        cluster = Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": 2})
        cluster.add_node(num_cpus=2)
        yield cluster.address
        cluster.shutdown()


def start(folder: Path, address: str, size: str, *words: str) -> Program:
    """Start the job of the queue's tests, with fork servers of the nodes."""
    folder.mkdir()
    (folder / "slowly.py").write_text(JOB.replace("nn.BatchNorm1d(32), ", ""))
    (folder / "limited.py").write_text(LIMITED)
    return Program(folder, *JOB_WORDS, f"scale={size}", *words, address=address, module="limited")


def holders() -> list[int]:
    """Return the processes of this session of tests that have snapshots, and are no ranks."""
    found = []
    for pid, command in marked(os.environ["TMPDIR"]).items():
        if "fork_server" in command and any(
            "memfd:raydist-snapshot" in each for each in descriptors(pid)
        ):
            found.append(pid)
    return found


def descriptors(pid: int) -> list[str]:
    """Return what the open descriptors of a process are."""
    links = []
    with suppress(OSError):  # race: it has just ended
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # race: it has just been closed
                links.append(os.readlink(each))
    return links


def test_a_run_in_shards_goes_on_from_the_memory_of_two_nodes(tmp_path: Path, nodes: str) -> None:
    words = ("queue.exempt_s=0", "parallel=fsdp", "parallel.blocks=Linear")
    run = start(tmp_path / "run", nodes, "2x2", "queue.priority=low", *words)
    run.wait_for_step(2)
    urgent = start(tmp_path / "urgent", nodes, "2x2", "queue.priority=high", *words)
    urgent.wait_for_step(1)
    wait_until(lambda: len(ray_workers("keep_states")) == 2, "both nodes keep the states")
    for checkpoint in (run.run_dir / "checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    for each in (urgent, run):
        (each.folder / "hurry").touch()
        assert each.wait() == 0, each.screen
    (back,) = run.events("restarted")
    assert (back["paused"], back["repeated"]) == (True, 0)
    assert losses(run) == losses(urgent)
    for rank in range(4):
        name = f"weights-{rank}.json"
        assert (run.folder / name).read_text() == (urgent.folder / name).read_text()
    wait_until(lambda: not ray_workers("keep_states") and not holders(), "the memory is free", 120)


def test_the_memory_of_a_run_whose_driver_dies_is_freed(tmp_path: Path, nodes: str) -> None:
    run = start(tmp_path / "run", nodes, "1x2")
    run.wait_for_step(2)
    typed = Program(tmp_path, "pause", "slowly", address=nodes, module="raydist.tools.queue")
    assert typed.wait() == 0, typed.screen
    wait_until(lambda: len(ray_workers("keep_states")) == 1, "the node keeps the state")
    wait_until(lambda: len(holders()) == 1, "its ranks have ended")
    (server,) = holders()
    time.sleep(2)  # its connection is made; without it the state would be held for a minute
    run.signal(signal.SIGKILL)
    run.wait()
    wait_until(lambda: not holders(), "the memory is free", 180)
    assert psutil.pid_exists(server), "it waits for other runs"
