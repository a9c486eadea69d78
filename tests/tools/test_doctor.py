"""The doctor as a person calls it: on a Ray of one node and without Ray; across hosts see
test_doctor_rig.py."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster import placement
from raydist.cluster.nodes import Node
from raydist.launch import inline
from raydist.messages.checkup import CheckHost, CheckupRequest
from raydist.node.checkup import Checkup
from raydist.node.probe import Facts
from raydist.settings import compose
from raydist.settings.config import Backend, Job, Scale
from raydist.shared.events import Events
from raydist.tools import doctor, doctor_rounds
from raydist.tools.doctor_report import Report
from raydist.tools.doctor_rounds import Rounds
from tests.conftest import ROOT
from tests.leftovers import remaining_processes
from tests.stores import store


@pytest.fixture
def _no_library_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with torch for each node takes longer than all other checks."""
    monkeypatch.setattr(doctor_rounds, "TRIED", {})


def output_of(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert doctor.main(words) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def test_help_says_how_and_what(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "--help")
    assert "usage: raydist doctor" in text
    assert "\n  rendezvous  every node reaches the store" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jsn"], "did you mean --json?"),
        (["--timeout", "soon"], "--timeout soon: must be a number"),
        (["--timeout=0"], "--timeout 0: must be a number"),
        (["--timeout"], "--timeout: expected one argument"),
        (["backend=glo"], "did you mean backend=gloo?"),
        (["job=digitz"], "did you mean job=digits?"),
        (["group=inline", "backend=nccl"], "set backend=gloo"),
        (["group=inline", "scale=1x1", "fabric.interface=nosuch0"], "fabric.interface=nosuch0"),
    ],
)
def test_it_refuses_as_train_does(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    text = output_of(capsys, *words, code=2)
    assert text.startswith("error: ")
    assert message in text


def test_flags_stand_anywhere_among_the_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[tuple[Sequence[str], float]] = []

    def examine(job: Sequence[str], timeout: float) -> Report:
        examined.append((job, timeout))
        return Report()

    monkeypatch.setattr(compose, "compose", lambda overrides: overrides)
    monkeypatch.setattr(doctor, "examine_cluster", examine)
    assert doctor.main(["scale=1x2", "--timeout", "1.5", "--json", "backend=gloo"]) == 0
    assert doctor.main(["--timeout=7"]) == 0
    assert doctor.main([]) == 0
    assert examined == [(["scale=1x2", "backend=gloo"], 1.5), ([], 7), ([], doctor.TIMEOUT_S)]


def test_without_ray_this_machine_is_looked_at_and_nothing_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty := tmp_path / "here").mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    text = output_of(capsys, "group=inline", "scale=1x2")
    assert text.splitlines()[0] == "job   2 ranks on 1 node, backend gloo, over lo"
    assert text.splitlines()[-1].startswith("this job can run: ")
    assert list(empty.iterdir()) == []
    assert remaining_processes(str(tmp_path)) == []


def test_a_program_is_a_job_like_any_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    words = ("group=inline", "scale=1x2", "backend=script", "script=train.py")
    assert "this job can run: " in output_of(capsys, *words)


@pytest.mark.usefixtures("_no_library_is_tried")
def test_a_run_folder_that_cannot_be_made_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    place = "/proc/1/nowhere"  # not even root can make a folder there
    text = output_of(capsys, "group=inline", "scale=1x1", f"hydra.run.dir={place}", code=1)
    assert "FAIL  run folder: can't make a run folder in /proc/1" in text
    assert "hydra.run.dir=<a folder that you own>" in text


@pytest.mark.usefixtures("_no_library_is_tried")
def test_the_storage_is_written_and_seen_and_nothing_stays_in_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder that only some nodes see is no problem then: checkpoints go to the storage."""
    monkeypatch.chdir(tmp_path)
    with store() as server:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        Path("s3.env").write_text(
            "".join(f"{name}={value}\n" for name, value in server.env.items())
        )
        words = ["group=inline", "scale=1x1", "env_file=s3.env", "--json"]
        answer = json.loads(output_of(capsys, *words, "storage=s3://bucket/runs"))
        assert [*answer["checks"]["storage"].values()] == ["ok"]
        assert server.files() == {}
        missing = json.loads(output_of(capsys, *words, "storage=s3://nosuch/runs", code=1))
        (finding,) = [each for each in missing["findings"] if each["check"] == "storage"]
        assert (finding["level"], finding["nodes"]) == ("fail", [])
        assert "storage=s3://nosuch/runs can't be written here" in finding["text"]


@pytest.mark.usefixtures("_no_library_is_tried")
def test_a_node_that_does_not_see_the_storage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "elsewhere" / "probe"
    report = rounds(tmp_path, ["127.0.0.1", "127.0.0.2"], probe=str(probe))
    assert findings_of(report, "storage") == [("fail", ("host0", "host1"))]
    (finding,) = [each for each in report.findings if each.check == "storage"]
    assert finding.text == f"host0, host1 can't see storage={probe.parent}: there is no {probe}"
    assert findings_of(report, "run folder") == []


@pytest.mark.ray
def test_a_healthy_ray_of_one_node_is_fine(ray_address: str, tmp_path: Path) -> None:
    """In a separate process, as a person runs it."""
    env = {**os.environ, "RAY_ADDRESS": ray_address, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raydist.tools.doctor", "--json", "scale=1x2"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["job"].startswith("2 ranks on 1 node, backend gloo")
    assert set(report["checks"]) - {"limits"} == {
        "launch",
        "run folder",
        "versions",
        "imports",
        "rendezvous",
        "gloo",
        "shm",
        "stacks",
    }
    assert report["network"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
def test_a_job_that_never_gets_its_nodes_is_a_finding(ray_address: str, tmp_path: Path) -> None:
    env = {**os.environ, "RAY_ADDRESS": ray_address, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        command = [sys.executable, "-m", "raydist.tools.doctor", "scale=1x4", "scale.wait_s=1"]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280
        )
        holder.kill()
    assert done.returncode == 1
    assert "FAIL  launch: gave up after 1 s" in done.stdout
    assert "4 are taken" in done.stdout


HOLD = """
import ray, time
ray.init(logging_level="ERROR")
ray.util.placement_group([{"CPU": 4}]).wait(60)
print("held", flush=True)
time.sleep(600)
"""

# The rounds, with real slots in a thread of this process


def rounds(
    tmp_path: Path,
    addresses: list[str],
    host: str = "host{}",
    probe: str = "",
    **different: dict[str, str],
) -> Report:
    """Make the rounds of a gang with one node at each address. `different`: versions of host0,
    host1, ..."""
    nodes = [
        Node(f"id{i}", address, host.format(i), {"CPU": 1.0}, {"CPU": 1.0})
        for i, address in enumerate(addresses)
    ]
    job = Job(
        scale=Scale(nodes=len(nodes), per_node=1),
        backend=Backend("gloo"),
        dir=str(tmp_path / "run"),
    )
    request = placement.resources_for(job, nodes)
    (tmp_path / "run").mkdir()
    versions = {"raydist": "0.1.0", "torch": "2.15.0"}
    report = Report()
    plan = placement.assign_ranks(request, nodes)
    with Events(tmp_path / "events.jsonl") as events, inline.in_thread(plan, events) as gang:
        gang.facts = tuple(
            Facts(
                each.host,
                each.ip,
                "lo",
                each.ip,
                python="3.11.7",
                versions=different.get(each.host, versions),
            )
            for each in plan.nodes
        )
        cast("Any", gang).nodes = SimpleNamespace(failed_imports=lambda slot: {})
        Rounds(job, gang, report, 30.0, probe).make()
    return report


def findings_of(report: Report, check: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.level, finding.nodes) for finding in report.findings if finding.check == check]


def test_what_differs_between_nodes_is_found_in_one_go(tmp_path: Path) -> None:
    report = rounds(
        tmp_path,
        ["127.0.0.1", "127.0.0.2", "127.0.0.3"],
        host2={"raydist": "0.1.0", "torch": "2.14.0"},
    )
    assert (
        findings_of(report, "peers")
        == findings_of(report, "mtu")
        == findings_of(report, "clock")
        == findings_of(report, "shm")
        == []
    )
    assert findings_of(report, "versions") == [("fail", ("host2",))]
    # gloo takes the interface's own address, and these nodes only play at having others
    assert findings_of(report, "gloo") == [("fail", ("host1", "host2"))]
    assert all(trip.kind == "fine" for row in report.trips if row for trip in row)


def test_a_node_that_cannot_listen_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    report = rounds(tmp_path, ["127.0.0.1", "192.0.2.77"])
    assert findings_of(report, "launch") == [("fail", ("host1",))]
    (finding,) = [finding for finding in report.findings if finding.check == "launch"]
    assert "'listen'" in finding.text
    assert "assign requested address" in finding.text
    assert "peers" not in report.checks
    assert "gloo" in report.checks


@pytest.mark.usefixtures("_no_library_is_tried")
def test_a_node_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(self: Checkup, request: CheckupRequest[Any]) -> Any:
        return await (asyncio.sleep(600) if isinstance(request, CheckHost) else real(self, request))

    real = Checkup.handle
    monkeypatch.setattr(Checkup, "handle", handle)
    monkeypatch.setattr(doctor_rounds, "ANSWER_S", 0.2)
    report = rounds(tmp_path, ["127.0.0.1", "127.0.0.2"])
    # other questions may take as long on a busy machine
    (finding,) = [each for each in report.findings if "'look'" in each.text]
    assert (finding.check, finding.level, finding.nodes) == ("launch", "fail", ("host0", "host1"))
    assert "no answer within 0.2 s" in finding.text


@pytest.mark.usefixtures("_no_library_is_tried")
def test_each_node_is_asked_as_often_among_many_as_among_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 nodes are seconds: all are asked at once, and no question is asked once a pair."""
    real, calls = doctor_rounds.Rounds._ask, list[tuple[str, int]]()

    def counted(self: Rounds, step: str, arguments: Any, extra: float = 0.0) -> list[Any]:
        calls.append((step, len(arguments)))
        return real(self, step, arguments, extra)

    monkeypatch.setattr(Rounds, "_ask", counted)
    few, many = 3, 24
    for nodes in (few, many):
        (tmp_path / str(nodes)).mkdir()
        rounds(tmp_path / str(nodes), [f"127.0.0.{i + 1}" for i in range(nodes)])
    half = len(calls) // 2
    assert [step for step, _ in calls[:half]] == [step for step, _ in calls[half:]]
    assert {n for _, n in calls[:half]} == {few}
    assert {n for _, n in calls[half:]} == {many}


@pytest.mark.usefixtures("_no_library_is_tried")
def test_two_nodes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    report = rounds(tmp_path, ["127.0.0.1", "127.0.0.2"], host="pod")
    assert [host.name for host in report.hosts] == ["pod/127.0.0.1", "pod/127.0.0.2"]
