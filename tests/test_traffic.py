"""One line for the network that carried a run, and what does not fit together. (pure)"""

from __future__ import annotations

from typing import Any

from raydist.traffic import Node, amount, tell
from raydist.transport import Channel, Log

GB = 10**9


def port(sent: int | None, hca: bool = False, active: bool = True, rate: float = 12.5) -> dict[str, Any]:
    return {"hca": hca, "sent": sent, "received": sent, "rate": rate, "active": active}


def nodes(n: int = 2, eth0: int = 0, eth1: int | None = None, ib: int | None = None) -> list[Node]:
    """Nodes whose ports carried so much; `ib` is an HCA."""
    ends = {"eth0": port(7 + eth0)}
    ends |= {} if eth1 is None else {"eth1": port(7 + eth1)}
    ends |= {} if ib is None else {"mlx5_0:1": port(7 + ib, hca=True, rate=50.0)}
    return [Node(f"n{i}", "eth0", {name: {**each, "sent": 7} for name, each in ends.items()}, ends) for i in range(n)]


def nccl(network: str, direct: bool = False, why_not: str = "") -> list[Log]:
    hcas = ("mlx5_0:1",) if network == "IB" else ()
    return [Log(network, hcas, (Channel(0, 1, "NET", network, direct),), why_not)] * 2


def test_gloo_says_interface_bytes_and_that_there_is_no_infiniband() -> None:
    told = tell("gloo", nodes(3, eth0=4 * GB // 10), [0, 1, 2], [Log()] * 3)
    assert told["text"] == "gloo over eth0 on 3 nodes, 1.2 GB sent; InfiniBand present on none"
    assert told["odd"] == []
    assert told["nodes"][0] == {"host": "n0", "sent": {"eth0": 4 * GB // 10}, "rate": 12.5}


def test_infiniband_that_gloo_leaves_alone_is_told() -> None:
    told = tell("gloo", nodes(2, eth0=GB, ib=0), [0, 1], [Log()] * 2)
    assert told["text"].endswith("InfiniBand present on 2, NOT USED: gloo talks over TCP")


def test_nccl_over_infiniband_with_and_without_gpudirect() -> None:
    told = tell("nccl", nodes(2, ib=GB), [0, 1], nccl("IB", direct=True))
    assert told["text"] == "NET/IB over mlx5_0:1 with GPUDirect on 2 nodes, 2 GB sent"
    assert told["nodes"][0]["rate"] == 50.0
    assert told["odd"] == []
    assert " without GPUDirect " in tell("nccl", nodes(2, ib=GB), [0, 1], nccl("IB"))["text"]


def test_the_silent_fall_to_sockets_is_told_with_its_reason() -> None:
    told = tell("nccl", nodes(2, eth0=GB, ib=0), [0, 1], nccl("Socket", why_not="libibverbs is missing on the node"))
    expected = "NET/Socket over eth0 on 2 nodes, 2 GB sent; InfiniBand present on 2, NOT USED: libibverbs is missing"
    assert told["text"].startswith(expected)


def test_a_log_that_the_counters_deny_is_told() -> None:
    (first, second) = tell("nccl", nodes(2, eth0=GB, ib=0), [0, 1], nccl("IB"))["odd"]
    assert first == "NCCL says it used mlx5_0:1, but on n0 these ports sent nothing and eth0 sent 1 GB"
    assert "on n1" in second


def test_nodes_that_nccl_takes_for_one_are_told() -> None:
    logs = [Log("Socket", counted=(2, 1))] * 2
    (odd,) = tell("nccl", nodes(2, eth0=GB), [0, 1], logs)["odd"]
    assert odd.startswith("NCCL counts 1 node where there are 2: another host name")
    for fine in ([Log("Socket", counted=(2, 2))] * 2, [Log("Socket", counted=(1, 1)), Log("Socket", counted=(2, 2))]):
        assert tell("nccl", nodes(2, eth0=GB), [0, 1], fine)["odd"] == []


def test_a_port_that_counts_errors_meanwhile_is_told_and_one_with_old_ones_is_not() -> None:
    before = {"eth0": port(0), "mlx5_0:1": {**port(0, hca=True), "errors": {"symbol_error": 5, "rx_drops": 2}}}
    after = {"eth0": port(0), "mlx5_0:1": {**port(GB, hca=True), "errors": {"symbol_error": 12, "rx_drops": 2}}}
    worn, sound = Node("n0", "eth0", before, after), Node("n1", "eth0", before, before)
    (odd,) = tell("nccl", [worn, sound], [0, 1], nccl("IB"))["odd"]
    assert odd.startswith("mlx5_0:1 on n0 counted errors meanwhile (7 symbol_error): a cable")


def test_bytes_on_a_card_that_was_not_chosen_are_told() -> None:
    assert tell("gloo", nodes(1, eth0=10, eth1=GB), [0], [Log()])["odd"] == [
        "eth0 was chosen on n0 and sent 10 B, but eth1 sent 1 GB"
    ]
    assert tell("gloo", nodes(1, eth0=GB, eth1=GB), [0], [Log()])["odd"] == []


def test_counters_that_are_not_there_or_began_anew_count_as_nothing() -> None:
    gone = Node("a", "eth0", {"eth0": port(5)}, {"eth0": port(3), "eth1": port(9)})
    assert (gone.sent("eth0"), gone.sent("eth1"), gone.sent("eth2")) == (None, None, None)
    told = tell("gloo", [gone, gone], [0, 1], [Log()] * 2)
    assert "0 B sent" in told["text"]
    assert told["odd"] == []


def test_amounts_are_in_powers_of_a_thousand() -> None:
    assert [amount(size) for size in (0, 999, 1500, 2_500_000, 12 * GB, 1234 * GB)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "12 GB", "1.23e+03 GB",
    ]  # fmt: skip
