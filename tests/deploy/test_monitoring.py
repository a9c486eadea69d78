"""deploy/monitoring on a real Prometheus, which finds real runs by Ray's own discovery, and a real
Alertmanager."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.node.load import read_ports
from tests.conftest import ROOT
from tests.programs import Program
from tests.waiting import wait_until

MONITORING = ROOT / "deploy" / "monitoring"
requires_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus: apt install prometheus",
)
ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
requires_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None, reason="no Alertmanager: apt install prometheus-alertmanager"
)
SHORTER = {
    "for: 1m": "for: 8s", "for: 5m": "for: 8s", "> 600": "> 8", "4 * 3600": "8", "[10m]": "[40s]",
    "offset 10m": "offset 40s",
}  # fmt: skip
"""The durations in alerts.yaml, and those with which the test has time to see each alert fire. All
but the last two are longer than this Ray keeps a gauge that is not set again: 4 s, after at most 2
s until it is sent."""
FAILS = """
import raydist

def job(config):
    raydist.report(step=1, loss=1.0)
    raise ValueError("struck")
"""
TROUBLED = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist

HERE = Path("{here}")


class Troubled(nn.Module):
    steps = 0

    def forward(self, x):
        Troubled.steps += 1
        if raydist.rank().rank == 1:
            if Troubled.steps == 20 and not (HERE / "killed").exists():
                (HERE / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while (HERE / "hang").exists():
                time.sleep(0.05)
            time.sleep(0.1 if (HERE / "slow").exists() else 0)
        time.sleep(0.05)  # what the ranks of a busy machine differ by is little of it
        return x


def job(config):
    model = nn.Sequential(nn.Linear(4, 4), Troubled(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
    return raydist.fit(config, model=model, train=data, loss=nn.functional.cross_entropy)
"""
"""Rank 1 is killed once, and is slow or hangs while there is a file of that name."""
RAY = """#!/bin/sh
token=$HOME/.ray/auth_token
if [ "$2" = --generate ] && [ ! -e "$token" ]; then
    mkdir "$HOME/.ray" && printf secret >"$token"
fi
[ "$1" = start ] && echo "mode $RAY_AUTH_MODE" >"$HOME/started"
cat "$token"
"""
"""Stands for `ray`, as far as docs/monitoring.md types it: a token, a head."""


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]


def board() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((MONITORING / "grafana-board.json").read_text())
    return read


def test_the_board_has_each_run_also_one_that_reports_no_step() -> None:
    (chosen,) = (each for each in board()["templating"]["list"] if each["name"] == "run")
    name = re.fullmatch(r"label_values\(ray_raydist_(\w+), run\)", chosen["query"])
    assert name is not None
    assert name[1] == "hang_seconds"  # which `Metrics` sets at the beginning
    assert chosen["definition"] == chosen["query"]


def expressions() -> dict[str, str]:
    """Return every expression of the board and the alerts, with the choice of all runs in place of
    Grafana's variables."""
    panels = {
        each["title"]: target["expr"] for each in board()["panels"] for target in each["targets"]
    }
    marks = {each["name"]: each["expr"] for each in board()["annotations"]["list"]}
    alerts = {each["alert"]: each["expr"] for each in rules()}
    return {name: re.sub(r"\$\w+", ".*", text) for name, text in (panels | marks | alerts).items()}


def typed_lines() -> list[str]:
    """Return the lines that docs/monitoring.md types on the head, from Ray to Prometheus."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    first_block = re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE)[0]
    return [line.strip() for line in first_block.splitlines()]


def test_prometheus_has_the_token_with_which_the_page_starts_ray(tmp_path: Path) -> None:
    commands, monitoring = tmp_path / "bin", tmp_path / "deploy" / "monitoring"
    commands.mkdir()
    monitoring.mkdir(parents=True)
    for name, text in (("ray", RAY), ("prometheus", "#!/bin/sh\ntest -s ray-token\n")):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    typed = "\n".join(typed_lines()).replace("/tmp/ray-", f"{tmp_path}/ray-")
    env = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run(["bash", "-euc", typed], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "started").read_text() == "mode token\n"
    token = monitoring / "ray-token"
    assert token.read_text() == "secret"
    assert token.stat().st_mode & 0o077 == 0


@requires_prometheus
def test_each_alert_has_the_durations_that_it_should(tmp_path: Path) -> None:
    for path in (MONITORING / "alerts.yaml", ROOT / "tests" / "deploy" / "alerts_test.yaml"):
        shutil.copy(path, tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tested = (tmp_path / "alerts_test.yaml").read_text()
    fired = {each["alertname"] for test in yaml.safe_load(tested)["tests"] for each in test["alert_rule_test"]
             if each["exp_alerts"]}  # fmt: skip
    assert fired == {each["alert"] for each in rules()}


class Prometheus:
    """One with deploy/monitoring/prometheus.yaml, but for the ports, the token, the intervals and
    SHORTER."""

    def __init__(self, folder: Path, dashboard: int, port: int, alertmanager: int) -> None:
        settings = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (discovery,) = settings["scrape_configs"][0]["http_sd_configs"]
        discovery |= {
            "url": discovery["url"].replace("8265", str(dashboard)),
            "refresh_interval": "1s",
        }
        (receivers,) = settings["alerting"]["alertmanagers"][0]["static_configs"]
        receivers["targets"] = [f"127.0.0.1:{alertmanager}"]
        assert discovery["authorization"]["credentials_file"] == "ray-token"
        (writes_token,) = [line for line in typed_lines() if "ray-token" in line]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(
            ["bash", "-c", writes_token], cwd=folder, env={**os.environ, "PATH": path}, check=True
        )
        (folder / "alerts.yaml").write_text(shortened((MONITORING / "alerts.yaml").read_text()))
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
        self.url = f"http://127.0.0.1:{port}/api/v1"
        words = [
            "--config.file=prometheus.yaml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["prometheus", *words], cwd=folder, stdout=log, stderr=log
            )

    def ask(self, path: str, **words: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/{path}?{urllib.parse.urlencode(words)}", timeout=60
        ) as answer:
            return json.load(answer)["data"]

    def series(self) -> dict[str, list[dict[str, str]]]:
        """Return every series of raydist that was ever seen, by its name."""
        result: dict[str, list[dict[str, str]]] = {}
        for each in self.ask("series", **{"match[]": '{__name__=~"ray_raydist_.+"}'}):
            result.setdefault(each["__name__"], []).append(each)
        return result

    def value(self, query: str) -> float:
        """Return a value; Ray forgets a gauge for a while that a busy driver has set late."""
        samples: list[Any] = []

        def known() -> bool:
            samples[:] = self.ask("query", query=f"max({query})")["result"]
            return bool(samples)

        wait(known, query)
        (sample,) = samples
        return float(sample["value"][1])

    def alerts(self, ever: bool = False) -> set[tuple[str, str]]:
        """(alert, run) of those that fire now, or that ever did."""
        query = 'ALERTS{alertstate="firing"}'
        result = self.ask("query", query=f"max_over_time({query}[1h])" if ever else query)["result"]
        return {(each["metric"]["alertname"], each["metric"]["run"]) for each in result}


class Webhook:
    """A receiver of Alertmanager's messages; it runs inside the `with` block."""

    def __init__(self) -> None:
        self.alerts: set[tuple[str, str, str]] = set()
        """(state, alert, run) of all messages, where the state is firing or resolved."""
        outer = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for each in body["alerts"]:
                    labels = each["labels"]
                    outer.alerts.add((each["status"], labels["alertname"], labels["run"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Webhook:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def start_alertmanager(folder: Path, port: int, webhook: str) -> subprocess.Popen[bytes]:
    """Start one with deploy/monitoring/alertmanager.yaml, but for the ports, the URL and the
    intervals."""
    settings = yaml.safe_load((MONITORING / "alertmanager.yaml").read_text())
    settings["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    settings["receivers"][0]["webhook_configs"][0]["url"] = webhook
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(settings))
    assert ALERTMANAGER is not None
    words = [
        "--config.file=alertmanager.yaml",
        "--storage.path=alerts",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",  # no others to share alerts with
    ]
    with (folder / "alertmanager.log").open("w") as log:
        return subprocess.Popen([ALERTMANAGER, *words], cwd=folder, stdout=log, stderr=log)


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    return text


def wait(condition: Callable[[], bool], what: str, run: Program | None = None) -> None:
    """Return once the condition is true, within four minutes; fail if `run` ends before that."""
    (run.wait_until if run else wait_until)(condition, what, 240)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass(frozen=True)
class Watched:
    """A Ray, the Prometheus that watches it, and who is told of its alerts."""

    address: str
    prometheus: Prometheus
    webhook: Webhook


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A Ray with a Prometheus and an Alertmanager."""
    dashboard = free_port()
    command = [sys.executable, str(ROOT / "tests" / "scripts" / "monitored.py"), str(dashboard)]
    with (tmp_path / "errors").open("w") as errors:
        ray = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert ray.stdin is not None
    assert ray.stdout is not None
    servers: list[subprocess.Popen[bytes]] = []
    try:
        address = ray.stdout.readline().strip()
        assert address, (tmp_path / "errors").read_text()
        with Webhook() as webhook:
            port = free_port()
            servers.append(start_alertmanager(tmp_path, port, webhook.url))
            prometheus = Prometheus(tmp_path, dashboard, free_port(), port)
            servers.append(prometheus.process)
            yield Watched(address, prometheus, webhook)
    finally:
        ray.stdin.close()
        for server in servers:
            server.kill()
            server.wait()
        ray.wait(120)


def start(folder: Path, job: str, address: str, *words: str) -> Program:
    """Start a run of this job as a person does; its name is that of its folder."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(job.replace("{here}", str(folder)))
    return Program(folder, "job=job.py", f"name={folder.name}", *words, address=address)


@pytest.mark.ray
@pytest.mark.timeout(1200)
@requires_prometheus
@requires_alertmanager
def test_each_alert_fires_for_a_real_run_and_is_over_when_its_reason_is(
    watched: Watched, tmp_path: Path
) -> None:
    prometheus, address = watched.prometheus, watched.address
    (tmp_path / "troubled").mkdir()
    (tmp_path / "troubled" / "slow").touch()
    failed = start(tmp_path / "failed", FAILS, address, "scale=1x1", "restart=none")
    run = start(tmp_path / "troubled", TROUBLED, address, "scale=1x2", "train.steps=100000", "train.epochs=100000",
                "data.batch_size=4", "checkpoint.every=10", "snapshot.every=1", "hang.after_s=1",
                "hang.end=false")  # fmt: skip
    assert failed.wait() == 1, failed.screen
    run.wait_for_step(30)
    lost, name = (f"{each.folder.name}/{each.run_dir.name}" for each in (failed, run))

    def fires(alert: str, of: str = name) -> bool:
        return (alert, of) in prometheus.alerts(ever=True)

    def over(*alerts: str) -> bool:
        return not {(alert, name) for alert in alerts} & prometheus.alerts()

    wait(lambda: fires("RaydistRunFailed", lost), "RaydistRunFailed, whose driver is gone")
    wait(lambda: fires("RaydistRestarted"), "RaydistRestarted", run)
    wait(lambda: fires("RaydistSlowRank"), "RaydistSlowRank", run)
    (run.folder / "slow").unlink()
    wait(lambda: over("RaydistSlowRank"), "the end of RaydistSlowRank", run)
    hangs = ("RaydistHang", "RaydistNoProgress", "RaydistCheckpointTooOld")
    wait(lambda: over(*hangs), "a run that continues", run)
    (run.folder / "hang").touch()
    wait(lambda: {(alert, name) for alert in hangs} <= prometheus.alerts(), f"all of {hangs}", run)
    (run.folder / "hang").unlink()
    wait(lambda: over(*hangs), "the end of the hang", run)
    assert_all_series(prometheus, name)
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.screen
    wait(lambda: not prometheus.alerts(), "the end of all alerts")
    assert {alert for alert, _ in prometheus.alerts(ever=True)} == {
        each["alert"] for each in rules()
    }
    assert not fires("RaydistRunFailed")
    wait(
        lambda: not prometheus.ask("query", query=f'ray_raydist_step{{run="{name}"}}')["result"],
        "the last gauge",
    )
    told = {
        (state, alert, of)
        for alert, of in prometheus.alerts(ever=True)
        for state in ("firing", "resolved")
    }
    wait(lambda: told <= watched.webhook.alerts, "the messages to the webhook")
    assert watched.webhook.alerts == told
    stopped = f'ray_raydist_runs_total{{run="{name}",status="stopped"}} == 1'
    wait(
        lambda: bool(prometheus.ask("query", query=stopped)["result"]),
        "the count of the run that was stopped",
    )


def assert_all_series(prometheus: Prometheus, run: str) -> None:
    """Assert that the run has all that board and alerts name."""
    wanted = {
        name for text in expressions().values() for name in re.findall(r"ray_raydist_\w+", text)
    }
    assert len(wanted) >= 12
    if not read_ports():  # a container without a network
        wanted = {name for name in wanted if "_port_" not in name}
    wait(lambda: wanted <= prometheus.series().keys(), f"not all of {wanted}")
    for name, text in expressions().items():
        prometheus.ask("query", query=text)  # HTTP 400: Prometheus does not understand it
        assert "ray_raydist_" in text, name
    of = f'run="{run}"'
    series = prometheus.series()
    assert {"loss", "lr"} <= {
        each["name"] for each in series["ray_raydist_value"] if each["run"] == run
    }
    assert prometheus.value(f"ray_raydist_steps{{{of}}}") == 100000
    assert prometheus.value(f"ray_raydist_step{{{of}}}") > 30
    assert prometheus.value(f'ray_raydist_restarts_total{{{of},cause="killed"}}') == 1
    assert {each["cause"] for each in series["ray_raydist_restarts_total"]} == {"killed"}
    assert 0 < prometheus.value(f"ray_raydist_goodput_ratio{{{of}}}") <= 1
    assert {each["rank"] for each in series["ray_raydist_slow_ratio"]} == {"1"}
    assert {each["where"] for each in series["ray_raydist_kept_timestamp_seconds"]} == {
        "disk",
        "memory",
    }
