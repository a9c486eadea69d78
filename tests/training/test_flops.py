"""Operations of a language model, and the share of a chip's peak."""

from __future__ import annotations

import pytest

from raydist.training import flops
from raydist.training.gpt import GPT


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", None),  # another chip than an A10
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_chip_by_its_name(device: str, tera: float | None) -> None:
    assert flops.peak_flops(device) == (None if tera is None else tera * 1e12)


def test_the_operations_of_a_token() -> None:
    # PaLM's appendix B for its 540 B model: 118 layers, 48 heads of 256, 2048 tokens
    palm = flops.flops_per_token(540_350_000_000, 118, 48 * 256, 2048)
    assert palm == pytest.approx(6 * 540.35e9 * 1.011, rel=1e-3)
    # 238.3 k tokens per second on 6144 chips with 275e12 operations per second: 45.7% (46.2% with
    # attention)
    assert 238_300 * palm / (6144 * 275e12) == pytest.approx(0.462, abs=1e-3)
    assert flops.utilization(1000.0, 989_000_000, "NVIDIA H100 80GB HBM3", 2) == pytest.approx(
        0.0005
    )
    assert flops.utilization(1000.0, 989_000_000, "unknown", 2) is None


def test_the_operations_of_a_model() -> None:
    changes = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocab": 300}
    tied, untied = (GPT(tied=tied, **changes) for tied in (True, False))  # type: ignore[arg-type]
    multiplied = sum(each.numel() for each in tied.parameters())
    assert (
        tied.flops_per_token(32) == untied.flops_per_token(32) == 6 * multiplied + 12 * 2 * 64 * 32
    )
