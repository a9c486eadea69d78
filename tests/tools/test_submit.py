"""tools.submit before there is a cluster, and what a run puts into the metadata of its job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.cluster import ray_private
from raydist.reporting import job_metadata
from raydist.reporting.result import Result
from raydist.settings.config import Watch
from raydist.shared import kinds
from raydist.shared.errors import ConfigError
from raydist.tools import submit


class Recorder:
    """The calls of Ray's client that submitting a job makes."""

    def get_address(self) -> str:
        return "http://head:8265"

    def submit_job(self, **sent: Any) -> str:
        self.sent = sent
        return "job-1"


def test_the_metadata_of_a_job_has_no_secrets() -> None:
    client, plain = Recorder(), ["checkpoint.best=max:tokens", "env.NCCL_DEBUG=INFO", "--multirun"]
    overrides = [
        "++job.args={hub: {token: hush, x: 1}}",
        "args=--api-key hush --lr 1",
        "+env.AWS_SECRET_ACCESS_KEY=hush=b",
    ]
    submit.send(client, submit.SentFolder.of(".", ""), [*plain, *overrides], None)
    words = shlex.split(client.sent["metadata"][job_metadata.OVERRIDES])
    assert words == [
        *plain, "++job.args={hub:{token:***,x:1}}", "args='--api-key ***'", "+env.AWS_SECRET_ACCESS_KEY=***",
    ]  # fmt: skip


def test_a_secret_of_a_submitted_job_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def job(config, hub): ...\n")
    with submit.in_folder(str(tmp_path)):
        submit.check_overrides(["job=mine.py", "job.args.hub.token=hush"])
    note = capsys.readouterr().err
    assert note.startswith("note: job.args.hub.token=***: ")
    assert "hush" not in note


@pytest.mark.parametrize(
    ("words", "sent", "noted"),
    [
        (["job=mine.py"], [], ".env, conf/secret.env"),
        (["job=mine.py", "env_file=./conf/secret.env"], ["conf/secret.env"], ".env"),
        (["job=mine.py", "env_file='${oc.env:ONLY_THERE}'"], [], ".env, conf/secret.env"),
        (["job=mine.py", "env_file=/there/.env"], [], ".env, conf/secret.env"),
        (["job=own"], [".env"], "conf/secret.env"),
        (
            ["--multirun", "job=mine.py", "env_file=.env", "optim.lr=1,2"],
            [".env"],
            "conf/secret.env",
        ),
    ],
)
def test_a_file_with_secrets_stays_here_unless_the_job_names_it(
    words: list[str],
    sent: list[str],
    noted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = "# @package _global_\njob: {target: mine.py}\nenv_file: .env\n"
    others = {
        "mine.py": "def job(config): ...\n",
        "conf/job/own.yaml": own,
        "deploy/example.env": "TOKEN=",
    }
    secrets = dict.fromkeys((".env", "conf/secret.env", "runs/a/.env"), "TOKEN=hush")
    for path, text in {**others, **secrets}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    client = Recorder()
    monkeypatch.setattr(submit, "job_client", lambda _: client)
    assert submit.main(["--no-wait", "--working-dir", str(tmp_path), "--", *words]) == 0
    excludes = client.sent["runtime_env"]["excludes"]
    assert excludes[:3] == [".env", "*.env", "!example.env"]
    assert [each[2:] for each in excludes[3:] if each[0] == "!"] == sent  # the last pattern wins
    note = capsys.readouterr().err
    assert note.startswith(f"note: {noted}: not sent, ")
    assert f"; env_file={noted.split(', ')[0]} sends it" in note


def test_without_secrets_in_the_folder_nothing_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "example.env").write_text("TOKEN=")
    submit.SentFolder.of(str(tmp_path), "").note_left_out()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["trian.epochs=3"], "did you mean train.epochs=3"),
        (["job=digist"], "did you mean job=digits"),
        (["job=mien.py"], "did you mean job=mine.py"),
        (["scale.nodes=many"], "scale.nodes"),
        (["--mutlirun"], "did you mean --multirun"),
    ],
)
def test_a_wrong_word_is_refused_here(tmp_path: Path, words: list[str], refused: str) -> None:
    (tmp_path / "mine.py").write_text("def job(config): ...\n")
    with submit.in_folder(str(tmp_path)), pytest.raises(ConfigError, match=refused):
        submit.check_overrides(words)


@pytest.mark.parametrize(
    "words",
    [
        ["job=mine.py", "resume=/only/there/step-00000001", "env_file=/only/there.env"],
        ["job=only.there:job"],
        ["job=/only/there.py"],
        ["script=/only/there.py"],
        ["--multirun", "optim.lr=0.1,0.01"],
    ],
)
def test_what_only_the_cluster_can_know_is_sent(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "mine.py").write_text("def job(config): ...\n")
    with submit.in_folder(str(tmp_path)):
        submit.check_overrides(words)


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["--adress", "x"], "did you mean --address"),
        (["--working-dir", "tets"], "did you mean --working-dir tests?"),
        (
            ["--address", "http://127.0.0.1:9", "job=digits"],
            "--address http://127.0.0.1:9: no job can be sent there",
        ),
        (
            ["--address", "127.0.0.1:9", "job=digits"],
            "--address 127.0.0.1:9: no Ray answers; use --address http://",
        ),
    ],
)
def test_a_wrong_flag_or_address_ends_it(
    argv: list[str],
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert submit.main(argv) == 2
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "ended", "signal", "code"),
    [
        ("SUCCEEDED", 0, "", 0), ("FAILED", 2, "", 2), ("FAILED", -9, "", 137), ("FAILED", None, "", 1),
        ("STOPPED", None, "15", 143), ("STOPPED", None, "", 143),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_jobs(status: str, ended: int | None, signal: str, code: int) -> None:
    metadata = {"raydist.signal": signal} if signal else None
    assert (
        submit.code(
            SimpleNamespace(status=status, message="", driver_exit_code=ended, metadata=metadata)
        )
        == code
    )


def result(**facts: Any) -> dict[str, Any]:
    return Result(status="finished", dir=Path("runs/a"), world_size=2, **facts).to_json()


def test_a_result_becomes_flat_text() -> None:
    metrics = {"loss": float("nan"), "accuracy": 0.98611, "note": "text", "many": [1.0]}
    metadata = job_metadata.result_metadata(result(metrics=metrics, goodput=0.5))
    assert metadata == {
        "raydist.result": "finished", "raydist.run_dir": "runs/a", "raydist.attempts": "1", "raydist.goodput": "0.500",
        "raydist.metrics.loss": "nan", "raydist.metrics.accuracy": "0.98611",
    }  # fmt: skip


def test_only_a_running_jobs_entry_is_changed_and_all_else_in_it_stays() -> None:
    before = {"raydist.words": "job=mine", "owner": "me", "raydist.culprit": "of the run before"}
    entry = {"status": "RUNNING", "entrypoint": "x", "metadata": before}
    after = {"raydist.words": "job=mine", "owner": "me", "raydist.result": "finished"}
    assert job_metadata.merged(entry, {"raydist.result": "finished"}) == {
        **entry,
        "metadata": after,
    }
    assert job_metadata.merged({"status": "RUNNING"}, {"a": "b"}) == {
        "status": "RUNNING",
        "metadata": {"a": "b"},
    }
    assert job_metadata.merged({**entry, "status": "STOPPED"}, {}) is None


@pytest.mark.parametrize(
    "config",
    [None, "", "{", "[]", '{"metadata": null}', '{"metadata": {"job_submission_id": "x"}}'],
)
def test_a_ray_that_keeps_jobs_otherwise_breaks_nothing(
    config: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    if config is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    reader = job_metadata.JobMetadata(Watch(job_metadata=True))
    reader(kinds.Run(name="a", dir="runs/a"))
    reader(kinds.Cluster(address=""))
    reader(kinds.Result(**result()))


@pytest.mark.parametrize(
    ("settings", "written"), [(Watch(), []), (Watch(job_metadata=True), ["runs/a", "finished"])]
)
def test_metadata_is_written_only_if_the_setting_is_on(
    settings: Watch, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: list[dict[str, str]] = []

    def change_job_entry(
        address: str, id: str, change: Callable[[bytes], bytes | None], timeout: float
    ) -> None:
        assert (address, id) == ("10.0.0.1:6379", "night")
        changed = change(b'{"status": "RUNNING"}')
        assert changed is not None
        entries.append(json.loads(changed)["metadata"])

    monkeypatch.setattr(ray_private, "change_job_entry", change_job_entry)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(
        "RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"job_submission_id": "night"}}'
    )
    reader = job_metadata.JobMetadata(settings)
    reader(kinds.Run(name="a", dir="runs/a"))
    reader(kinds.Cluster(address=""))
    reader(kinds.Result(**result()))
    assert [entry.get("raydist.result", entry["raydist.run_dir"]) for entry in entries] == written


def test_an_error_of_ray_without_a_text_has_a_name() -> None:
    assert submit.reason_of_ray(RuntimeError("Traceback\n  it is full. \n")) == "  it is full"
    assert submit.reason_of_ray(TimeoutError()) == "TimeoutError"
