"""The figures of the nodes over time: bounded series, and their charts in a real browser."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from raydist.shared import kinds
from raydist.watch.web.node_figures import COLUMNS, LINES, NodeFigures, halved, outermost
from tests.browser import Browser, needs_chromium
from tests.records import changed, event, line
from tests.scenarios.test_watch_page import assert_only_local


def load(cpu: float, sent: int = 0, gpus: int = 0) -> Mapping[str, Any]:
    """Return the load of a node."""
    gpu = {"util": cpu, "memory": [10**9, 8 * 10**9], "power_w": None, "temp_c": 50}
    return {
        "cpu": cpu,
        "memory": [2 * 10**9, 4 * 10**9],
        "gpus": [gpu] * gpus,
        "ports": {"eth0": [0, sent]},
    }


def at(t: float, nodes: Mapping[str, Any]) -> kinds.Nodes:
    """Return the event at a time."""
    found = kinds.from_json({"t": t, "kind": "nodes", "nodes": nodes})
    assert isinstance(found, kinds.Nodes)
    return found


def figures(*loads: Mapping[str, Any]) -> NodeFigures:
    """Return the figures after an event every ten seconds. `loads`: by host, of each event."""
    found = NodeFigures()
    for number, nodes in enumerate(loads):
        found.add(at(1000.0 + 10 * number, nodes))
    return found


def values(found: NodeFigures, figure: str, host: str) -> Mapping[str, Sequence[float | None]]:
    return dict(found.shown(host)["figures"][figure]["lines"])


def test_a_node_that_comes_late_or_does_not_answer_has_a_gap() -> None:
    found = figures(
        {"a": load(0.5, 100)}, {"b": load(0.1)}, {"a": load(0.7, 400)}, {"b": load(0.3)}
    )
    assert found.shown()["times"] == [1000, 1010, 1020, 1030]
    assert values(found, "CPU", "") == {"a": [0.5, None, 0.7, None], "b": [None, 0.1, None, 0.3]}
    assert values(found, "sent", "a") == {"eth0": [None, None, 15, None]}
    assert list(found.shown("b")["figures"]) == ["CPU", "memory", "received", "sent"]


def test_a_figure_that_no_gpu_reports_has_no_chart() -> None:
    found = figures({"a": load(0.5, gpus=2)})
    assert "GPU power" not in found.shown("a")["figures"]
    assert values(found, "GPU temperature", "a") == {"GPU 0": [50], "GPU 1": [50]}
    assert values(found, "GPU utilisation", "") == {"a GPU 0": [0.5], "a GPU 1": [0.5]}


def test_a_long_run_keeps_the_means_of_its_stretches() -> None:
    count = 10 * COLUMNS
    found = figures(*({"a": load(number / count)} for number in range(count)))
    times = found.shown()["times"]
    (line,) = values(found, "CPU", "a").values()
    assert COLUMNS < len(line) == len(times) <= 2 * COLUMNS
    assert times == sorted(times)
    assert {b - a for a, b in pairwise(times)} == {80}
    for t, value in zip(times, line, strict=True):  # the mean of eight events
        assert value == pytest.approx(((t - 1000) / 10 + 3.5) / count, abs=1e-5)


def test_a_node_that_left_stays_at_its_times() -> None:
    left = [{"a": load(0.5)}] * 4 + [{"b": load(0.1)}] * (2 * COLUMNS - 4)
    found = figures(*left, {"b": load(0.2)})
    lines = values(found, "CPU", "")
    assert {len(line) for line in lines.values()} == {len(found.times)} == {COLUMNS + 1}
    assert [v for v in lines["a"] if v is not None] == [0.5, 0.5]
    assert lines["b"][-1] == pytest.approx(0.2)


def test_a_node_that_is_lost_is_not_shown_as_present() -> None:
    found = figures({"a": load(0.5), "b": load(0.98)}, {"a": load(0.6)})
    assert found.present({"a"}) == {"a": found.newest["a"]}
    assert found.present({"a", "b"}).keys() == {"a", "b"}  # it has ranks, and may be busy
    assert found.present(set()).keys() == {"a"}  # a spare has none


def test_half_a_line_is_the_mean_of_what_is_known() -> None:
    nan = math.nan
    assert list(halved([1, 2, 4, nan, nan, 8])) == [1.5, 4, 8]
    assert math.isnan(halved([nan, nan])[0])


def test_of_many_lines_the_lowest_and_the_highest_are_shown() -> None:
    middle = {(f"n{number}", ""): float(number) for number in range(LINES)}
    assert outermost(middle) == list(middle)
    many = {(f"n{number}", ""): float(number) for number in range(3 * LINES)}
    names = [int(host[1:]) for host, _ in outermost(many)]
    assert names == [*range(LINES // 2), *range(3 * LINES - LINES // 2, 3 * LINES)]


def test_another_run_in_the_folder_continues_the_lines() -> None:
    found = figures({"a": load(0.5, 100)}).for_next_run()
    assert found.newest == {}
    found.add(at(1100.0, {"a": load(0.7, 5)}))
    assert values(found, "CPU", "a") == {"a": [0.5, 0.7]}
    assert "sent" not in found.shown("a")["figures"]  # its counters began anew


def write_nodes(folder: Path, hosts: int, count: int, gpus: int = 2) -> Path:
    """Write a run whose nodes have reported their load `count` times, and that was restarted."""
    folder.mkdir(parents=True)
    slots = [{"rank": n, "host": f"n{n}", "ip": "10.0.0.1", "node": "n"} for n in range(hosts)]
    events = [
        event("run", name="job", dir=str(folder), target="x", pages=0),
        event("plan", backend="gloo", world_size=hosts, slots=slots),
        event("restart", text="once more", step=0),
        *(
            kinds.Nodes(
                nodes={
                    f"n{n}": load((n + 1) / (hosts + 1), 3000 * number * (n + 1), gpus)
                    for n in range(hosts)
                }
            )
            for number in range(count)
        ),
    ]
    text = "".join(line(changed(each, t=1.7e9 + 10 * n)) for n, each in enumerate(events))
    (folder / "events.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    write_nodes(folder / "runs/job/three", 3, 20)
    write_nodes(folder / "runs/job/forty", 40, 4)
    write_nodes(folder / "runs/job/alone", 1, 5, gpus=0)
    return folder


def drawn(browser: Browser, name: str, expected: Sequence[Sequence[float | None]]) -> None:
    """Wait until a chart has these values."""
    plot = f"raydist.nodes.get({json.dumps(name)}).plot"
    browser.wait_until(
        f"JSON.stringify({plot}.data.slice(1)) == JSON.stringify({json.dumps(expected)})"
    )


def choose(browser: Browser, node: str) -> None:
    """Choose a node as a person does."""
    box = "document.querySelector('#node')"
    browser.value(f"void ({box}.value = {json.dumps(node)})")
    browser.value(f"{box}.dispatchEvent(new Event('change'))")


@needs_chromium
@pytest.mark.slow
def test_the_charts_of_all_nodes_and_of_one(browser: Browser, folder: Path, link: str) -> None:
    browser.open(f"{link}?run=three")
    drawn(browser, "CPU", [[v] * 20 for v in (0.25, 0.5, 0.75)])
    drawn(browser, "sent", [[None, *[300.0 * n] * 19] for n in (1, 2, 3)])
    legends = "[...document.querySelectorAll('#node-charts .lines')].map((one) => one.innerText)"
    assert browser.value(legends)[0].split() == ["n0", "25%", "n1", "50%", "n2", "75%"]
    assert "n2 eth0 900 B/s" in browser.value(legends)[-1]
    choose(browser, "n1")
    drawn(browser, "GPU utilisation", [[0.5] * 20] * 2)
    browser.wait_until("document.querySelectorAll('#node-charts figure').length == 7")
    with (folder / "runs/job/three/events.jsonl").open("a") as file:
        more = {"n1": load(0.9, 57000 * 2 + 4000, 2)}
        file.write(line(at(1.7e9 + 10 * 23, more)))
    drawn(browser, "CPU", [[0.5] * 20 + [0.9]])
    drawn(browser, "sent", [[None, *[600.0] * 19, 400.0]])
    browser.open(f"{link}?run=alone")
    drawn(browser, "CPU", [[0.5] * 5])
    assert not browser.value("document.querySelector('#node').checkVisibility()")
    browser.open(f"{link}?run=forty")
    browser.wait_until(f"raydist.nodes.get('CPU').plot.data.length == {1 + LINES}")
    assert f"the {LINES} lowest and highest of 40 lines" in browser.text("#node-charts")
    assert_only_local(browser)


@needs_chromium
@pytest.mark.slow
def test_a_chart_of_a_node_is_zoomed_and_a_copy_has_it(
    browser: Browser,
    folder: Path,
    link: str,  # whose server the page before asks
) -> None:
    words = ["runs/job/forty", "--export", "forty.html"]
    subprocess.run(
        [sys.executable, "-m", "raydist.tools.watch", *words],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    browser.open(f"file://{folder}/forty.html")
    browser.wait_until(f"raydist.nodes.get('CPU').plot.data.length == {1 + LINES}")
    options = "[...document.querySelectorAll('#node option')].map((one) => one.value)"
    assert browser.value(options) == ["", *(f"n{n}" for n in range(16))]
    choose(browser, "n15")
    drawn(browser, "CPU", [[0.390244] * 4])
    browser.value("document.querySelector('#node-charts [role=application]').focus()")
    scale = "(({ min, max }) => max - min)(raydist.nodes.get('CPU').plot.scales.x)"
    browser.wait_until(f"{scale} == 30")
    browser.press("+")
    browser.wait_until(f"{scale} == 15")
    browser.press("0")
    browser.wait_until(f"{scale} == 30")
    assert_only_local(browser)
