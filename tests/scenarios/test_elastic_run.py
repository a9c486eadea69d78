"""Nodes go and come while a job runs: it continues with fewer, then with more, or a spare takes
over. Real Ray nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from raydist.state import checkpoint_files
from raydist.worker import checkpoint
from tests.horovod_ranks import requires_horovod
from tests.leftovers import server_folders
from tests.programs import HEAD, KEEP_WARM_S, Program
from tests.scenarios.test_drain import LEFT_S, drain

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
JOB = """
import os, time, torch, raydist
from torch import nn
from torch.utils.data import TensorDataset

def job(config):
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(256, 10, generator=generator), torch.randint(3, (256,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 3))  # convex: what rounding does to it dies away
    made = 0

    def loss(output, target):
        nonlocal made
        made += 1  # later steps take longer: it must not end before it is told to go
        time.sleep(0 if os.path.exists("go") else 0.5 if made < 40 else 2)
        return nn.functional.cross_entropy(output, target)

    raydist.fit(config, model=model, train=TensorDataset(inputs, targets), loss=loss)
"""
WORDS = ("job=slow.py", "train.steps=400", "seed=5", "checkpoint.every=100000",
         "data.global_batch=32", "optim=sgd", "optim.lr=0.005")  # fmt: skip
SCRIPT = """
import os, time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
step, go = int(open("at").read()) if os.path.exists("at") else 0, torch.zeros(1)
while not go:
    go += dist.get_rank() == 0 and os.path.exists("go")
    dist.all_reduce(go)
    step += 1
    if dist.get_rank() == 0:
        with open("log", "a") as log:
            print(dist.get_world_size(), step, file=log)
        with open("at.new", "w") as at:
            at.write(str(step))
        os.replace("at.new", "at")
    time.sleep(0.05)
"""
QUICK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,  # one that is gone refuses at once, a busy one is slow
}


KNOWN = """
import os, sys, time
from raydist.cluster import node_history as ledger; from raydist import train

# all nodes here have one address: what sets them apart is which of them the ledger means
noted = [ledger.NodeIncident("", "", "", "lost", run, time.time()) for run in "ab"]
bad = os.environ["BAD"]
ledger.repeat_offenders = lambda all, cluster, nodes, now: {each.id: noted for each in nodes if each.id == bad}
sys.exit(train.main())
"""


class Site:
    """Nodes of one CPU each, the first of them the driver's; and the runs on them."""

    def __init__(self, cluster: Any, tmp: Path) -> None:
        self.cluster, self.tmp = cluster, tmp
        self.added: list[Any] = []
        self.drained: list[Any] = []
        self.runs: list[Program] = []

    def have(self, count: int) -> list[Any]:
        """Return as many nodes besides the first. A node that an earlier test has left serves again:
        Ray takes seconds to start one."""
        while len(self.added) > count:
            self.remove(self.added[-1])
        while len(self.added) < count:
            self.add()
        return list(self.added)

    def add(self, cpus: int = 1) -> Any:
        self.added.append(self.cluster.add_node(num_cpus=cpus))
        return self.added[-1]

    def remove(self, node: Any) -> None:
        self.added.remove(node)
        self.cluster.remove_node(node)

    def drain(self, node: Any) -> None:
        self.added.remove(node)
        self.drained.append(node)
        drain(self.cluster.address, node.node_id)

    def start(self, folder: Path, *words: str, module: str = "raydist.train") -> Program:
        folder.mkdir()
        (folder / "own.py").write_text(SCRIPT)
        (folder / "slow.py").write_text(JOB)
        (folder / "known.py").write_text(KNOWN)
        job = () if any(word.startswith("script=") for word in words) else WORDS
        self.runs.append(
            Program(
                folder,
                "watch.progress=none",
                *job,
                *words,
                address=self.cluster.address,
                module=module,
            )
        )
        return self.runs[-1]

    def servers_of(self, node: str) -> list[str]:
        """Return the folders of the fork servers of a node."""
        return [path for path in server_folders(self.tmp) if path.endswith(node[-8:])]

    def tidy(self) -> None:
        """No run, and no node that leaves."""
        for run in self.runs:
            run.process.kill()
            run.process.wait()
        while self.drained:
            self.cluster.remove_node(self.drained.pop())


@contextmanager
def site_of(folder: Path, head_cpus: int) -> Iterator[Site]:
    """Yield a cluster of one node, whose nodes import what is in this checkout."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        # The nodes' limit for all runs: it is the programs that keep a server for the next one.
        patch.setenv("RAYDIST_KEEP_WARM_S", KEEP_WARM_S)
        args = {**HEAD, "num_cpus": head_cpus, "_system_config": QUICK}
        site = Site(Cluster(initialize_head=True, head_node_args=args), folder)
        yield site
        site.tidy()
        site.cluster.shutdown()


@pytest.fixture(scope="module")
def grounds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    tmp = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp))
        with site_of(tmp, 1) as site:
            yield site


@pytest.fixture
def site(grounds: Site) -> Iterator[Site]:
    yield grounds
    grounds.tidy()


def ended(run: Program) -> dict[str, torch.Tensor]:
    """Let a run finish quickly; return its weights."""
    (run.folder / "go").touch()
    assert run.wait(400) == 0, run.screen
    assert run.leftovers() == []
    model: dict[str, torch.Tensor] = checkpoint.load(Path(run.result()["checkpoint"]))["model"]
    return model


def sizes(run: Program) -> list[int]:
    return [event["world_size"] for event in run.events("plan", "resize")]


def resized(run: Program, *wanted: int) -> None:
    """Return once the run has had these sizes and made a step in the last of them."""
    run.wait_until(lambda: sizes(run) == list(wanted), f"size {wanted[-1]}")
    run.wait_until(lambda: len(run.events("restarted")) == len(wanted) - 1, "step after that")


@pytest.fixture(scope="module")
def whole(grounds: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an unbroken run of one size ends with."""
    return ended(grounds.start(tmp_path_factory.mktemp("whole") / "run", "scale=1x1"))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two runs have seen the same samples: sums in another order differ in the last
    bits."""
    return all(
        torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in {**one, **other}
    )


def sharded_weights(run: Program, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of the last checkpoint, which is in shards; `whole`: of the same shapes."""
    model = {name: torch.zeros_like(value) for name, value in whole.items()}
    load({"model": model}, checkpoint_id=run.result()["checkpoint"])
    return model


def test_a_run_goes_on_with_fewer_nodes_and_with_more_and_avoids_one_of_the_ledger(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.have(3)
    bad = site.add(cpus=4)  # Ray takes the one with the most room first
    monkeypatch.setenv("BAD", bad.node_id)
    run = site.start(tmp_path / "run", "scale=1..3x1", module="known")
    run.wait_for_step(3)
    assert sizes(run) == [3]
    site.remove(node_of(site, run))
    resized(run, 3, 2, 3)
    assert same(ended(run), whole)
    lost, grown = run.events("restarted")
    assert (lost["resized"], grown["resized"], grown["repeated"]) == (False, True, 0)
    assert len(run.result()["restarts"]) == 1
    page = (run.run_dir / "blame-1.txt").read_text()
    assert "fewer nodes: 2 instead of 3" in page
    assert "another node for" not in page
    steps = [
        event["step"]
        for event in run.events("report")
        if event["rank"] == 0 and "loss" in event["values"]
    ]
    assert len(steps) - len(set(steps)) <= lost["repeated"]
    used = [slot["node"] for event in run.events("plan", "resize") for slot in event["slots"]]
    assert bad.node_id not in used
    avoided = {(event["node"], event["avoided"]) for event in run.events("avoid")}
    assert avoided == {(bad.node_id, True)}
    site.remove(bad)


@pytest.mark.timeout(900)
def test_a_run_in_shards_gives_up_a_node_to_an_urgent_one_and_takes_it_again(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    site.have(2)
    queued = ("scale=2..3x1", "queue.shrink=true", "queue.exempt_s=0")
    run = site.start(tmp_path / "run", *queued, "parallel=fsdp", "parallel.blocks=Linear")
    run.wait_for_step(1)
    resized(run, 2, 3)
    # It is alone on its nodes, and would be stopped if the other run could not shrink.
    site.add()
    words = ("scale=1x1", "queue.exempt_s=0", "queue.priority=low")
    other = site.start(tmp_path / "other", *words)
    other.wait_for_step(1)
    urgent = site.start(tmp_path / "urgent", "scale=1x1", "queue.priority=high")
    urgent.wait_for_step(1)
    resized(run, 2, 3, 2)
    assert any("makes way for" in event["text"] for event in run.events("regroup"))
    for each in (urgent, other):
        (each.folder / "go").touch()
        assert each.wait() == 0, each.screen
    resized(run, 2, 3, 2, 3)
    (run.folder / "go").touch()
    assert run.wait(400) == 0, run.screen
    assert same(sharded_weights(run, whole), whole)
    assert not run.events("pause") + other.events("pause")
    assert [event["repeated"] for event in run.events("restarted")] == [0, 0, 0]


@pytest.mark.timeout(900)  # 400 steps of four ranks on a busy machine
def test_a_model_in_shards_goes_on_from_memory_with_fewer_nodes_and_with_more(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    _, third, fourth = site.have(3)
    run = site.start(
        tmp_path / "run",
        "scale=1..4x1",
        "parallel=fsdp",
        "parallel.blocks=Linear",
        "snapshot.every=1",
    )
    run.wait_for_step(3)
    for node, left in ((fourth, 3), (third, 2)):
        site.remove(node)
        resized(run, *range(4, left - 1, -1))
        run.wait_for_step(
            run.events("restarted")[-1]["step"] + 2
        )  # its copies are on the next node then
    site.add()  # both that are gone belong to the run's first placement group
    resized(run, 4, 3, 2, 3)
    site.add()
    resized(run, 4, 3, 2, 3, 4)
    assert run.events("saved") == []  # nothing has gone through the disk
    (run.folder / "go").touch()
    assert run.wait(400) == 0, run.screen
    assert same(sharded_weights(run, whole), whole)
    lost, back = run.events("restarted")[:2], run.events("restarted")[2:]
    assert max(event["repeated"] for event in lost) <= 1
    assert {event["repeated"] for event in back} == {0}


@pytest.mark.parametrize("scale", ["2x1", "1..2x1"])
def test_a_lost_node_keeps_no_other_run_from_being_placed(
    site: Site, tmp_path: Path, scale: str
) -> None:
    """Ray tried to place the lost bundle again without a pause, and no other placement group."""
    site.have(2)
    run = site.start(tmp_path / "run", f"scale={scale}")
    run.wait_for_step(2)
    (other := tmp_path / "other").mkdir()
    half = site.start(other / "half", "scale=1x1", "scale.cpus=0.5")  # no room for a whole CPU
    half.wait_for_step(2)
    used = {slot["node"] for slot in run.events("plan")[0]["slots"]}
    lost = next(node for node in site.added if node.node_id in used)
    site.remove(lost)
    run.wait_until(lambda: bool(run.events("wait", "resize")), "a wait for a node, or a resize")
    following = site.start(other / "next", "scale=1x1", "scale.cpus=0.5")
    for each in (following, half):
        (each.folder / "go").touch()
        assert each.wait() == 0, each.screen
    site.add()
    run.wait_until(lambda: bool(run.events("restarted")), "a restart")
    ended(run)


def test_a_run_that_too_few_nodes_are_left_for_ends_with_its_last_step_on_the_disk(
    site: Site, tmp_path: Path
) -> None:
    (second,) = site.have(1)
    run = site.start(tmp_path / "run", "scale=2..3x1", "scale.wait_s=2", "snapshot.every=1")
    run.wait_for_step(3)
    site.remove(second)
    assert run.wait() == 1
    (failure,), result = run.events("failure"), run.result()
    saved = checkpoint_files.newest(run.run_dir / "checkpoints")
    assert saved is not None
    # One step was in flight. The state may be newer than what the driver knew.
    assert failure["reached"] - saved.step <= 1
    assert result["error"] == "LaunchError"
    assert (
        "gave up after 2 s (scale.wait_s): waiting for 1 more node with 1 CPU" in result["failure"]
    )
    assert run.leftovers() == []


@requires_horovod
def test_horovod_goes_on_with_more_ranks(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    site.have(0)
    run = site.start(
        tmp_path / "run",
        "backend=horovod",
        "scale=1..2x2",
        "scale.cpus=0.5",
        "data.global_batch=30",
    )
    run.wait_for_step(3)
    site.add()
    resized(run, 2, 4)
    assert ended(run).keys() == whole.keys()
    (grown,) = run.events("restarted")
    assert (grown["resized"], grown["repeated"]) == (True, 0)


def drained(run: Program, site: Site, node: Any) -> None:
    """Return once Ray has drained that node and the run continues without it."""
    site.drain(node)
    run.wait_until(lambda: len(run.events("restarted")) == 1, "step after the drain")
    (notice,), (back,), (failure,) = (
        run.events("notice"),
        run.events("restarted"),
        run.events("failure"),
    )
    assert notice["hosts"]
    assert (failure["cause"]["how"], failure["cause"]["preempted"]) == ("drained", True)
    assert back["repeated"] == 0  # all ranks have stopped after the same step
    # on the disk before anybody left, and never placed anew
    happened = [each["kind"] for each in run.events("saved", "placed", "plan")]
    assert happened == ["plan", "saved", "placed"]
    assert run.events("saved")[0]["step"] == failure["reached"] - back["repeated"]


def node_of(site: Site, run: Program) -> Any:
    """Return a node with a rank that is not the first node."""
    used = [slot["node"] for slot in run.events("plan", "takeover")[-1]["slots"]]
    return next(node for node in site.added if node.node_id in used)


def test_spares_take_the_places_of_a_drained_node_and_a_lost_one_with_a_warm_server(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    site.have(3)
    # A server that is kept for other runs is in another folder.
    words = ("scale=2x1", "scale.spares=2", "restart.max=1", "scale.keep_warm_s=0")
    run = site.start(tmp_path / "run", *words)
    run.wait_for_step(3)
    (plan,) = run.events("plan")
    spares = {spare["node"] for spare in plan["spares"]}
    left = node_of(site, run)
    drained(run, site, left)
    (first,) = run.events("takeover")
    (other,) = spares - {first["node"]}
    lost = node_of(site, run)
    run.wait_until(lambda: len(site.servers_of(other)) == 1, "server on the spare")
    warm = site.servers_of(other)
    site.remove(lost)
    run.wait_until(lambda: len(run.events("restarted")) == 2, "step after that")
    assert site.servers_of(other) == warm
    taken = [(event["instead"], event["node"]) for event in run.events("takeover")]
    assert taken == [(left.node_id, first["node"]), (lost.node_id, other)]
    assert same(ended(run), whole)
    assert sizes(run) == [2]
    ends = [(end["how"], end["preempted"]) for end in run.result()["restarts"]]
    assert ends == [("drained", True), ("lost", False)]


def test_another_node_takes_the_place_of_a_drained_one_at_no_budget(
    site: Site, tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    site.have(2)
    # hardly ever a snapshot: the step after which all ranks stop is kept
    words = ("scale=2x1", "restart.max=1", "snapshot.every=1000")
    run = site.start(tmp_path / "run", *words)
    run.wait_for_step(3)
    left = node_of(site, run)
    site.drain(left)
    run.wait_until(lambda: len(run.events("restarted")) == 1, "step after the drain")
    assert same(ended(run), whole)
    (notice,), (first, after) = run.events("notice"), run.events("plan")
    places = [slot["node"] for slot in first["slots"]]
    assert notice["ranks"] == [places.index(left.node_id)]
    assert 0 < notice["s"] <= LEFT_S
    assert left.node_id not in {slot["node"] for slot in after["slots"]}
    (back,), (failure,) = run.events("restarted"), run.events("failure")
    # all ranks have stopped after the same step
    assert (back["number"], back["repeated"]) == (1, 0)
    assert run.events("saved")[0]["step"] == failure["reached"]
    assert [event["reason"] for event in run.events("stop")] == ["its nodes are drained"]
    (end,) = run.result()["restarts"]
    assert (end["rank"], end["how"], end["preempted"]) == (*notice["ranks"], "drained", True)
    page = (run.run_dir / "blame-1.txt").read_text()
    for word in (
        "left its node: Ray drains",
        "nothing has failed",
        "restart 1: all ranks",
        " + save ",
    ):
        assert word in page


def test_a_drained_node_leaves_a_run_that_goes_on_with_fewer_and_scales(
    site: Site, tmp_path: Path
) -> None:
    (second,) = site.have(1)
    words = ("data.resize=scale", "data.batch_size=16", "optim.scaling=linear", "optim.scaling_batch=32",
             "optim.schedule=linear", "optim.warmup=2", "train.steps=null", "train.epochs=8")  # fmt: skip
    run = site.start(tmp_path / "run", "scale=1..2x1", *words, "data.global_batch=null")
    run.wait_for_step(3)
    drained(run, site, second)
    ended(run)
    assert sizes(run) == [2, 1]
    assert [(end["how"], end["preempted"]) for end in run.result()["restarts"]] == [
        ("drained", True)
    ]
    # 16 samples of each rank, and a rate that goes with them: 0.005 is for 32. The schedule goes on
    # from its place: of the 2048 samples the first 64 are the warm-up
    changed = run.events("failure")[0]["reached"] - run.events("restarted")[0]["repeated"]
    reports = {
        each["step"]: each["values"]
        for each in run.events("report")
        if each["rank"] == 0 and "lr" in each["values"]
    }
    for step, values in reports.items():
        assert values["samples"] == 32 * min(step, changed) + 16 * max(0, step - changed)
        batch = 32 if step <= changed else 16
        factor = step / 2 if step <= 2 else 1 - (values["samples"] - batch - 64) / (2048 - 64)
        assert values["lr"] == pytest.approx(0.005 * batch / 32 * factor)
    assert reports[max(reports)]["samples"] == 2048


def test_a_script_goes_on_from_its_own_checkpoint_at_another_size(
    site: Site, tmp_path: Path
) -> None:
    (second,) = site.have(1)
    run = site.start(tmp_path / "run", "script=own.py", "scale=1..2x1")
    run.wait_until(lambda: worlds(run) == [2], "step")
    site.remove(second)
    run.wait_until(lambda: worlds(run) == [2, 1], "step with one rank")
    site.add()
    run.wait_until(lambda: worlds(run) == [2, 1, 2], "step with two ranks")
    (run.folder / "go").touch()
    assert run.wait() == 0, run.screen
    assert (sizes(run), len(run.result()["restarts"])) == ([2, 1, 2], 1)
    steps = [step for _, step in logged(run)]
    assert all(after - before in (0, 1) for before, after in pairwise(steps))


def logged(run: Program) -> list[tuple[int, int]]:
    """World size and number of each step of the script."""
    path = run.folder / "log"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if line.endswith("\n")]


def worlds(run: Program) -> list[int]:
    """Return the world sizes that the script has had."""
    return [size for size, _ in groupby(size for size, _ in logged(run))]
