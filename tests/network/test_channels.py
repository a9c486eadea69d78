"""NCCL's log lines of all its versions since 2.10, whole, cut off and mixed with others. (pure)"""

from __future__ import annotations

import pickle

import pytest

from raydist.network.nccl_log import Log, NcclChannel, channels_between, is_rdma, parse_nccl_log

P = "gpu01:4711:4802 [3] NCCL INFO "

CHANNELS = [
    # 2.10 to 2.17: the bracket is the bus id in hex
    ("Channel 00 : 1[5e000] -> 8[1b000] [send] via NET/IB/0", NcclChannel(1, 8, "NET", "IB")),
    (
        "Channel 01 : 0[1a000] -> 9[3d000] [receive] via NET/IB/1/GDRDMA",
        NcclChannel(0, 9, "NET", "IB", True),
    ),
    # since 2.18: the device
    (
        "Channel 00/0 : 1[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
        NcclChannel(1, 8, "NET", "IB", True),
    ),
    (
        "Channel 02/0 : 7[7] -> 8[0] [receive] via NET/IB/0(3)/GDRDMA",
        NcclChannel(7, 8, "NET", "IB", True),
    ),
    ("Channel 02/0 : 7[7] -> 8[0] [receive] via NET/Socket/0", NcclChannel(7, 8, "NET", "Socket")),
    (
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IBext_v11/2/GDRDMA/Shared",
        NcclChannel(0, 8, "NET", "IBext_v11", True),
    ),
    (
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA",
        NcclChannel(0, 8, "NET", "AWS Libfabric", True),
    ),
    (
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA(PCI)",
        NcclChannel(0, 8, "NET", "IB", True),
    ),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", NcclChannel(0, 1, "P2P", "CUMEM")),
    ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read", NcclChannel(0, 1, "P2P", "IPC")),
    ("Channel 00 : 0[1a000] -> 1[1b000] via SHM/direct/direct", NcclChannel(0, 1, "SHM", "direct")),
]


@pytest.mark.parametrize(("text", "channel"), CHANNELS)
@pytest.mark.parametrize(
    "before", [P, "(RayWorker pid=77, ip=10.0.0.2) " + P, "[2026-11-21 06:00:00] " + P, ""]
)
def test_every_form_of_a_channel_is_read(before: str, text: str, channel: NcclChannel) -> None:
    assert parse_nccl_log(before + text + "\n").channels == (channel,)


def test_the_network_and_its_devices_are_read() -> None:
    log = parse_nccl_log(
        f"NCCL version 2.30.7+cuda13.2\n{P}Bootstrap: Using eth0:10.0.0.1<0>\n"
        f"{P}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1:0:1/RoCE [RO]; OOB "
        f"eth0:10.0.0.1<0>\n{P}Using network IB\n"
    )
    assert log == Log("IB", ("mlx5_0:1", "mlx5_1:1"))
    assert parse_nccl_log(f"{P}Using network AWS Libfabric\n").network == "AWS Libfabric"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("NET/IB : No device found.", "no active device"),
        ("Failed to open libibverbs.so[.1]", "libibverbs is missing"),
        ("Count not open libibverbs.so.1", "libibverbs is missing"),
        ("NET/IB : Unable to open device mlx5_0", "can't open a device"),
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1"),
    ],
)
def test_why_not_infiniband_is_read(text: str, why: str) -> None:
    log = parse_nccl_log(
        f"{P}{text}\n{P}NET/IB : Using ; OOB eth0:10.0.0.1<0>\n{P}Using network Socket\n"
    )
    assert why in log.why_not
    assert (log.network, log.hcas) == ("Socket", ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00\xff nonsense",
        f"{P}Channel 00/0 : 1[0] -> 8[0] [send] via NE",
        f"{P}Channel 00/0 : 1[0] -> 8[0] [se{P}Channel 01/0 : ",
        f"{P}comm 0x1 rank 0 nRanks 16 nNo",
    ],
)
def test_what_is_cut_off_or_mixed_up_is_left_out(text: str) -> None:
    assert parse_nccl_log(text) == Log()


def test_how_many_nodes_nccl_counts_is_that_of_the_largest_group() -> None:
    line = "comm 0x{} rank 0 nRanks {} nNodes {} localRanks 8 localRank 0 MNNVL 0\n"
    log = parse_nccl_log(
        P + line.format(1, 8, 1) + P + line.format(2, 16, 2) + P + line.format(3, 2, 2)
    )
    assert log.counted == (16, 2)
    assert pickle.loads(pickle.dumps(log)) == log


def test_a_channel_is_told_once_and_only_those_between_nodes_count() -> None:
    log = parse_nccl_log(
        f"{P}Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
        + 2 * f"{P}Channel 00/0 : 1[1] -> 2[0] via NET/IB/0\n"
    )
    assert len(log.channels) == 2
    assert channels_between([log], [0, 0, 1]) == [NcclChannel(1, 2, "NET", "IB")]


@pytest.mark.parametrize(
    "name", ["IB", "IBext_v11", "UCX", "UCX-RMA", "Libfabric", "AWS Libfabric", "gIB"]
)
def test_what_goes_past_the_kernel(name: str) -> None:
    assert is_rdma(name)
    assert not is_rdma("Socket")
