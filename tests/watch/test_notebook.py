"""What a notebook shows as the value of raydist.run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import raydist
from raydist.watch.notebook import BINS, curves_of, svg, thinned_curve
from tests.faults import kill, training


def test_a_result_shows_its_summary_and_each_curve(tmp_path: Path) -> None:
    done = raydist.run(
        training, f"hydra.run.dir='{tmp_path}/<run>'", "scale=1x2", "group=inline", "train.epochs=2",
        "data.batch_size=8", "snapshot.every=1", "watch.progress=none", struck=(kill(1, 5),),
    )  # fmt: skip
    html = done._repr_html_()
    tree = ElementTree.fromstring(html)  # well-formed: a browser sees what is meant
    assert (tree.findtext("b") or "").startswith("finished in ")
    rows = {row.findtext("th"): row.findtext("td") for row in tree.iter("tr")}
    assert rows["folder"] == str(done.dir)
    assert {"loss", "test_loss", "goodput"} <= rows.keys()
    figures = {(figure.findtext("figcaption") or "").split()[0]: figure for figure in tree.iter("figure")}
    assert figures.keys() == {"loss", "lr", "test_loss"}
    points = [line.attrib["points"].split() for line in figures["loss"].iter("polyline")]
    assert [len(each) for each in points] == [32]
    assert len(list(figures["loss"].iter("line"))) == 1, "the restart"
    assert "<script" not in html
    assert "http" not in html
    failed = replace(done, status="failed", failure="rank 1 <raised>")._repr_html_()
    assert ElementTree.fromstring(failed).findtext("pre") == "rank 1 <raised>"
    (done.dir / "events.jsonl").unlink()
    assert "<table>" in done._repr_html_()


def test_a_long_curve_keeps_its_extremes() -> None:
    curve = [(step, float(step == 5000)) for step in range(100_000)]
    short = thinned_curve(curve)
    assert len(short) <= 2 * BINS
    assert (5000, 1.0) in short
    assert short == sorted(short)


def test_what_is_no_number_is_left_out() -> None:
    report = {"t": 0.0, "kind": "report", "rank": 0, "step": 1, "values": {"a": float("nan"), "b": 1.0}}
    assert curves_of([report, {"t": 0.0, "kind": "result"}]) == ({"b": [(1, 1.0)]}, [])
    assert "steps 1 to 1" in svg("<b>", [(1, 1.0)])
    assert "<b>" not in svg("<b>", [(1, 1.0)])
