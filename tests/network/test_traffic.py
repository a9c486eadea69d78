"""One line for the network that carried a run, and what does not fit together. (pure)"""

from __future__ import annotations

import pytest

from raydist.network.nccl_log import Log, NcclChannel
from raydist.network.traffic import NodeTraffic, PortCounters, amount, traffic_event

GB = 10**9


def port(
    sent: int | None, hca: bool = False, rate: float = 12.5, errors: dict[str, int] | None = None
) -> PortCounters:
    counters = PortCounters(hca=hca, sent=sent, received=sent, rate=rate, active=True)
    return {**counters, "errors": errors} if errors else counters


def nodes(
    n: int = 2, eth0: int = 0, eth1: int | None = None, ib: int | None = None
) -> list[NodeTraffic]:
    """Return nodes whose ports carried so much; `ib` is an HCA."""
    ends = {"eth0": port(7 + eth0)}
    ends |= {} if eth1 is None else {"eth1": port(7 + eth1)}
    ends |= {} if ib is None else {"mlx5_0:1": port(7 + ib, hca=True, rate=50.0)}
    before = {name: port(7, each["hca"], rate=each["rate"]) for name, each in ends.items()}
    return [NodeTraffic(f"n{i}", "eth0", before, ends) for i in range(n)]


def nccl(network: str, direct: bool = False, why_not: str = "") -> list[Log]:
    hcas = ("mlx5_0:1",) if network == "IB" else ()
    return [Log(network, hcas, (NcclChannel(0, 1, "NET", network, direct),), why_not)] * 2


def test_gloo_says_interface_bytes_and_that_there_is_no_infiniband() -> None:
    event, odd = traffic_event("gloo", nodes(3, eth0=4 * GB // 10), [0, 1, 2], [Log()] * 3)
    assert event.text == "gloo over eth0 on 3 nodes, 1.2 GB sent; no node has InfiniBand"
    assert odd == []
    assert event.nodes[0] == {
        "host": "n0",
        "sent": {"eth0": 4 * GB // 10},
        "rate": 12.5,
        "ports": 1,
        "gpus": 0,
    }


def test_infiniband_that_gloo_leaves_alone_is_told() -> None:
    event, _ = traffic_event("gloo", nodes(2, eth0=GB, ib=0), [0, 1], [Log()] * 2)
    assert event.text.endswith("2 nodes have InfiniBand, NOT USED: gloo uses TCP")


def test_nccl_over_infiniband_with_and_without_gpudirect() -> None:
    event, odd = traffic_event("nccl", nodes(2, ib=GB), [0, 1], nccl("IB", direct=True))
    assert event.text == "NET/IB over mlx5_0:1 with GPUDirect on 2 nodes, 2 GB sent"
    assert event.nodes[0]["rate"] == 50.0
    assert odd == []
    assert (
        " without GPUDirect " in traffic_event("nccl", nodes(2, ib=GB), [0, 1], nccl("IB"))[0].text
    )


def test_the_silent_fall_to_sockets_is_told_with_its_reason() -> None:
    event, _ = traffic_event(
        "nccl",
        nodes(2, eth0=GB, ib=0),
        [0, 1],
        nccl("Socket", why_not="libibverbs is missing on the node"),
    )
    expected = (
        "NET/Socket over eth0 on 2 nodes, 2 GB sent; 2 nodes have InfiniBand, NOT USED: "
        "libibverbs is missing"
    )
    assert event.text.startswith(expected)


@pytest.mark.parametrize(
    ("backend", "logs"),
    [("mpi", [Log()]), ("ucc", [Log()]), ("nccl", [Log()]), ("nccl", [Log("AWS Libfabric")])],
)
def test_hcas_that_no_log_names_are_told_by_their_counters(backend: str, logs: list[Log]) -> None:
    """UCX and libfabric log no ports, nor NCCL with the site's NCCL_DEBUG=WARN: a run over
    InfiniBand was told as one over eth0, with a warning for each node."""
    event, odd = traffic_event(backend, nodes(2, eth0=GB // 1000, ib=GB), [0, 1], logs * 2)
    assert " over mlx5_0:1 on 2 nodes, 2 GB sent" in event.text
    assert "NOT USED" not in event.text
    assert event.nodes[0]["rate"] == 50.0
    assert odd == []


@pytest.mark.parametrize(
    ("backend", "log", "eth0", "ib", "told"),
    [
        ("mpi", Log(), GB, 0, "NOT USED"),
        ("mpi", Log(), 3000, 5000, "do not tell"),  # too little to tell
        ("mpi", Log(), GB, None, "no node has InfiniBand"),
        ("nccl", Log("Socket"), 0, GB, "NOT USED"),
        ("gloo", Log(), 0, GB, "NOT USED: gloo uses TCP"),
    ],
)
def test_idle_infiniband_is_told_if_that_is_known(
    backend: str, log: Log, eth0: int, ib: int | None, told: str
) -> None:
    event, _ = traffic_event(backend, nodes(2, eth0=eth0, ib=ib), [0, 1], [log] * 2)
    assert told in event.text
    assert " over eth0 " in event.text


def test_a_required_network_that_no_log_names_is_told() -> None:
    """A release that words its log otherwise switched fabric.strict off without a word."""
    silent = [Log(why_not="NCCL found no active device")] * 2
    for backend, logs, strict, told in (
        ("nccl", silent, True, 1),
        ("horovod", silent, True, 1),
        ("nccl", silent, False, 0),
        ("nccl", nccl("IB"), True, 0),
        ("mpi", silent, True, 0),
    ):
        odd = traffic_event(backend, nodes(2, ib=GB), [0, 1], logs, strict)[1]
        assert len([text for text in odd if "fabric.strict could not be checked" in text]) == told


def test_a_log_that_the_counters_deny_is_told() -> None:
    (first, second) = traffic_event("nccl", nodes(2, eth0=GB, ib=0), [0, 1], nccl("IB"))[1]
    assert (
        first == "NCCL's log names mlx5_0:1, but on n0 these ports sent nothing and eth0 sent 1 GB"
    )
    assert "on n1" in second


def test_nodes_that_nccl_takes_for_one_are_told() -> None:
    logs = [Log("Socket", counted=(2, 1))] * 2
    (odd,) = traffic_event("nccl", nodes(2, eth0=GB), [0, 1], logs)[1]
    assert odd.startswith("NCCL counts 1 node, but the job has 2")
    for fine in (
        [Log("Socket", counted=(2, 2))] * 2,
        [Log("Socket", counted=(1, 1)), Log("Socket", counted=(2, 2))],
    ):
        assert traffic_event("nccl", nodes(2, eth0=GB), [0, 1], fine)[1] == []


def test_a_port_that_counts_errors_meanwhile_is_told_and_one_with_old_ones_is_not() -> None:
    before = {
        "eth0": port(0),
        "mlx5_0:1": port(0, hca=True, errors={"symbol_error": 5, "rx_drops": 2}),
    }
    after = {
        "eth0": port(0),
        "mlx5_0:1": port(GB, hca=True, errors={"symbol_error": 12, "rx_drops": 2}),
    }
    worn, sound = (
        NodeTraffic("n0", "eth0", before, after),
        NodeTraffic("n1", "eth0", before, before),
    )
    (odd,) = traffic_event("nccl", [worn, sound], [0, 1], nccl("IB"))[1]
    assert odd.startswith("mlx5_0:1 on n0 counted errors during the run (7 symbol_error)")


def test_bytes_on_a_card_that_was_not_chosen_are_told() -> None:
    assert traffic_event("gloo", nodes(1, eth0=10, eth1=GB), [0], [Log()])[1] == [
        "eth0 was chosen on n0 and sent 10 B, but eth1 sent 1 GB"
    ]
    assert traffic_event("gloo", nodes(1, eth0=GB, eth1=GB), [0], [Log()])[1] == []


def test_counters_that_are_not_there_or_began_anew_count_as_nothing() -> None:
    gone = NodeTraffic("a", "eth0", {"eth0": port(5)}, {"eth0": port(3), "eth1": port(9)})
    assert (gone.sent("eth0"), gone.sent("eth1"), gone.sent("eth2")) == (None, None, None)
    event, odd = traffic_event("gloo", [gone, gone], [0, 1], [Log()] * 2)
    assert "0 B sent" in event.text
    assert odd == []


def test_amounts_are_in_powers_of_a_thousand() -> None:
    assert [amount(size) for size in (0, 999, 1500, 2_500_000, 12 * GB, 1234 * GB)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "12 GB", "1.23e+03 GB",
    ]  # fmt: skip
