"""tools.submit before there is a cluster, and what a run puts into the metadata of its job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raydist.errors import ConfigError
from raydist.result import Result
from raydist.tools import submit
from raydist.watch import metadata


def test_what_is_sent_is_told_without_its_secrets() -> None:
    assert submit.masked("env.HF_TOKEN=abc") == "env.HF_TOKEN=***"
    assert submit.masked("+env.AWS_SECRET_ACCESS_KEY=a=b") == "+env.AWS_SECRET_ACCESS_KEY=***"
    assert submit.masked("env={HF_TOKEN:abc}") == "env=***"
    assert submit.masked("env.NCCL_DEBUG=INFO") == "env.NCCL_DEBUG=INFO"
    assert submit.masked("checkpoint.best=max:tokens") == "checkpoint.best=max:tokens"


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
    with submit.standing_in(str(tmp_path)), pytest.raises(ConfigError, match=refused):
        submit.check(words)


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
    with submit.standing_in(str(tmp_path)):
        submit.check(words)


@pytest.mark.parametrize(
    ("argv", "refused"),
    [
        (["--adress", "x"], "did you mean --address"),
        (["--working-dir", "tets"], "no such folder; say --working-dir tests"),
        (["--address", "http://127.0.0.1:9", "job=digits"], "no job can be sent to http://127.0.0.1:9 "),
        (["--address", "127.0.0.1:9", "job=digits"], "no Ray answers at 127.0.0.1:9; say --address http://"),
    ],
)
def test_a_wrong_flag_or_address_ends_it(
    argv: list[str], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert submit.main(argv) == 2
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "ended", "signal", "code"),
    [
        ("SUCCEEDED", 0, "", 0), ("FAILED", 2, "", 2), ("FAILED", -9, "", 137), ("FAILED", None, "", 1),
        ("STOPPED", None, "15", 143), ("STOPPED", None, "", 1),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_jobs(status: str, ended: int | None, signal: str, code: int) -> None:
    told = {"raydist.signal": signal} if signal else None
    assert submit.code(SimpleNamespace(status=status, message="", driver_exit_code=ended, metadata=told)) == code


def result(**facts: Any) -> dict[str, Any]:
    return Result(status="finished", dir=Path("runs/a"), world_size=2, **facts).to_json()


def test_a_result_becomes_flat_text() -> None:
    metrics = {"loss": float("nan"), "accuracy": 0.98611, "note": "text", "many": [1.0]}
    told = metadata.facts(result(metrics=metrics, goodput=0.5))
    assert told == {
        "raydist.result": "finished", "raydist.run_dir": "runs/a", "raydist.attempts": "1", "raydist.goodput": "0.500",
        "raydist.metrics.loss": "nan", "raydist.metrics.accuracy": "0.98611",
    }  # fmt: skip


def test_only_a_running_jobs_entry_is_changed_and_all_else_in_it_stays() -> None:
    before = {"raydist.words": "job=mine", "owner": "me", "raydist.culprit": "of the run before"}
    entry = {"status": "RUNNING", "entrypoint": "x", "metadata": before}
    after = {"raydist.words": "job=mine", "owner": "me", "raydist.result": "finished"}
    assert metadata.merged(entry, {"raydist.result": "finished"}) == {**entry, "metadata": after}
    assert metadata.merged({"status": "RUNNING"}, {"a": "b"}) == {"status": "RUNNING", "metadata": {"a": "b"}}
    assert metadata.merged({**entry, "status": "STOPPED"}, {}) is None


@pytest.mark.parametrize(
    "config", [None, "", "{", "[]", '{"metadata": null}', '{"metadata": {"job_submission_id": "x"}}']
)
def test_a_ray_that_keeps_jobs_otherwise_breaks_nothing(config: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    if config is not None:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    reader = metadata.Metadata()
    reader({"kind": "run", "dir": "runs/a"})
    reader({"kind": "cluster"})
    reader({"kind": "result", **result()})
