"""Paths that all nodes must see: hosts that do not are named before a rank starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raydist.launch import shared_paths
from raydist.messages.agent import FindUnreachablePaths
from raydist.node.path_check import find_unreachable_paths
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError, LaunchError

JOB = Job(name="digits", dir="/home/me/runs/digits/now")
HOSTS = ["host1", "host2"]
GONE = "there is no such file"


def test_the_paths_that_nodes_check() -> None:
    assert shared_paths.files(JOB, "") == {"run": "/home/me/runs/digits/now/events.jsonl"}
    stored = Job(name="digits", dir=JOB.dir, storage="s3://bucket/runs")
    assert shared_paths.files(stored, "/shared") == {
        "rendezvous": "/shared",
        "storage": "s3://bucket/runs/digits/now/settings.json",
    }


def test_a_run_folder_that_rank_0_sees_is_enough() -> None:
    assert (
        shared_paths.check_paths(
            JOB, HOSTS, [{}, {"run": GONE}], "raydist.fit(config)", shared_paths.files(JOB, "")
        )
        == ""
    )


def test_a_run_folder_without_checkpoints_of_rank_0_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rank 0 runs on host1, which can't see the run folder /home/me.*storage=s3:",
    ):
        shared_paths.check_paths(
            JOB,
            HOSTS,
            [{"run": GONE}, {}],
            "done = raydist.fit(config)",
            shared_paths.files(JOB, ""),
        )


def test_a_job_without_checkpoints_is_only_warned() -> None:
    warnings = shared_paths.check_paths(
        JOB, HOSTS, [{"run": GONE}, {}], "def job(config): return 3", shared_paths.files(JOB, "")
    )
    assert "its checkpoints would be lost there" in warnings
    script = Job(name="digits", dir=JOB.dir, script="train.py")
    assert (
        shared_paths.check_paths(
            script, HOSTS, [{"run": GONE}, {}], "", shared_paths.files(script, "")
        )
        == ""
    )


def test_hosts_that_do_not_see_the_storage_are_named() -> None:
    job = Job(name="digits", dir=JOB.dir, storage="s3://bucket/runs")
    with pytest.raises(ConfigError, match=r"host2 cannot see it \(NoCredentialsError: none\)"):
        shared_paths.check_paths(
            job,
            HOSTS,
            [{}, {"storage": "NoCredentialsError: none"}],
            "",
            shared_paths.files(job, ""),
        )


def test_hosts_that_do_not_see_the_rendezvous_folder_are_named() -> None:
    with pytest.raises(LaunchError, match="host1, host2 can't see /here"):
        shared_paths.check_paths(
            JOB, HOSTS, [{"rendezvous": GONE}] * 2, "", shared_paths.files(JOB, "/here")
        )


def test_a_node_checks_folders_and_urls(tmp_path: Path) -> None:
    files = {"here": str(tmp_path), "gone": str(tmp_path / "gone"), "odd": "s4://bucket/x"}
    missing = asyncio.run(find_unreachable_paths(FindUnreachablePaths(files, {})))
    assert set(missing) == {"gone", "odd"}
    assert "runs cannot be stored at s4://" in missing["odd"]
