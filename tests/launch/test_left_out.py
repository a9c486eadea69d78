"""Nodes that raydist has given up before Ray."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from raydist.cluster import connect
from raydist.launch.left_out import LeftOut
from tests.cluster.queue.test_order import node


def test_a_node_that_is_left_out_while_others_are_checked_stays_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [node(number, 0) for number in range(3)]
    left_out = LeftOut(lambda: nodes)
    left_out.add({nodes[0].id, nodes[1].id})

    def reachable(node_ids: Collection[str]) -> set[str]:
        left_out.add({nodes[2].id})
        return {nodes[0].id}

    monkeypatch.setattr(connect, "reachable", reachable)
    left_out._check()
    assert left_out.remaining() == [nodes[0]]
