"""The plan tool: what would run where, said before anything is started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import connect, gcs, local_ray, placement, ray_private
from raydist.cluster.nodes import Node, NodeType
from raydist.network import variables
from raydist.network.names import EnvVar
from raydist.node import probe
from raydist.settings.config import Backend, Job, Scale
from raydist.tools import plan
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has no Ray, whatever else runs on it, and whatever an earlier test was connected
    to."""
    import ray

    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name in [
        name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "OMP_", "CUDA_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return the output of the tool, or its error output if it fails."""
    assert plan.main(words) == code
    out, err = capsys.readouterr()
    return err if code else out


def data(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    return json.loads(output_of(capsys, *words, "--json"))


def on_nodes(
    monkeypatch: pytest.MonkeyPatch, nodes: Sequence[Node], types: Sequence[NodeType] = ()
) -> None:
    """Let these be the nodes of the cluster."""
    monkeypatch.setattr(
        plan, "view_cluster", lambda job: plan.ClusterView(nodes, types, "a cluster")
    )


def node(i: int, gpu: float = 0, cpu: float = 8, free: dict[str, float] | None = None) -> Node:
    have = {"CPU": cpu, **({"GPU": gpu} if gpu else {})}
    return Node(f"id-{i}", f"203.0.113.{i}", f"node-{i}", have, have if free is None else free)


def test_without_a_cluster_it_pictures_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys)
    assert "this machine; no Ray is running" in text
    assert "2 ranks on 1 node, backend gloo" in text
    assert "STRICT_SPREAD: 1 bundle of 2 CPU" in text
    assert variables.LATER in text


def test_it_starts_nothing_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import ray

    output_of(capsys, "scale=1x4", "--json")
    assert list(tmp_path.iterdir()) == []
    assert not ray.is_initialized()


def test_the_variables_are_those_that_the_run_will_set(capsys: pytest.CaptureFixture[str]) -> None:
    planned = data(capsys, "scale=1x3", "seed=5")
    assert (planned["world_size"], planned["backend"], planned["placement"]) == (
        3,
        "gloo",
        "STRICT_SPREAD",
    )
    assert planned["bundles"] == [{"CPU": 3}]
    assert [slot["local_rank"] for slot in planned["slots"]] == [0, 1, 2]
    own = {var["name"]: var for var in planned["variables"][2]}
    assert (own["RANK"]["value"], own["WORLD_SIZE"]["value"]) == ("2", "3")
    interface = own["GLOO_SOCKET_IFNAME"]["value"]
    assert own["MASTER_ADDR"]["value"] in probe.interfaces()[interface]
    assert "the node's address in Ray" in own["GLOO_SOCKET_IFNAME"]["reason"]
    assert "/runs/digits/" in own["RAYDIST_RUN_DIR"]["value"]


def test_more_ranks_than_cpus_fit_a_ray_of_its_own_as_in_a_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert data(capsys, "scale=1x40")["world_size"] == 40


def test_more_nodes_than_there_are_is_an_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "scale=3x2")
    assert "assuming 3 nodes like this one" in text
    assert "6 ranks on 3 nodes" in text
    assert "every rank on node-3 (<address of node-3>)" in text
    assert "=<interface of node-3>" in text


def test_spares_are_nodes_without_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "scale=2x1", "scale.spares=1")
    assert "assuming 3 nodes like this one" in text
    assert "2 ranks on 2 nodes, 1 spare (node-3; warm" in text
    assert "STRICT_SPREAD: 3 bundles" in text


def test_a_remote_nodes_interface_is_not_known_before_it_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nodes(monkeypatch, [node(1, gpu=4), node(2, gpu=4)])
    planned = data(capsys, "scale=2x4")
    assert planned["backend"] == "nccl"
    own = {var["name"]: var["value"] for var in planned["variables"][4]}
    assert own["GLOO_SOCKET_IFNAME"] == "<interface of 203.0.113.2>"
    assert own["MASTER_ADDR"] == "203.0.113.1"
    assert own["CUDA_VISIBLE_DEVICES"] == "<the 4 GPUs that Ray assigns>"
    with_interface = data(capsys, "scale=2x4", "fabric.interface=ib0")
    own = {var["name"]: var["value"] for var in with_interface["variables"][4]}
    assert own["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert own["MASTER_ADDR"] == "<address of ib0 on node-1>"


def test_each_variable_is_printed_once_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "scale=2x2")
    everywhere, first, second, each, _ = text.split("\n\n")[1:]
    assert everywhere.startswith("every rank\n")
    assert "\n  WORLD_SIZE " in everywhere
    assert "GROUP_RANK" not in everywhere
    assert re.search(r"\n  GROUP_RANK +0 ", first)
    assert re.search(r"\n  GROUP_RANK +1 ", second)
    assert each.splitlines()[:5] == [
        "each rank",
        "  RANK  LOCAL_RANK  ROLE_RANK",
        "  0     0           0",
        "  1     1           1",
        "  2     0           2",
    ]
    assert text.count("WORLD_SIZE ") == len(["WORLD", "LOCAL_WORLD", "GROUP_WORLD", "ROLE_WORLD"])


def test_many_ranks_and_nodes_are_folded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nodes(monkeypatch, [node(i) for i in range(1, 201)])
    text = output_of(capsys, "scale=200x8")
    assert "1600 ranks on 200 nodes" in text
    assert "... and 192 more nodes: --json has all" in text
    assert "... and 1584 more ranks: --json has all" in text
    assert len(text.splitlines()) < 150
    assert len(data(capsys, "scale=200x8")["variables"]) == 1600


def test_secrets_stay_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["env.WANDB_API_KEY=hush"], ["env.WANDB_API_KEY=hush", "--json"]):
        text = output_of(capsys, *words)
        assert "WANDB_API_KEY" in text
        assert "***" in text
        assert "hush" not in text


def test_init_method_file_has_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    planned = data(capsys, "init_method=file", f"hydra.run.dir={tmp_path}/here")
    own = {var["name"]: var["value"] for var in planned["variables"][1]}
    assert own["RAYDIST_RENDEZVOUS_FILE"] == f"{tmp_path}/here/rendezvous"
    assert "MASTER_PORT" not in own


def test_without_ray_the_ranks_meet_on_the_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    planned = data(capsys, "group=inline", "scale=1x1")
    own = {var["name"]: var["value"] for var in planned["variables"][0]}
    assert own["MASTER_ADDR"] == "127.0.0.1"
    assert "without Ray" in planned["nodes"]


def test_what_is_waited_for_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nodes(monkeypatch, [node(1, gpu=4), node(2, gpu=4, free={"CPU": 8, "GPU": 1})])
    text = output_of(capsys, "scale=2x4")
    assert (
        "waits for 1 more node with 4 GPU, 4 CPU: 1 of 2 ready; node-2 has 4 GPU but 3 are taken"
        in text
    )
    assert "waits" not in output_of(capsys, "scale=1x4")


def test_nodes_that_the_autoscaler_has_to_bring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_nodes(monkeypatch, [node(1, cpu=1)], [NodeType("gpu", {"CPU": 8, "GPU": 8}, 3)])
    text = output_of(capsys, "scale=2x8")
    assert "gpu-2 " in text
    assert "every rank on gpu-1 (<address of gpu-1>)" in text
    assert "waits for 2 more nodes with 8 GPU, 8 CPU: 0 of 2 ready" in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["backend=nccl"], 2, "backend=nccl: the nodes have no GPU (1 node); set backend=gloo"),
        (["backend=glo"], 2, "did you mean backend=gloo?"),
        (["scale.nodez=2"], 2, "scale.nodes"),
        (["fabric.interface=nosuch0"], 2, "fabric.interface=nosuch0"),
        (["--jsn"], 2, "did you mean --json?"),
        (["job=digitz"], 2, "did you mean job=digits?"),
        (
            ["job=gpt", "model.layers=2", "parallel=pp", "scale=1x4", "group=inline"],
            2,
            "too few for 4 stages; set pa",
        ),
        (
            [
                "job=gpt",
                "model.heads=6",
                "model.width=96",
                "model.kv_heads=3",
                "parallel=tp",
                "scale=1x4",
                "group=inline",
            ],
            2,
            "parallel.tp=4: GPT has 6 heads, which it does not divide; set parallel.tp=1",
        ),
    ],
)
def test_it_refuses_as_train_does(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    text = output_of(capsys, *words, code=code)
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text


def test_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: raydist plan" in output_of(capsys, "--help")


def test_a_cluster_that_is_gone_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert "RAY_ADDRESS=127.0.0.1:9" in output_of(capsys, code=1)


def test_an_address_that_a_killed_cluster_left_behind_is_no_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(local_ray, "outer_folder", lambda: tmp_path)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:9\n")
    assert ray_private.default_address() == "127.0.0.1:9"
    assert connect.running_address() is None


def test_what_listens_there_and_is_no_ray_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gcs, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not gcs.answers(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.ray
def test_a_ray_with_another_token_says_so(ray_address: str, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "RAY_ADDRESS": ray_address,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_TOKEN": "a" * 64,
    }
    command = [sys.executable, "-m", "raydist.tools.plan"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1
    assert f"the Ray at {ray_address} refuses" in done.stderr
    assert "RAY_AUTH_TOKEN_PATH" in done.stderr
    assert "RAY_ADDRESS=local" in done.stderr


FREE = [node(1, cpu=4, free={"CPU": 1}), node(2, cpu=4), node(3, cpu=2), node(4, cpu=0)]


@pytest.mark.parametrize(
    ("scale", "hosts"),
    [
        # what is free comes first, then what is big; a node without room never
        ({"nodes": 1, "per_node": 2}, [2]),
        ({"nodes": 2, "per_node": 2}, [2, 3]),
        ({"nodes": 3, "per_node": 2}, [2, 3, 1]),
        ({"nodes": 1, "per_node": 5, "placement": "PACK"}, [2, 2, 2, 2, 3]),
        ({"nodes": 1, "per_node": 5, "placement": "SPREAD"}, [2, 3, 1, 2, 3]),
        ({"nodes": 1, "per_node": 8, "placement": "SPREAD"}, [2, 3, 1, 2, 3, 1, 2, 1]),
        ({"nodes": 1, "per_node": 4, "placement": "STRICT_PACK"}, [2, 2, 2, 2]),
    ],
)
def test_bundles_are_laid_out_as_the_strategy_says(scale: dict[str, Any], hosts: list[int]) -> None:
    request = placement.resources_for(Job(scale=Scale(**scale), backend=Backend("gloo")), FREE)
    assert [each.id for each in plan.place_request(request, FREE, [])] == [f"id-{i}" for i in hosts]


def test_labels_decide_where_bundles_lie() -> None:
    nodes = [
        replace(each, labels={"zone": "ab"[i % 2]}) for i, each in enumerate([node(1), node(2)])
    ]
    request = placement.resources_for(
        Job(scale=Scale(nodes=1, per_node=1, labels={"zone": "b"})), nodes
    )
    assert [each.id for each in plan.place_request(request, nodes, [])] == ["id-2"]


@pytest.mark.ray
def test_a_running_cluster_is_only_read(ray_address: str, tmp_path: Path) -> None:
    """In a separate process, as a person runs it; the cluster has 4 CPUs, whatever the machine
    has."""
    env = {**os.environ, "RAY_ADDRESS": ray_address, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raydist.tools.plan", "scale=cluster", "--json"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=280
    )
    planned = json.loads(done.stdout)
    assert planned["nodes"] == f"the Ray cluster at {ray_address} (1 node)"
    assert planned["world_size"] == 4
    assert planned["slots"][0]["node"] != "here"
    command[-2] = "scale=1x9"
    refused = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert refused.returncode == 2
    assert "set scale=1x4" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plan_shows_no_value_of_the_file_with_variables() -> None:
    job = Job(env={"MYCRED": "hush"}, env_file="x.env")
    given = [EnvVar("MYCRED", "hush", "set"), EnvVar("RANK", "0", "its number")]
    assert [var.value for var in plan.mask_secrets(job, given)] == ["***", "0"]
