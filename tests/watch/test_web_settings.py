"""Settings in run folders as text, and which of them differ; the list of runs with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.shared import kinds
from raydist.shared.events import Events
from raydist.watch.web.runs import list_rows
from raydist.watch.web.saved_settings import (
    CONFIG,
    OVERRIDES,
    differing,
    masked_override,
    read_settings,
    setting_texts,
)


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ({"seed": "0"}, {"seed": "0"}),
        ({"optim": {"lr": "1e-3", "args": {}}}, {"optim.lr": "1e-3", "optim.args": "{}"}),
        ({"track": ["wandb", "mlflow"], "pip": []}, {"track": "[wandb, mlflow]", "pip": "[]"}),
        ({"job": {"args": {"a": [{"b": "1"}]}}}, {"job.args.a": "[{b: 1}]"}),
        ({}, {}),
    ],
)
def test_settings_as_text(value: object, texts: dict[str, str]) -> None:
    assert dict(setting_texts(value)) == texts


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        ([], []),
        ([{"a": "1"}], []),
        ([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], ["b"]),
        ([{"a": "1", "dir": "x"}, {"a": "1", "dir": "y"}], []),
        ([{"a": "1"}, {"a": "1", "b": "2"}], ["b"]),
        ([{"a": "1"}, {}], []),  # of a folder without the file nothing is known
    ],
)
def test_what_differs(runs: list[dict[str, str]], names: list[str]) -> None:
    assert differing(runs) == names


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n- 2", "", "\0", "!!python/object/apply:os.getcwd []"]
)
def test_files_that_hold_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / CONFIG).write_text(text)
    assert read_settings(tmp_path) == ([], {})


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("optim.lr=1e-3", "optim.lr=1e-3"),
        ("++env.HF_TOKEN='${raydist.secret:env.HF_TOKEN}'", "++env.HF_TOKEN=***"),
        ("+job.args.api_key=abc", "+job.args.api_key=***"),
        ("data.url=s3://me:word@store/x", "data.url=s3://me:***@store/x"),
        ("job.args.max_tokens=9", "job.args.max_tokens=9"),
        ("~env", "~env"),
    ],
)
def test_an_override_has_no_secret(typed: str, shown: str) -> None:
    assert masked_override(typed) == shown


def test_settings_have_no_secrets_even_if_their_file_has(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / CONFIG).write_text(
        "env: {API_KEY: abc, HOME: x}\nargs: [--token, abc, --seed, '1']\n"
    )
    (tmp_path / OVERRIDES).write_text("- env.API_KEY=abc\n")
    assert read_settings(tmp_path) == (
        ["env.API_KEY=***"],
        {"env.API_KEY": "***", "env.HOME": "x", "args": "[--token, ***, --seed, 1]"},
    )


def write(folder: Path, lr: str, *reports: kinds.Event) -> None:
    (folder / ".hydra").mkdir(parents=True)
    (folder / CONFIG).write_text(f"seed: 0\nhalf: true\noptim:\n  lr: {lr}\ndir: {folder}\n")
    (folder / OVERRIDES).write_text(f"- optim.lr={lr}\n")
    with Events(folder / "events.jsonl") as events:
        events.add(kinds.Run(name="job", dir=str(folder)))
        for each in reports:
            events.add(each)


def test_the_list_has_last_values_and_the_settings_that_differ(tmp_path: Path) -> None:
    report = kinds.Report(rank=0, step=1, values={"loss": 3.0, "steps": 9, "accuracy": 0.5})
    later = kinds.Report(rank=0, step=2, values={"loss": 2.0, "note": "text", "grad": float("nan")})
    other = kinds.Report(rank=1, step=2, values={"loss": 7.0})
    write(tmp_path / "one", "1e-3", report, later, other)
    done = kinds.Result(
        status="finished", metrics={"loss": 1, "accuracy": 0.75, "bad": float("nan")}
    )
    write(tmp_path / "two", "0.1", report, done)
    assert read_settings(tmp_path / "one").overrides == ["optim.lr=1e-3"]
    rows = {row["run"]: row for row in list_rows(tmp_path)}
    assert rows["one"]["values"] == {"loss": 2.0, "accuracy": 0.5}
    assert rows["two"]["values"] == {"loss": 1.0, "accuracy": 0.75}
    assert [rows[name]["settings"] for name in ("one", "two")] == [
        {"optim.lr": "1e-3"},
        {"optim.lr": "0.1"},
    ]
    with Events(tmp_path / "one/events.jsonl") as events:
        events.add(done)
    assert {row["status"] for row in list_rows(tmp_path)} == {"finished"}
