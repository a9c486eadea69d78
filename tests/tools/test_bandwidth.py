"""The tool measures on real ranks, sees a wrong result, and refuses wrong words before anything
starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raydist.settings.config import Backend, Job
from raydist.tools import bandwidth, bandwidth_ranks
from raydist.tools.bandwidth_figures import OPS, Row
from tests.ranks import RankResult, run_ranks

GLOO = Job(backend=Backend(name="gloo", timeout_s=60))


def measured(
    run_dir: Path,
    ops: tuple[str, ...] = OPS,
    ranks: int = 3,
    pairs: bool = False,
    instead: dict[str, Any] | None = None,
) -> list[RankResult]:
    """Return the measurements of each rank, with some operations of torch.distributed replaced."""

    def job(config: Job) -> Any:
        for name, operation in (instead or {}).items():
            setattr(dist, name, operation)
        return bandwidth_ranks.measure_operations(
            config, ops, [4, 4096], iters=2, warmup=1, pairs=pairs
        )

    results = run_ranks(ranks, GLOO, job, run_dir)
    assert [each.error for each in results] == [""] * ranks
    return results


def test_every_operation_is_measured_and_right(tmp_path: Path) -> None:
    for result in measured(tmp_path, pairs=True):
        rows = result.value["rows"]
        assert {row["op"] for row in rows} == set(OPS)
        assert len(rows) == 2 * len(OPS) - 1
        assert all(row["wrong"] == 0 and row["seconds"] > 0 for row in rows), rows
        assert len(result.value["pairs"]) == 2  # each rank with both others


def test_a_wrong_reduce_is_seen(tmp_path: Path) -> None:
    real = dist.all_reduce

    def off_by_one_at_one_place(tensor: torch.Tensor) -> None:
        real(tensor)
        if dist.get_rank() == 1:
            tensor[-1] += 1

    results = measured(tmp_path, ("all_reduce",), instead={"all_reduce": off_by_one_at_one_place})
    assert [[row["wrong"] for row in each.value["rows"]] for each in results] == [
        [0, 0],
        [1, 1],
        [0, 0],
    ]


def test_an_operation_that_the_backend_has_not_is_no_failure(tmp_path: Path) -> None:
    def missing(*_: Any) -> None:
        raise RuntimeError("Backend gloo does not support reduce_scatter")

    instead = {"reduce_scatter_tensor": missing}
    for result in measured(tmp_path, ("reduce_scatter", "barrier"), ranks=2, instead=instead):
        assert result.value["rows"][0] == {
            "op": "reduce_scatter",
            "size": 0,
            "seconds": None,
            "wrong": 0,
        }
        assert result.value["rows"][1]["seconds"] > 0


def test_any_other_error_is_one(tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("connection reset by peer")

    def job(config: Job) -> Any:
        dist.broadcast = broken  # type: ignore[assignment]
        return bandwidth_ranks.measure_operations(config, ["broadcast"], [4], 1, 0)

    results = run_ranks(2, GLOO, job, tmp_path)
    assert all("connection reset by peer" in each.error for each in results)


def test_the_tool_prints_a_table_and_leaves_plot_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--ops",
        "all_reduce,barrier",
        "--max",
        "4K",
        "--iters",
        "2",
        "--pairs",
        "group=inline",
        "scale=1x2",
        "job=of_the_doctor.py",  # the doctor advises to type the same words here
        "job.args.width=8",
        "hydra.run.dir=exp1",
        "resume=auto",
    ]
    assert bandwidth.main(words) == 0
    output = capsys.readouterr().out
    assert "all_reduce  1K" in output
    assert "rank 0" in output
    assert not (tmp_path / "exp1/result.json").exists()  # the training there has not finished
    plot = tmp_path / "exp1/bandwidth/bandwidth.svg"
    assert "all_reduce" in plot.read_text()
    data = json.loads((plot.parent / "bandwidth.json").read_text())
    assert [(row["op"], row["size"]) for row in data["rows"]] == [
        ("all_reduce", 1024),
        ("all_reduce", 4096),
        ("barrier", 0),
    ]
    assert [pair["nodes"] for pair in data["pairs"]] == [["rank 0", "rank 1"]]


@pytest.mark.parametrize(
    ("ports", "gpus", "ranks", "busbw", "pair", "verdicts"),
    [
        (8, 8, 16, 360.0, 45.0, ["360 of 400 GB/s, 90%: PASS", "45 of 50 GB/s, 90%: PASS"]),
        (8, 0, 2, 45.0, 45.0, ["45 of 50 GB/s, 90%: PASS", "45 of 50 GB/s, 90%: PASS"]),
        (8, 8, 16, 45.0, 6.0, ["45 of 400 GB/s, 11%: FAIL", "6 of 50 GB/s, 12%: FAIL"]),
        # AWS p5: four EFAs for each GPU
        (32, 8, 16, 100.0, 12.0, ["100 of 400 GB/s, 25%: FAIL", "12 of 50 GB/s, 24%: FAIL"]),
        (32, 8, 2, 45.0, 45.0, ["45 of 50 GB/s, 90%: PASS", "45 of 50 GB/s, 90%: PASS"]),
    ],
)
def test_a_rank_is_compared_with_the_ports_that_nccl_gives_it(
    ports: int,
    gpus: int,
    ranks: int,
    busbw: float,
    pair: float,
    verdicts: list[str],
    tmp_path: Path,
) -> None:
    """A pair of sound nodes with eight HCAs each used one, and was compared with all: FAIL. One of
    nodes with four EFAs for each GPU was compared with one of them: PASS of a quarter."""
    row = Row("all_reduce", 2**25, 1.0, busbw, busbw, 0)
    nodes = [
        {"host": f"n{i}", "sent": {}, "rate": 400.0, "ports": ports, "gpus": gpus} for i in range(2)
    ]
    measured = bandwidth.Measurement(
        "nccl", ranks, [row], {(0, 1): pair}, ["n0", "n1"], {"nodes": nodes}, tmp_path
    )
    lines = [line.partition(": ")[2] for line in bandwidth.verdict_lines(measured)]
    assert lines == verdicts
    assert bandwidth.port_rate(measured) == 400.0


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--ops", "allreduce"], "--ops allreduce: unknown value; did you mean --ops all_reduce?"),
        (["--mx", "4M"], "--mx: there is no such flag; did you mean --max?"),
        (["--min", "much"], "--min 64M"),
        (["--min", "4M", "--max", "1M"], "--min 4M: more than --max 1M; use --max 4M"),
        (["--factor", "1"], "--factor 1: must be a number from 1.1; use --factor 2"),
        (["--iters", "none"], "--iters none: must be a whole number from 1; use --iters 2"),
        (["--pairs", "backend=horovod"], "--pairs: Horovod has no point-to-point"),
        (["scal=1x2"], "scal"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: list[str],
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bandwidth.main(words) == 2
    assert answer in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_overrides_of_a_program_are_no_concern_of_it() -> None:
    """The doctor advises to type its own here: backend=script was refused without the script."""
    for word in ("backend=script", "script=train.py", "args=x", "job=gpt", "job.args.size=1m"):
        assert bandwidth._names_job(word)
    assert not bandwidth._names_job("backend=nccl")
    assert bandwidth.below_run_folder("hydra.run.dir='/a b'") == "hydra.run.dir='/a b/bandwidth'"


def test_help_names_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(op in text for op in OPS)
