"""What the doctor concludes from what it measured: every check fires once and is silent once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from raydist.messages.checkup import Trip
from raydist.network.finding import Finding
from raydist.shared.stack_ways import Tracing
from raydist.tools import doctor_findings
from raydist.tools.doctor_findings import Host

FINE = Trip("fine", "", 1e-4)
SILENT = Trip("silent", "no answer within 3 s")


def nodes(n: int) -> list[Host]:
    return [Host(f"host{i}", f"10.0.0.{i + 1}", "eth0") for i in range(n)]


def trips(n: int, bad: Callable[[int, int], bool], how: Trip = SILENT) -> list[list[Trip]]:
    """Return the trips between n nodes. `bad` decides by caller and called node."""
    return [[how if bad(i, j) and i != j else FINE for j in range(n)] for i in range(n)]


def texts(findings: Sequence[Finding]) -> list[str]:
    return [finding.text for finding in findings]


def peers(n: int, bad: Callable[[int, int], bool], how: Trip = SILENT) -> list[Finding]:
    return list(doctor_findings.check_peers(nodes(n), trips(n, bad, how)))


# Pairs


def test_all_fine_is_no_finding() -> None:
    everything = trips(200, lambda i, j: False)
    for check in (
        doctor_findings.check_peers,
        doctor_findings.check_latency,
        doctor_findings.check_clocks,
    ):
        assert list(check(nodes(200), everything)) == []


def test_a_broken_link_is_named_by_its_pair() -> None:
    (finding,) = peers(200, lambda i, j: {i, j} == {3, 77})
    assert finding.text == "host3 (10.0.0.4) <-> host77 (10.0.0.78): no answer within 3 s"
    assert finding.nodes == ("host3", "host77")
    assert (finding.check, finding.level) == ("peers", "fail")
    assert "on host3: ip route get 10.0.0.78" in finding.fix


def test_one_direction_alone_is_said_to_be_one() -> None:
    (finding,) = peers(5, lambda i, j: (i, j) == (3, 1))
    assert finding.text.startswith("host3 (10.0.0.4) -> host1 (10.0.0.2): ")


def test_a_node_cut_off_is_one_line_and_the_others_are_not_blamed() -> None:
    (finding,) = peers(200, lambda i, j: 7 in (i, j))
    assert finding.text == "host7 (10.0.0.8) <-> all 199 others: no answer within 3 s"
    assert finding.nodes == ("host7",)


def test_two_nodes_cut_off_are_two_lines() -> None:
    first, second = peers(200, lambda i, j: bool({7, 9} & {i, j}))
    assert first.text.endswith("and 194 more <-> host7, host9: no answer within 3 s")
    assert first.nodes == second.nodes == ("host7", "host9")


def test_two_halves_that_do_not_see_each_other_are_one_line() -> None:
    (finding,) = peers(200, lambda i, j: (i < 100) != (j < 100))
    assert finding.text.startswith(
        "host0, host1, host2, host3 and 96 more <-> host100, host101, host102, host103 and "
    )


def test_no_two_nodes_that_see_each_other_are_one_line() -> None:
    (finding,) = peers(200, lambda i, j: True)
    assert finding.text == "all nodes, from each to any other: no answer within 3 s"
    (finding,) = peers(200, lambda i, j: i < 3 and j < 3)
    assert finding.text == "host0, host1, host2, from each to any other: no answer within 3 s"


def test_firewalls_of_all_sorts_are_told_apart() -> None:
    refused, lost = Trip("refused", "connection refused"), Trip("unreachable", "No route to host")
    for how, word in (
        (refused, "nft list ruleset"),
        (lost, "has no route"),
        (Trip("broken", "x"), "sidecar"),
    ):
        (finding,) = peers(3, lambda i, j: (i, j) == (0, 1), how)
        assert word in finding.fix
    row = trips(3, lambda i, j: (i, j) == (0, 1))
    row[1][0] = refused
    assert len(list(doctor_findings.check_peers(nodes(3), row))) == 2


def test_one_address_on_two_nodes_is_no_firewall() -> None:
    twins = [replace(host, address="172.17.0.1", interface="docker0") for host in nodes(2)]
    (finding,) = doctor_findings.check_peers(
        twins, trips(2, lambda i, j: True, Trip("refused", "connection refused"))
    )
    assert "both nodes have the address 172.17.0.1 on docker0" in finding.fix


def test_long_packets_that_vanish_are_a_matter_of_the_mtu() -> None:
    (finding,) = peers(
        4, lambda i, j: 2 in (i, j), Trip("stalled", "64 KiB did not come back within 9 s", 1e-4)
    )
    assert (finding.check, finding.level, finding.nodes) == ("mtu", "fail", ("host2",))
    assert "ip link set dev eth0 mtu 1400" in finding.fix


def test_a_node_that_gave_no_answer_is_left_out() -> None:
    rows = [None if i == 1 else row for i, row in enumerate(trips(3, lambda i, j: False))]
    assert list(doctor_findings.check_peers(nodes(3), rows)) == []


@pytest.mark.parametrize("seed", range(20))
def test_folded_lines_mean_just_the_pairs_that_they_came_from(seed: int) -> None:
    dice = random.Random(seed)
    n = dice.choice([3, 5, 12])
    pairs = {
        (i, j)
        for i in range(n)
        for j in range(n)
        if i != j and dice.random() < dice.choice([0.1, 0.5, 0.9])
    }
    meant = [
        pair
        for callers, called, both in doctor_findings.fold_pairs(pairs)
        for i in callers
        for j in called
        if i != j
        for pair in ([(i, j), (j, i)] if both and callers != called else [(i, j)])
    ]
    assert sorted(meant) == sorted(pairs)


def test_chaos_among_200_nodes_is_cut_short() -> None:
    dice = random.Random(0)
    findings = peers(200, lambda i, j: dice.random() < 0.3)
    assert len(findings) == doctor_findings.LINES + 1
    assert "more pairs" in findings[-1].text


def test_far_nodes_are_a_warning() -> None:
    (finding,) = doctor_findings.check_latency(
        nodes(6), trips(6, lambda i, j: (i < 3) != (j < 3), Trip("fine", "", 0.045))
    )
    assert finding.level == "warn"
    assert finding.text == "host0, host1, host2 <-> host3, host4, host5: a round trip takes 45 ms"


@pytest.mark.parametrize(
    ("ahead", "text"), [(3.0, "3.0 s ahead"), (-90.0, "90.0 s behind"), (0.3, "")]
)
def test_a_clock_that_is_off_is_named(ahead: float, text: str) -> None:
    rows = trips(5, lambda i, j: False)
    rows[0][4] = Trip("fine", "", 1e-4, ahead)
    findings = list(doctor_findings.check_clocks(nodes(5), rows))
    assert [finding.nodes for finding in findings] == ([("host4",)] if text else [])
    assert all(text in finding.text for finding in findings)


def test_the_first_nodes_own_clock_is_found_by_those_of_the_others() -> None:
    rows = trips(5, lambda i, j: True, Trip("fine", "", 1e-4, -20.0))
    (finding,) = doctor_findings.check_clocks(nodes(5), rows)
    assert finding.nodes == ("host0",)
    assert "20.0 s ahead" in finding.text


# One node at a time


def test_the_store_that_some_do_not_reach() -> None:
    (finding,) = doctor_findings.check_rendezvous(
        nodes(4), ["", "no answer within 3 s", None, "no answer within 3 s"], 40123
    )
    assert finding.text == "host1, host3 -> host0 (10.0.0.1 port 40123): no answer within 3 s"
    assert list(doctor_findings.check_rendezvous(nodes(2), ["", ""], 1)) == []


OWN: dict[str, dict[str, Any]] = {
    "gloo": {"addresses": ["10.0.0.1"]},
    "nccl": {"addresses": ["10.0.0.1"], "interface": "eth0"},
}


def test_libraries_that_go_as_planned_are_no_finding() -> None:
    assert list(doctor_findings.check_loaded_libraries(nodes(2), [OWN, None], [(), ()])) == []


@pytest.mark.parametrize(
    ("answer", "n", "level", "text"),
    [
        ({"addresses": ["127.0.1.1"]}, 2, "fail", "gloo would use 127.0.1.1, not eth0"),
        ({"addresses": ["127.0.1.1"]}, 1, "warn", "gloo would use 127.0.1.1, not eth0"),
        ({"addresses": []}, 2, "fail", "gloo would use no address, not eth0"),
        (
            {"addresses": ["10.9.0.1"], "interface": "ib0"},
            2,
            "warn",
            "gloo would use ib0, not eth0",
        ),
        (
            {"error": "Unable to find address for: ib"},
            2,
            "fail",
            "gloo can't start: Unable to find address for: ib",
        ),
    ],
)
def test_a_library_that_goes_elsewhere(
    answer: dict[str, Any], n: int, level: str, text: str
) -> None:
    (finding,) = doctor_findings.check_loaded_libraries(
        nodes(n), [{"gloo": answer}, *[{}] * (n - 1)], [()] * n
    )
    assert (finding.check, finding.level, finding.text) == ("gloo", level, text)
    assert "'env.GLOO_SOCKET_IFNAME=eth0'" in finding.fix


def test_a_library_on_another_address_of_the_interface_names_both() -> None:
    """It said: nccl would use eth0, not eth0."""
    hosts = nodes(2)
    known = [(f"10.9.0.{i}", host.address) for i, host in enumerate(hosts)]
    replies = [{"nccl": {"addresses": [f"10.9.0.{i}"], "interface": "eth0"}} for i in range(2)]
    check = doctor_findings.check_loaded_libraries
    (finding,) = check(hosts[:1], replies[:1], known[:1])
    assert (finding.check, finding.level) == ("nccl", "warn")
    assert finding.text == "nccl would use 10.9.0.0, not 10.0.0.1: both are addresses of eth0"
    assert finding.fix.startswith("ray start --node-ip-address=10.9.0.0, or remove")
    (both,) = check(hosts, replies, known)
    assert both.nodes == ("host0", "host1")
    assert "10.9.0.0 on host0, not 10.0.0.1" in both.text


def test_nccl_s_word_to_type_is_an_exact_name() -> None:
    (finding,) = doctor_findings.check_loaded_libraries(
        nodes(1), [{"nccl": {"error": "no socket interface found"}}], [()]
    )
    assert "'env.NCCL_SOCKET_IFNAME==eth0'" in finding.fix


def test_a_package_that_one_node_lacks() -> None:
    packages = {"timm": ["timm"], "cv2": ["opencv-python", "opencv-python"]}
    for module in ("timm.models", "raydist.worker.backends.mine"):
        (finding,) = doctor_findings.check_imports(
            nodes(3),
            [{}, {module: "ModuleNotFoundError: No module named 'timm.layers'"}, {}],
            packages,
        )
        assert (finding.nodes, finding.level) == (("host1",), "fail")
        assert finding.fix == "on host1: python -m pip install timm"
    assert list(doctor_findings.check_imports(nodes(2), [{}, {}], packages)) == []


def test_what_to_install_is_a_package_not_a_module_of_that_name() -> None:
    """`pip install cv2` fails, or installs what somebody else has put there."""
    for module, fix in (
        ("cv2", "python -m pip install opencv-python"),
        ("mine", "the package that has the module mine"),
    ):
        errors = [{}, {module: f"ModuleNotFoundError: No module named '{module}'"}]
        (finding,) = doctor_findings.check_imports(nodes(2), errors, {"cv2": ["opencv-python"]})
        assert finding.fix.endswith(fix)


def test_what_keeps_py_spy_from_a_rank_is_a_warning_only_where_it_is_installed() -> None:
    fine, missing = Tracing(py_spy=True), Tracing(py_spy=False)
    refused = Tracing(py_spy=True, filtered=True)
    found = list(doctor_findings.check_stacks(nodes(4), [fine, missing, refused, None]))
    assert [(each.check, each.level, each.nodes) for each in found] == [
        ("stacks", "note", ("host1",)),
        ("stacks", "warn", ("host2",)),
    ]
    assert found[0].text.endswith("py-spy is not installed")
    assert found[0].fix == "pip install py-spy"
    assert "seccomp" in found[1].text


def test_shared_memory_and_the_run_folder() -> None:
    (finding,) = doctor_findings.check_shm(nodes(3), ["", "No space left on device", None])
    assert (finding.nodes, finding.level) == (("host1",), "fail")
    assert list(doctor_findings.check_run_folder(nodes(3), [True, None, True], "/runs")) == []
    (finding,) = doctor_findings.check_run_folder(nodes(3), [True, False, True], "/runs")
    assert (finding.nodes, finding.level) == (("host1",), "note")
    (finding,) = doctor_findings.check_run_folder(nodes(3), [False, False, True], "/runs")
    assert finding.level == "warn"  # rank 0's own node


@pytest.mark.parametrize(
    ("resolved", "text"),
    [
        (["127.0.1.1"], "resolves to 127.0.1.1"),
        (["10.0.0.9", "::1"], "resolves to ::1"),
        ([], "does not resolve"),
    ],
)
def test_a_host_name_that_leads_nowhere_is_a_warning(resolved: list[str], text: str) -> None:
    (finding,) = doctor_findings.check_hostnames(nodes(3), [["10.0.0.1"], resolved, None])
    assert (finding.level, finding.nodes) == ("warn", ("host1",))
    assert text in finding.text
    assert "not affected" in finding.text
    assert "/etc/hosts" in finding.fix
    (of_site,) = doctor_findings.check_hostnames(nodes(1), [resolved], by_name=False)
    assert "not affected" not in of_site.text
    assert of_site.fix.endswith("or leave out fabric=site")


@pytest.mark.parametrize(
    ("name", "other", "level"),
    [
        ("torch", "2.14.0", "fail"),
        ("raydist", "0.0.9", "fail"),
        ("python", "3.12.1", "fail"),
        ("python", "3.11.2", "note"),
    ],
)
def test_another_version_on_one_node(name: str, other: str, level: str) -> None:
    same = {"python": "3.11.7", "torch": "2.15.0", "ray": "2.60.0", "raydist": "0.1.0"}
    assert list(doctor_findings.compare_versions(nodes(200), [same] * 200)) == []
    (finding,) = doctor_findings.compare_versions(
        nodes(200), [*[same] * 150, {**same, name: other}, *[same] * 49]
    )
    assert (finding.nodes, finding.level) == (("host150",), level)
    assert f"host150 has {name} {other}, the others {same[name]}" in finding.text
    assert same[name] in finding.fix


def test_a_node_without_torch_is_named() -> None:
    (finding,) = doctor_findings.compare_versions(
        nodes(3), [{"torch": "2.15.0"}, {"torch": "2.15.0"}, {}]
    )
    assert finding.text == "host2 has no torch, the others 2.15.0"
    (finding,) = doctor_findings.compare_versions(
        nodes(3), [{"torch": "2.15.0+cu130"}, {}, {}]
    )  # most of them lack it
    assert finding.nodes == ("host1", "host2")
    install = (
        "python -m pip install torch==2.15.0 --index-url https://download.pytorch.org/whl/cu130"
    )
    assert finding.fix == f"on host1, host2: {install}"


def test_nodes_that_could_not_do_their_part() -> None:
    (finding,) = doctor_findings.check_answers(
        "call", {"no answer within 60 s": ["host1", "host2"]}
    )
    assert finding.nodes == ("host1", "host2")
    assert "'call'" in finding.text
