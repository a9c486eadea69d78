"""A run that has left its records in a store, watched from there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import raydist
from raydist.shared.errors import ConfigError
from raydist.state.object_store import environment
from raydist.tools import watch
from raydist.watch.web import mirror
from tests.stores import store


def ten_steps() -> None:
    for step in range(1, 11):
        print("step", step)
        raydist.report(step=step, loss=1 / step)


def test_the_page_and_the_trace_of_a_run_in_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirror, "FIRST_S", 0.0)  # a store that takes longer to send the events
    with store() as server, environment(server.env):
        raydist.run(
            ten_steps,
            "storage=s3://bucket/runs",
            "name=stored",
            "group=inline",
            "scale=1x1",
            "watch.progress=none",
        )
        (events,) = [name for name in server.files("runs/stored/") if name.endswith("events.jsonl")]
        url = f"s3://bucket/{events.rpartition('/')[0]}"
        assert watch.main([url, "--export", "a.html"]) == 0
        (data,) = re.findall(
            r'<script type="application/json" id="data">(.*)</script>', Path("a.html").read_text()
        )
        sections = json.loads(data)["sections"]
        assert sections["state"]["status"] == "finished"
        assert sections["curves"]["loss"][1][0] == [*range(1, 11)]
        assert watch.main([f"{url}/", "--trace", "b.json"]) == 0
        assert json.loads(Path("b.json").read_text())["traceEvents"]
        capsys.readouterr()
        assert watch.main(["s3://bucket/runs", "--export", "c.html"]) == ConfigError.exit_code
        assert f"type {url}" in capsys.readouterr().err
        assert watch.main(["s3://bucket/elsewhere/run"]) == ConfigError.exit_code
        assert "no run is there" in capsys.readouterr().err
        server.stop()
        assert watch.main([url]) == ConfigError.exit_code
        assert "it cannot be read" in capsys.readouterr().err
