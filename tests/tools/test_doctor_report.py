"""The report of 200 nodes fits on a screen, says what to type, and ends with its verdict."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from raydist.messages.checkup import Trip
from raydist.network.finding import Finding
from raydist.tools import doctor_findings, doctor_report
from raydist.tools.doctor_findings import CHECKS, Host
from raydist.tools.doctor_report import Report
from tests.programs import strip_escapes

FINE, SILENT = Trip("fine", "", 1e-4), Trip("silent", "no answer within 3 s")


def report(n: int, cut_off: int | None = None, gpus: bool = False) -> Report:
    """n nodes, one of them perhaps without a network, all of them with a loopback name."""
    hosts = [Host(f"host{i}", f"10.0.0.{i + 1}", "eth0") for i in range(n)]
    result = Report(hosts, f"{n} ranks on {n} nodes, backend gloo, over eth0", gpus)
    rows = [
        [SILENT if (i == cut_off) != (j == cut_off) else FINE for j in range(n)] for i in range(n)
    ]
    result.note_trips(rows, 1.25)
    for check in CHECKS:
        result.note_check(check)
    result.add("peers", *doctor_findings.check_peers(hosts, rows))
    result.add("hostname", *doctor_findings.check_hostnames(hosts, [["127.0.1.1"]] * n))
    return result


def shown(capsys: pytest.CaptureFixture[str], full_report: Report) -> str:
    doctor_report.show_report(full_report, as_json=False)
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], full_report: Report) -> dict[str, Any]:
    doctor_report.show_report(full_report, as_json=True)
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_200_nodes_fit_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, report(200, cut_off=7))
    assert len(text.splitlines()) < 30
    assert re.search(r"^  node +hostname  peers$", text, re.MULTILINE)
    assert re.search(r"^  host7 +warn +FAIL$", text, re.MULTILINE)
    assert re.search(r"^  host0, host1, host2, host3 and 195 more  warn +ok$", text, re.MULTILINE)
    assert "FAIL  peers: host7 (10.0.0.8) <-> all 199 others" in text
    assert "warn  hostname on every node: " in text
    verdict = f"this job would break: peers (1 of {len(CHECKS)} checks failed, 1 warning)"
    assert text.splitlines()[-1] == verdict


def test_the_figures_of_the_network_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report = report(3)
    slow = [[*row] for row in doctor_report.trips if row]
    slow[2][1] = Trip("fine", "", 0.004)
    doctor_report.note_trips(slow, 1.25)
    text = shown(capsys, doctor_report)
    assert (
        "calls 6 from node to node in 1.2 s; a round trip takes 0.10 ms, 4.00 ms at most (host2 "
        "-> host1)" in text
    )
    network = data(capsys, doctor_report)["network"]
    assert (network["calls"], network["took_s"], network["rtt_most"]) == (
        6,
        1.25,
        ["host2", "host1"],
    )


def test_json_has_every_node_and_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    values = data(capsys, report(200, cut_off=7))
    assert values["ok"] is False
    assert values["verdict"].startswith("this job would break")
    assert values["nodes"][7] == {"name": "host7", "address": "10.0.0.8", "interface": "eth0"}
    assert list(values["checks"]) == list(CHECKS)
    assert values["checks"]["peers"]["host7"] == "FAIL"
    assert values["checks"]["peers"]["host8"] == "ok"
    assert {len(states) for states in values["checks"].values()} == {200}
    assert [finding["check"] for finding in values["findings"]] == ["peers", "hostname"]
    assert len(values["findings"][1]["nodes"]) == 200


def test_a_healthy_job_has_no_table_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report = Report([Host("host0", "10.0.0.1", "eth0")], "2 ranks on 1 node")
    doctor_report.note_check("launch")
    doctor_report.note_check("shm")
    text = shown(capsys, doctor_report)
    assert text.splitlines()[-1] == "this job can run: 2 checks, none failed"
    assert "fine  launch, shm" in text
    assert "node  " not in text
    assert not doctor_report.broken


def test_warnings_alone_do_not_break_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report = report(3)
    assert not doctor_report.broken
    assert (
        doctor_report.verdict == f"this job can run: {len(CHECKS)} checks, none failed, 1 warning"
    )


def test_where_gpus_are_the_next_tool_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "raydist bandwidth" in shown(capsys, report(2, gpus=True))
    assert "raydist bandwidth" not in shown(capsys, report(2))
    assert "raydist bandwidth" not in shown(capsys, report(3, cut_off=0, gpus=True))


def test_a_job_that_was_never_placed_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report = Report()
    doctor_report.add(
        "launch",
        Finding(
            "launch", "fail", (), "gave up after 600 s (scale.wait_s): waiting for 1 more node"
        ),
    )
    text = shown(capsys, doctor_report)
    assert "FAIL  launch: gave up after 600 s" in text
    assert "mend" not in text
    assert text.splitlines()[-1] == "this job would break: launch (1 of 1 check failed)"


def test_many_rows_and_findings_are_cut_short_and_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = [Host(f"host{i}", f"10.0.0.{i}", "eth0") for i in range(64)]
    doctor_report = Report(hosts, "64 ranks")
    for bit in range(6):
        bad = tuple(host.name for i, host in enumerate(hosts) if i >> bit & 1)
        doctor_report.add(
            f"check{bit}",
            *(Finding(f"check{bit}", "warn", bad, f"{bit} {n}", "x") for n in range(3)),
        )
    text = shown(capsys, doctor_report)
    assert "... and 48 more rows" in text
    assert "... and 6 more of level warn: --json has all" in text
    assert len(data(capsys, doctor_report)["findings"]) == 18


def test_no_word_to_type_is_broken_over_lines(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_report = Report([Host("a", "10.0.0.1", "eth0")])
    word = "scale.labels." + "x" * 150 + "=some-value-with-hyphens"
    doctor_report.add("peers", Finding("peers", "fail", ("a",), "short", f"say {word} please"))
    assert word in shown(capsys, doctor_report)


def test_a_terminal_gets_colours_and_the_same_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = shown(capsys, report(5, cut_off=2))
    assert "\x1b[" in coloured
    monkeypatch.delenv("FORCE_COLOR")
    without = shown(capsys, report(5, cut_off=2))
    assert "\x1b[" not in without
    assert strip_escapes(coloured).split() == without.split()
