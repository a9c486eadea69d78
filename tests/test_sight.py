"""What all nodes must see: refused with their names, before a rank starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from raydist import sight
from raydist.config import Job
from raydist.errors import ConfigError, LaunchError
from raydist.node.sight import blind

JOB = Job(name="digits", dir="/home/me/runs/digits/now")
HOSTS = ["host1", "host2"]
GONE = "there is no such file"


def test_what_the_nodes_look_for() -> None:
    assert sight.files(JOB, "") == {"run": "/home/me/runs/digits/now/events.jsonl"}
    stored = Job(name="digits", dir=JOB.dir, storage="s3://bucket/runs")
    assert sight.files(stored, "/shared") == {
        "meeting": "/shared",
        "storage": "s3://bucket/runs/digits/now/settings.json",
    }


def test_all_is_well_where_rank_0_sees_the_run_folder() -> None:
    assert sight.check(JOB, HOSTS, [{}, {"run": GONE}], "raydist.fit(config)", sight.files(JOB, "")) == ""


def test_checkpoints_that_would_be_lost_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rank 0 runs on host1, which can't see the run folder /home/me.*storage=s3:"
    ):
        sight.check(JOB, HOSTS, [{"run": GONE}, {}], "done = raydist.fit(config)", sight.files(JOB, ""))


def test_a_job_that_may_keep_none_is_only_warned() -> None:
    told = sight.check(JOB, HOSTS, [{"run": GONE}, {}], "def job(config): return 3", sight.files(JOB, ""))
    assert "its checkpoints would be lost there" in told
    script = Job(name="digits", dir=JOB.dir, script="train.py")
    assert sight.check(script, HOSTS, [{"run": GONE}, {}], "", sight.files(script, "")) == ""


def test_a_storage_that_some_do_not_see_is_refused_with_their_names() -> None:
    job = Job(name="digits", dir=JOB.dir, storage="s3://bucket/runs")
    with pytest.raises(ConfigError, match=r"host2 can't see it \(NoCredentialsError: none\)"):
        sight.check(job, HOSTS, [{}, {"storage": "NoCredentialsError: none"}], "", sight.files(job, ""))


def test_a_folder_to_meet_in_is_refused_as_well() -> None:
    with pytest.raises(LaunchError, match="host1, host2 can't see /here"):
        sight.check(JOB, HOSTS, [{"meeting": GONE}] * 2, "", sight.files(JOB, "/here"))


def test_a_node_looks_at_folders_and_urls(tmp_path: Path) -> None:
    files = {"here": str(tmp_path), "gone": str(tmp_path / "gone"), "odd": "s4://bucket/x"}
    seen = asyncio.run(blind(files, {}))
    assert set(seen) == {"gone", "odd"}
    assert "no store of runs begins with s4://" in seen["odd"]
