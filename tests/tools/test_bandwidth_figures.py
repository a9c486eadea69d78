"""Formulae, sizes, the tournament, and which pair or node is slow. (pure)"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from raydist.shared.errors import ConfigError
from raydist.tools import bandwidth_figures as figures
from raydist.tools.bandwidth_figures import OPS, Row, row
from raydist.tools.bandwidth_plot import plot


@pytest.mark.parametrize(
    ("op", "ranks", "bus"),
    [
        ("all_reduce", 8, 1.75), ("all_reduce", 2, 1.0), ("all_gather", 8, 0.875), ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75), ("gather", 4, 0.75), ("scatter", 2, 0.5), ("broadcast", 8, 1.0), ("reduce", 8, 1.0),
        ("sendrecv", 8, 1.0),
    ],
)  # fmt: skip
def test_bandwidth_is_that_of_nccl_tests(op: str, ranks: int, bus: float) -> None:
    measured = row(op, 2_000_000_000, 0.5, wrong=3, ranks=ranks)
    assert (measured.time_us, measured.algbw, measured.busbw, measured.wrong) == (
        500_000,
        4.0,
        4.0 * bus,
        3,
    )


def test_a_missing_operation_is_said_to_be_missing() -> None:
    cells = figures.as_table([row("gather", 0, None, 0, 4), row("barrier", 0, 1e-4, 0, 4)], "gloo")
    assert cells[1][:3] == ["gather", "", "not in gloo"]
    assert cells[2][:4] == ["barrier", "", "100.0", ""]


def test_sizes_go_from_low_to_high() -> None:
    assert figures.message_sizes(8, 64, 2) == [8, 16, 32, 64]
    assert figures.message_sizes(1000, 5000, 4) == [1000, 4000, 5000]
    assert figures.message_sizes(7, 7, 2) == [7]
    assert figures.message_sizes(4, 8, 1.2) == [4, 5, 6, 7, 8]


def test_every_rank_has_a_share_of_the_same_length() -> None:
    for op in OPS:
        assert figures.elements(op, 8, 5) >= 1
    assert figures.elements("all_gather", 8, 5) == 5
    assert figures.elements("all_gather", 1024, 5) == 255
    assert figures.elements("all_reduce", 1024, 5) == 256


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("4K", 4096), ("64M", 1 << 26), ("1g", 1 << 30), ("2MiB", 2 << 20)]
)
def test_sizes_are_read_as_nccl_tests_does(text: str, size: int) -> None:
    assert figures.in_bytes("--min", text) == size
    assert figures.in_bytes("--min", figures.size_text(size)) == size


@pytest.mark.parametrize("text", ["0", "", "x", "-3", "64X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        figures.in_bytes("--max", text)
    assert (refused.value.key, refused.value.value) == ("--max", text)
    assert refused.value.suggestion == "--max 64M"


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 200])
def test_everyone_meets_everyone_once_and_nobody_twice_a_round(n: int) -> None:
    rounds = figures.rounds(n)
    assert len(rounds) == n - 1 + n % 2
    assert sorted(pair for each in rounds for pair in each) == list(combinations(range(n), 2))
    for each in rounds:
        there = [node for pair in each for node in pair]
        assert len(there) == len(set(there))


def matrix(n: int, **slow: float) -> dict[tuple[int, int], float]:
    """Return all pairs at 1 GB/s, except those in `slow`: n2 is a node, p01 a pair."""
    result = dict.fromkeys(combinations(range(n), 2), 1.0)
    for name, speed in slow.items():
        who = set(map(int, name[1:]))
        result |= {
            pair: speed
            for pair in result
            if (who & set(pair) if name[0] == "n" else who == set(pair))
        }
    return result


def test_a_slow_node_is_named_rather_than_its_pairs() -> None:
    assert figures.slow(matrix(3, n2=0.01)) == ([2], [])
    assert figures.slow(matrix(8, n5=0.5)) == ([5], [])
    assert list(figures.slow_lines(matrix(3, n2=0.01), "abc")) == [
        "slow node: c: 0.010 GB/s at best, 1.000 between the others"
    ]


def test_a_slow_pair_of_good_nodes_is_named() -> None:
    assert figures.slow(matrix(3, p12=0.1)) == ([], [(1, 2)])
    assert figures.slow(matrix(6, n0=0.1, p34=0.2)) == ([0], [(3, 4)])
    assert "slow pair: b and c: 0.100 GB/s" in next(figures.slow_lines(matrix(3, p12=0.1), "abc"))


def test_nothing_is_slow_where_all_are_alike_or_nobody_can_tell() -> None:
    assert figures.slow(matrix(8)) == ([], [])
    assert figures.slow(matrix(3, n0=0.8)) == ([], [])
    assert figures.slow({(0, 1): 0.001}) == ([], [])


def test_the_matrix_is_symmetric() -> None:
    cells = figures.as_matrix({(0, 1): 2.0}, ["a", "b"])
    assert cells == [["GB/s", "a", "b"], ["a", "-", "2.000"], ["b", "2.000", "-"]]


@pytest.mark.parametrize(
    ("got", "word"), [(11.2, "90%: PASS"), (13, "104%: PASS"), (7.5, "60%: WARN"), (1, "8%: FAIL")]
)
def test_the_verdict_is_of_what_the_ports_could_do(got: float, word: str) -> None:
    assert figures.bandwidth_verdict(got, 12.5) == f"{got:.3g} of 12.5 GB/s, {word}"


def test_the_plot_is_an_svg_with_a_line_for_each_operation() -> None:
    rows = [
        row(op, size, 1e-3, 0, 4)
        for op in ("all_reduce", "broadcast")
        for size in (1024, 4096, 1 << 20)
    ]
    drawn = ET.fromstring(plot([*rows, Row("barrier", 0, 5.0), Row("gather", 0, None)]))
    lines = drawn.findall("{*}polyline")
    assert [len(each.attrib["points"].split()) for each in lines] == [3, 3]
    for each in lines:
        heights = [float(point.split(",")[1]) for point in each.attrib["points"].split()]
        assert heights == sorted(heights, reverse=True)
    assert {"all_reduce", "broadcast", "1M"} <= {each.text for each in drawn.findall("{*}text")}
    assert ET.fromstring(plot([])).findall("{*}polyline") == []
