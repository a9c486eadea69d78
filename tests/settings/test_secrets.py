"""No secret is in what a run leaves: neither by its name nor by its value."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raydist import train
from raydist.cluster import local_ray
from raydist.settings import compose
from raydist.settings.compose import SweepConfig
from raydist.settings.config import Job, Target, as_saved
from raydist.settings.overrides import SETTINGS
from raydist.settings.secrets import is_secret, masked
from raydist.shared.errors import ConfigError
from raydist.sweeps.space import Space
from tests.programs import Program

NAMES = (
    "AZURE_STORAGE_CONNECTION_STRING", "PGPASS", "MYSQL_PWD", "SMTP_PASS", "SLACK_WEBHOOK", "SENTRY_DSN", "BLOB_SAS",
    "AUTH_HEADER", "api_key", "apiKey", "X-Api-Key", "COOKIE", "HF_TOKEN", "accessToken", "hub.token", "secrets.first",
    "GOOGLE_CREDENTIALS", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEYS",
)  # fmt: skip
NO_NAMES = (
    "NCCL_DEBUG", "DISASTER", "LR", "tokenizer", "TOKENIZERS_PARALLELISM", "author", "passes", "keyword", "compass",
    "monkey", "num_keys", "key_dim", "pad_token", "AWS_WEB_IDENTITY_TOKEN_FILE", "RAY_AUTH_MODE",
    *(name for name in SETTINGS if name != "notify.webhook"),
)  # fmt: skip


def test_names_of_secrets() -> None:
    assert [name for name in NAMES if not is_secret(name, "x")] == []
    assert [name for name in NO_NAMES if is_secret(name, "x")] == []


def test_a_switch_and_a_size_are_no_secrets_whatever_the_name() -> None:
    assert not any(is_secret("api_key", value) for value in ("", "true", None, False, "auto"))
    assert not any(is_secret("token", value) for value in (4, "64", 0.5))
    assert is_secret("password", 123456)


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("postgres://me:hush@db/x", "postgres://me:***@db/x"),
        ("redis://:hu@sh@cache:6379", "redis://:***@cache:6379"),
        ("git+https://hush@github.com/x/y", "git+https://***@github.com/x/y"),
        ("https://store/x?se=1&sig=hush", "https://store/x?se=1&sig=***"),
        ("curl https://hooks.slack.com/services/T/B/hush -d x", "curl https://hooks.slack.com/*** -d x"),
        ("wandb.api_key=hush", "wandb.api_key=***"),
        ("--token=hush", "--token=***"),
        ("train.py --lr 1 --token hush", "train.py --lr 1 --token ***"),
        ("Authorization: Bearer hush", "Authorization: ***"),
        ('{"api_key":"hush", "lr": 1}', '{"api_key":"***'),
        ("lr=1 API_KEY=hush more", "lr=1 API_KEY=***"),
        *((text, text) for text in (
            "http://proxy:3128/a@b", "ssh://git@github.com", "me@example.org", "tokenizer=bpe", "auth:job",
            "/x/auth.py:job", "max:tokens", "s3://bucket/key=3/x", "--max-key 100 --lr 1",
        )),
    ],
)  # fmt: skip
def test_a_secret_within_a_text_is_masked(text: str, saved: str) -> None:
    assert masked(text, "args") == saved


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("env.WANDB_API_KEY=abc", "env.WANDB_API_KEY:"), ("+env.PGPASS=hush", "env.PGPASS:"),
        ("env.DB=pg://me:hush@h/x", "env.DB:"), ("env.KEYS=4", ""), ("env.NCCL_DEBUG=INFO", ""),
        ("env.HF_TOKEN='${oc.env:HF_TOKEN}'", ""), ("job.args.key=abc", "job.args.key:"), ("env_file=secret.env", ""),
        ("++env={A_TOKEN: hush}", "env.A_TOKEN:"), ("args=-H 'Authorization: hush'", "args.Authorization:"),
        ("env.TOKENIZERS_PARALLELISM=false", ""), ("job.args.tokenizer=bpe", ""),
    ],
)  # fmt: skip
def test_a_secret_that_is_typed_is_named_without_its_value(
    override: str,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([override, "no.such_setting=1"]) == 2
    warnings = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")
    ]
    assert [line.startswith(f"warning: {named}") for line in warnings] == [True] * bool(named)
    assert all(
        "hush" not in line and "abc" not in line and "env_file=FILE" in line for line in warnings
    )


def test_what_is_saved_has_none() -> None:
    job = Job(
        job=Target(
            "digits", {"api_key": "hush", "num_keys": 4, "key_dim": "64", "db": "pg://me:hush@h/x"}
        ),
        args=[
            "--token=hush",
            "--max-tokens=100",
            "--password",
            "hush",
            "--lr",
            "1",
            "hush@example.org",
        ],
        env={"PLAIN": "x", "URL": "pg://me:hush@h/x"},
    )
    saved = as_saved(job)
    assert saved["job"]["args"] == {
        "api_key": "***",
        "num_keys": 4,
        "key_dim": "64",
        "db": "pg://me:***@h/x",
    }
    hidden = [
        "--token=***",
        "--max-tokens=100",
        "--password",
        "***",
        "--lr",
        "1",
        "hush@example.org",
    ]
    assert (saved["args"], saved["env"]) == (hidden, {"PLAIN": "x", "URL": "pg://me:***@h/x"})
    assert as_saved(Job(env={"PLAIN": "x"}, env_file="some.env"))["env"] == {
        "PLAIN": "***"
    }  # as docs/storage.md says


PLACES: tuple[tuple[str, Callable[[Job], Any], Any], ...] = (
    ("job.args.hub.token=hush", lambda job: job.job.args["hub"], {"token": "hush"}),
    ("++job.args={first: {token: hush}, lr: 1}", lambda job: job.job.args["first"], {"token": "hush"}),
    ("job.args.password=73313371", lambda job: job.job.args["password"], 73313371),
    ("job.args.api_key=\"hush'73313371\"", lambda job: job.job.args["api_key"], "hush'73313371"),
    ("++model.token=hush", lambda job: job.model["token"], "hush"),
    ("optim=mine", lambda job: job.optim.args["token"], "hush"),  # a file of conf/
    ("++optim.args.api_key=hush", lambda job: job.optim.args["api_key"], "hush"),
    ("pip=[git+https://me:hush@github.com/x/y,einops]", lambda job: job.pip,
     ["git+https://me:hush@github.com/x/y", "einops"]),
    ("++env={B_TOKEN: hush, C: d}", lambda job: (job.env["B_TOKEN"], job.env["C"]), ("hush", "d")),
    ("env.A_TOKEN=hush{,'", lambda job: job.env["A_TOKEN"], "hush{,'"),
    ("env.URL=pg://me:hush@h/x", lambda job: job.env["URL"], "pg://me:hush@h/x"),
    ("backend.mpi.args=[-x,'B_TOKEN=hush']", lambda job: job.backend.mpi.args, ["-x", "B_TOKEN=hush"]),
)  # fmt: skip
"""What is typed, and what the job gets of it."""


@pytest.mark.parametrize("many", [False, True], ids=["run", "sweep"])
def test_a_secret_in_any_setting_reaches_the_job_and_no_file(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def job(config, **words): ...\n")
    (tmp_path / "conf" / "optim").mkdir(parents=True)
    (tmp_path / "conf" / "optim" / "mine.yaml").write_text("defaults: [sgd]\nargs: {token: hush}\n")
    overrides = ["job=mine.py", *(override for override, _, _ in PLACES)]
    if many:
        config = SweepConfig([*overrides, "seed=1,2"])
        job = Space(config).job({"seed": "2"})
        (Path(config.make_folder()) / "typed.json").write_text(json.dumps(config.override_texts))
    else:
        jobs: list[Job] = []
        with compose.hydra_set_up():
            compose.run_once(compose.Loader(), compose.CONFIG, overrides, jobs.append)
        (job,) = jobs
        assert {file.name for file in tmp_path.rglob("runs/**/*.yaml")} >= {
            "overrides.yaml",
            "hydra.yaml",
        }
    for override, given, value in PLACES:
        assert given(job) == value, override
    written = [file.read_text() for file in tmp_path.rglob("runs/**/*") if file.is_file()]
    assert written
    for text in (*written, json.dumps(as_saved(job))):
        assert "hush" not in text
        assert "73313371" not in text


@pytest.mark.parametrize(
    "text", ["job.args.password=p(hush", "wandb.api_key=hush", "job.arg.api_key=hush"]
)
def test_no_refusal_shows_a_typed_secret(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose.compose([text])
    error = refused.value
    assert "***" in str(error)
    assert "hush" not in f"{error} {error.value} {error.suggestion}"
    assert "+" not in str(error)


def test_resolved_settings_are_shown_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDIST_NOTIFY_WEBHOOK", "https://example.org/hush")
    (tmp_path / "x.env").write_text("MYCRED=hush\n")
    assert train.main(["--cfg", "job", "--resolve", "env_file=x.env"]) == 0
    shown = capsys.readouterr().out
    assert "MYCRED: '***'" in shown
    assert "webhook: '***'" in shown
    assert "hush" not in shown


def test_no_refusal_shows_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a reference to a variable stands for was shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEY", "hush")
    (tmp_path / "mine.py").write_text("def job(config, apikey, steps=1): ...\n")
    for value in ("${oc.env:KEY}", "hush"):
        assert train.main(["job=mine.py", f"job.args.api_key='{value}'"]) == 2
        error = capsys.readouterr().err
        assert "did you mean job.args.apikey=***?" in error
        assert "hush" not in error


def test_choices_that_are_secrets_stay_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def job(config, **words): ...\n")
    space = Space(SweepConfig(["job=mine.py", "job.args.token=hush,'hu,sh'"]))
    settings = [*space.grid()]
    assert "hu" not in json.dumps(settings)
    assert [space.job(each).job.args["token"] for each in settings] == ["hush", "hu,sh"]


def test_a_run_leaves_none_in_any_file(tmp_path: Path) -> None:
    """A program with a tracker: its records, its log, the tracker's files."""
    (tmp_path / "show.py").write_text(
        "import os, sys\nprint(len(sys.argv[2]), len(os.environ['ODD']))\n"
    )
    (tmp_path / "some.env").write_text("ODD=from-a-file\n")
    program = Program(
        tmp_path, "script=show.py",
        "args=--api-key typed-hush wandb.api_key=set-hush -H 'Authorization: Bearer head-hush'", "env_file=some.env",
        "env.DATABASE_URL=pg://me:url-hush@h/x", "++env.A_TOKEN='a hush'", "group=inline", "scale=1x1", "backend=gloo",
        *(["track=[tensorboard]"] if find_spec("tensorboardX") else []),
    )  # fmt: skip
    assert program.wait() == 0, program.screen
    files = [file for file in program.run_dir.rglob("*") if file.is_file()]
    assert {"overrides.yaml", "hydra.yaml", "config.yaml"} <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        assert b"hush" not in content, file
        assert b"from-a-file" not in content, file
    assert "10 11" in (program.run_dir / "logs" / "rank-0.log").read_text()


def test_rays_token_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / ".ray" / "auth_token"
    local_ray.protect_token(tmp_path)
    token = file.read_text()
    assert (len(token), stat.S_IMODE(file.stat().st_mode)) == (64, 0o600)
    file.chmod(0o644)  # as Ray makes it
    local_ray.protect_token(tmp_path)
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (token, 0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    local_ray.protect_token(tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_without_a_home_rays_token_is_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    tokens = set()
    for home in (None, tmp_path / "no such home"):
        monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # so that it is as before after the test
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        local_ray.protect_token(home)
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
    assert [len(token) for token in tokens] == [64, 64]
