"""Fork servers stay between the commands of a person, on this machine and on the nodes of a Ray."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.leftovers import ended, idle_servers, remaining_processes, server_folders
from tests.programs import HEAD, KEEP_WARM_S, Program
from tests.waiting import wait_until

PARENT = """
import os, sys, time
print("parent", os.getppid(), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYDIST_KEEP_WARM_S", KEEP_WARM_S)
    (tmp_path / "parent.py").write_text(PARENT)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))  # the nodes have more: this driver's server is not for them
from raydist import train
sys.exit(train.main())
"""


def parents(program: Program) -> set[int]:
    return {int(pid) for pid in re.findall(r"parent (\d+)", program.screen)}


def again(
    program: Program, *words: str, address: str | None = None, module: str = "raydist.train"
) -> Program:
    """Start another command of the same person."""
    return Program(program.folder, *words, address=address, module=module, tmp=program.tmp)


WORDS = ("script=parent.py", "args=0", "scale=1x2")


def test_the_second_command_finds_the_server_of_the_first(tmp_path: Path) -> None:
    first = Program(tmp_path, *WORDS, alone=True)
    assert first.wait() == 0, first.screen
    (server,) = parents(first)
    # on a busy machine it notices later that the command has ended
    wait_until(lambda: idle_servers(first.tmp) == {server}, "the server waits")
    for _ in range(3):  # one that does not answer within CLAIM_S on a busy machine is passed over
        second = again(first, *WORDS)
        assert second.wait() == 0, second.screen
        if parents(second) == {server}:
            break
    assert parents(second) == {server}
    killed = again(first, "script=parent.py", "args=100", "scale=1x2")
    killed.wait_until(lambda: "parent" in killed.screen, "a rank")
    killed.signal(signal.SIGKILL)
    killed.wait()
    listed = again(first, module="raydist.tools.warm")
    assert listed.wait() == 0
    assert re.search(rf" {server} .* MiB  (waits|in use)$", listed.screen, re.MULTILINE), (
        listed.screen
    )
    third = again(first, *WORDS)
    assert third.wait() == 0, third.screen
    assert len(parents(third)) == 1
    other = again(first, *WORDS, "scale.keep_warm_s=0")
    assert other.wait() == 0, other.screen
    until_end = again(first, "--end", module="raydist.tools.warm")
    assert until_end.wait() == 0
    assert "ended" in until_end.screen
    assert remaining_processes(str(first.tmp)) == []
    assert [path for path in server_folders(first.tmp) if not path.endswith("-warm")] == []


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray whose nodes keep fork servers, unlike that of the other tests."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**HEAD, "num_cpus": 2})
    yield cluster
    cluster.shutdown()


def children(cluster: Any) -> dict[int, str]:
    """Return the title of each process that the raylet of the only node has started, by pid."""
    result = {}
    for each in psutil.Process(cluster.head_node.all_processes["raylet"][0].process.pid).children():
        with suppress(psutil.Error, IndexError):  # it has just ended
            result[each.pid] = each.cmdline()[0]
    return result


def idle(cluster: Any) -> set[int]:
    """Return the workers that have nothing to do."""
    return {pid for pid, title in children(cluster).items() if title.startswith("ray::IDLE")}


@pytest.mark.ray
def test_the_next_actor_begins_in_a_worker_that_waits(tmp_path: Path, own_ray: Any) -> None:
    """Ray starts it at the end of a run, in parallel."""
    first = Program(
        tmp_path, "script=parent.py", "args=3", "scale=1x2", address=own_ray.address, alone=True
    )
    first.wait_until(lambda: bool(parents(first)), "a rank")
    before = children(own_ray)
    assert first.wait() == 0, first.screen
    waiting = set[int]()

    def one_waits() -> bool:
        waiting.update(pid for pid in idle(own_ray) if pid not in before)
        return bool(waiting)

    wait_until(one_waits, "a worker waits")
    second = again(first, "script=parent.py", "args=100", "scale=1x2", address=own_ray.address)
    second.wait_until(lambda: bool(parents(second)), "a rank")
    assert waiting & children(own_ray).keys() - idle(own_ray), "no actor began in it"
    second.signal(signal.SIGTERM)
    assert second.wait() == 143
    own_ray.shutdown()
    # the driver's server too: its run was on this Ray
    assert remaining_processes(str(first.tmp)) == []
    assert [path for path in server_folders(first.tmp) if not path.endswith("-warm")] == []


@pytest.mark.ray
def test_the_nodes_of_a_ray_keep_theirs_until_it_ends(tmp_path: Path, own_ray: Any) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    at = {"address": own_ray.address, "module": "limited"}
    first = Program(tmp_path, *WORDS, **at, alone=True)
    assert first.wait() == 0, first.screen
    (server,) = parents(first)  # now: all programs of a folder write the same screen.txt

    def is_listed() -> bool:
        listed = again(first, address=own_ray.address, module="raydist.tools.warm")
        assert listed.wait() == 0, listed.screen
        return bool(re.search(rf" {server} .* MiB  waits$", listed.screen, re.MULTILINE))

    wait_until(is_listed, lambda: f"{server} waits:\n{first.screen}")
    kept, found = {server}, set[int]()
    for _ in range(3):  # one that does not answer within CLAIM_S on a busy machine is passed over
        kept |= found
        second = again(first, *WORDS, **at)
        assert second.wait() == 0, second.screen
        found = parents(second)
        if found <= kept:
            break
    assert found
    assert found <= kept
    wait_until(is_listed, lambda: f"{server} waits:\n{first.screen}")
    own_ray.shutdown()
    assert ended(server)
    again(first, "--end", module="raydist.tools.warm").wait()  # the driver's own
    assert remaining_processes(str(first.tmp)) == []
