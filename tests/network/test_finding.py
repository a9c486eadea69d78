"""Findings that say the same of several nodes become one; the worst comes first."""

from __future__ import annotations

from raydist.network.finding import Finding, fold_findings
from raydist.shared.rank_names import joined_names


def test_equal_findings_are_one_with_all_their_nodes() -> None:
    many = [Finding("shm", "fail", (f"host{i}",), "full", "--shm-size=8g") for i in range(200)]
    (one,) = fold_findings(many)
    assert one.nodes == tuple(f"host{i}" for i in range(200))
    assert (one.text, one.fix) == ("full", "--shm-size=8g")


def test_findings_that_differ_in_anything_else_stay_apart() -> None:
    base = Finding("shm", "warn", ("a",), "full", "x")
    others = [
        Finding("clock", "warn", ("a",), "full", "x"),
        Finding("shm", "warn", ("a",), "empty", "x"),
    ]
    assert fold_findings([base, *others, base]) == [base, *others]


def test_the_worst_comes_first_and_otherwise_the_order_stays() -> None:
    levels = ["note", "warn", "fail", "warn", "note", "fail"]
    folded = fold_findings(Finding("c", level, (), str(i)) for i, level in enumerate(levels))
    assert [finding.text for finding in folded] == ["2", "5", "1", "3", "0", "4"]


def test_many_hosts_are_named_by_the_first_few() -> None:
    assert joined_names([]) == ""
    assert joined_names(["a", "b", "c", "d"]) == "a, b, c, d"
    assert joined_names(f"host{i}" for i in range(200)) == "host0, host1, host2, host3 and 196 more"
