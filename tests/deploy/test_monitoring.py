"""deploy/monitoring on a real Prometheus, which finds a real run by Ray's own discovery."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
requires_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus: apt install prometheus",
)


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MONITORING / "grafana-board.json").read_text())
    return read


def expressions() -> dict[str, str]:
    """Every expression of the board and the alerts, with the choice of all runs in place of Grafana's variables."""
    panels = {each["title"]: target["expr"] for each in board()["panels"] for target in each["targets"]}
    marks = {each["name"]: each["expr"] for each in board()["annotations"]["list"]}
    alerts = {each["alert"]: each["expr"] for each in rules()}
    return {name: re.sub(r"\$\w+", ".*", text) for name, text in (panels | marks | alerts).items()}


@requires_prometheus
def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    for path in (MONITORING / "alerts.yaml", ROOT / "tests" / "deploy" / "alerts_test.yaml"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tested = (tmp_path / "alerts_test.yaml").read_text()
    fired = {each["alertname"] for test in yaml.safe_load(tested)["tests"] for each in test["alert_rule_test"]
             if each["exp_alerts"]}  # fmt: skip
    assert fired == {each["alert"] for each in rules()}


class Prometheus:
    """One with deploy/monitoring/prometheus.yaml, but for the ports, the token and the intervals."""

    def __init__(self, folder: Path, dashboard: int, port: int) -> None:
        settings = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (discovery,) = settings["scrape_configs"][0]["http_sd_configs"]
        discovery |= {"url": discovery["url"].replace("8265", str(dashboard)), "refresh_interval": "1s"}
        (folder / discovery["authorization"]["credentials_file"]).write_text(os.environ["RAY_AUTH_TOKEN"])
        shutil.copy(MONITORING / "alerts.yaml", folder)
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self.url = f"http://127.0.0.1:{port}/api/v1"
        words = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(["prometheus", *words], cwd=folder, stdout=log, stderr=log)

    def ask(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}?{urllib.parse.urlencode(words)}", timeout=5) as answer:
            return json.load(answer)["data"]

    def series(self) -> dict[str, list[dict[str, str]]]:
        """Every series of raydist that was ever seen, by its name."""
        found: dict[str, list[dict[str, str]]] = {}
        for each in self.ask("series", **{"match[]": '{__name__=~"ray_raydist_.+"}'}):
            found.setdefault(each["__name__"], []).append(each)
        return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Prometheus, str]]:
    """A Prometheus that has watched a run, and the name of the run's folder."""
    dashboard = free_port()
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "monitored.py"), str(dashboard)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "errors").open("w") as errors:
        run = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert run.stdin is not None
    assert run.stdout is not None
    prometheus = None
    try:
        assert run.stdout.readline() == "up\n", (tmp_path / "errors").read_text()
        prometheus = Prometheus(tmp_path, dashboard, free_port())
        ran = next(line for line in run.stdout if line.startswith("ran "))
        yield prometheus, ran[4:].strip()
    finally:
        run.stdin.close()
        if prometheus is not None:
            prometheus.process.kill()
            prometheus.process.wait()
        run.wait(60)


@pytest.mark.ray
@requires_prometheus
def test_a_run_is_found_and_has_all_that_board_and_alerts_name(watched: tuple[Prometheus, str]) -> None:
    prometheus, folder = watched
    wanted = {name for text in expressions().values() for name in re.findall(r"ray_raydist_\w+", text)}
    assert len(wanted) >= 12
    until = time.monotonic() + 30
    while (missing := wanted - prometheus.series().keys()) and time.monotonic() < until:
        time.sleep(0.5)
    assert not missing
    series = prometheus.series()
    assert f"struck/{folder}" in {each["run"] for each in series["ray_raydist_step"]}
    assert {"loss", "lr", "test_loss"} <= {each["name"] for each in series["ray_raydist_value"]}
    for name, text in expressions().items():
        prometheus.ask("query", query=text)  # HTTP 400: Prometheus does not understand it
        assert "ray_raydist_" in text, name

    def newest(query: str) -> float:
        (found,) = prometheus.ask("query", query=f"max({query})")["result"]
        return float(found["value"][1])

    of = f'run="struck/{folder}"'
    assert newest(f"max_over_time(ray_raydist_step{{{of}}}[1h])") == 48
    assert newest(f"max_over_time(ray_raydist_steps{{{of}}}[1h])") == 48
    assert newest(f'max_over_time(ray_raydist_restarts{{{of},cause="killed"}}[1h])') == 1
    assert newest(f'max_over_time(ray_raydist_restarts{{{of},cause="oom"}}[1h])') == 0
    assert newest(f'ray_raydist_runs_total{{{of},status="finished"}}') == 1
    assert 0 < newest(f"max_over_time(ray_raydist_goodput_ratio{{{of}}}[1h])") <= 1
    assert newest('ray_raydist_port_sent_bytes_total{run="told/1",port="mlx5_0/1"}') == 7000
    (slow,) = series["ray_raydist_slow_ratio"]
    assert (slow["rank"], slow["host"]) == ("1", "n1")
