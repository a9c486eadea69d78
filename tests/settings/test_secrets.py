"""No secret is in what a run leaves: neither by its name nor by its value."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from raydist import train
from raydist.cluster import local_ray
from raydist.settings.config import Job, Target, as_saved
from raydist.settings.secrets import is_secret
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("AZURE_STORAGE_CONNECTION_STRING", True), ("PGPASS", True), ("MYSQL_PWD", True), ("SMTP_PASS", True),
        ("SLACK_WEBHOOK", True), ("SENTRY_DSN", True), ("BLOB_SAS", True), ("AUTH_HEADER", True), ("api_key", True),
        ("COOKIE", True), ("NCCL_DEBUG", False), ("DISASTER", False), ("LR", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name, "x") == secret


def test_a_password_in_a_url_is_one_whatever_the_name() -> None:
    assert is_secret("DATABASE", "postgres://me:hush@db/x")
    assert is_secret("BROKER", "redis://:hush@cache:6379")
    assert not is_secret("PROXY", "http://proxy:3128/a@b")


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("env.WANDB_API_KEY=abc", "env.WANDB_API_KEY:"), ("+env.PGPASS=hush", "env.PGPASS:"),
        ("env.DB=pg://me:hush@h/x", "env.DB:"), ("env.KEYS=4", ""), ("env.NCCL_DEBUG=INFO", ""),
        ("env.HF_TOKEN='${oc.env:HF_TOKEN}'", ""), ("job.args.key=abc", ""), ("env_file=secret.env", ""),
    ],
)  # fmt: skip
def test_a_secret_that_is_typed_is_named_without_its_value(
    typed: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([typed, "no.such_setting=1"]) == 2
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.startswith(f"warning: {named}") for line in warnings] == [True] * bool(named)
    assert all("hush" not in line and "abc" not in line and "env_file=FILE" in line for line in warnings)


def test_what_is_saved_has_none() -> None:
    job = Job(
        job=Target("digits", {"api_key": "hush", "num_keys": 4, "key_dim": "64", "lr": 0.1, "db": "pg://me:hush@h/x"}),
        args=["--token=hush", "--max-tokens=100", "--password", "hush", "--lr", "1", "hush@example.org"],
        env={"PLAIN": "x", "URL": "pg://me:hush@h/x"},
    )
    saved = as_saved(job)
    assert saved["job"]["args"] == {"api_key": "***", "num_keys": 4, "key_dim": "64", "lr": 0.1, "db": "***"}
    hidden = ["--token=***", "--max-tokens=100", "--password", "***", "--lr", "1", "hush@example.org"]
    assert (saved["args"], saved["env"]) == (hidden, {"PLAIN": "x", "URL": "***"})
    assert as_saved(Job(env={"PLAIN": "x"}, env_file="some.env"))["env"] == {"PLAIN": "***"}  # as docs/storage.md says


def test_a_run_leaves_none_in_any_file(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os, sys\nprint(len(sys.argv[2]), len(os.environ['ODD']))\n")
    (tmp_path / "some.env").write_text("ODD=from-a-file\n")
    command = [
        sys.executable,
        "-m",
        "raydist.train",
        "script=show.py",
        "args=--api-key typed-hush",
        "env_file=some.env",
    ]
    command += ["env.DATABASE_URL=pg://me:url-hush@h/x", "group=inline", "scale=1x1", "backend=gloo"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAYDIST_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").glob("show/*")
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"overrides.yaml", "hydra.yaml", "config.yaml"} <= {file.name for file in files}
    for file in files:
        text = file.read_text(errors="replace")
        assert not [word for word in ("typed-hush", "from-a-file", "url-hush") if word in text], file
    assert "10 11" in (folder / "logs" / "rank-0.log").read_text()


def test_rays_token_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / ".ray" / "auth_token"
    local_ray.protect_token(tmp_path)
    made = file.read_text()
    assert (len(made), stat.S_IMODE(file.stat().st_mode)) == (64, 0o600)
    file.chmod(0o644)  # as Ray makes it
    local_ray.protect_token(tmp_path)
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (made, 0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    local_ray.protect_token(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()
