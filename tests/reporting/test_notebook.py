"""What a notebook shows as the value of raydist.run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist.reporting.notebook import curves_of, svg
from raydist.shared import kinds
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
    figures = {
        (figure.findtext("figcaption") or "").split()[0]: figure for figure in tree.iter("figure")
    }
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


def test_what_is_no_number_is_left_out() -> None:
    report = kinds.Report(rank=0, step=1, values={"a": float("nan"), "b": 1.0})
    assert curves_of([report, kinds.Result(status="finished")]) == ({"b": [(1, 1.0)]}, [])
    assert "steps 1 to 1" in svg("<b>", [(1, 1.0)])
    assert "<b>" not in svg("<b>", [(1, 1.0)])


def test_a_change_of_the_number_of_nodes_is_marked_as_a_restart_is() -> None:
    reports = [kinds.Report(rank=0, step=step, values={"a": 1.0}) for step in (1, 2, 3)]
    regroup, restart = (
        kinds.Regroup(number=1, text="a node has joined"),
        kinds.Restart(number=1, text="rank 1 was killed", step=3),
    )
    _, restarts = curves_of([*reports[:2], regroup, reports[2], restart])
    assert restarts == [2, 3]


CELL = """
import time
import raydist

def job(config):
    for step in range(1, 31):
        raydist.report(step=step, steps=30, loss=1 / step)
        time.sleep(0.05)

raydist.run(job, "scale=1x1", "group=inline", "hydra.run.dir={folder}")
"""


@pytest.mark.skipif(find_spec("ipykernel") is None, reason="no ipykernel on this machine")
def test_a_notebook_has_one_live_line_then_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Jupyter's own client and kernel: what a front end is told while the cell runs."""
    from jupyter_client.manager import start_new_kernel

    messages: list[tuple[str, Any]] = []
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager, client = start_new_kernel(240, "python3", cwd=str(tmp_path))
    try:
        reply = client.execute_interactive(
            CELL.format(folder=tmp_path / "run"), timeout=240,
            output_hook=lambda message: messages.append((message["msg_type"], message["content"])),
        )  # fmt: skip
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok", messages
    live = [(kind, content) for kind, content in messages if "display_data" in kind]
    assert [kind for kind, _ in live].count("display_data") == 1  # one place, which is updated
    assert len({content["transient"]["display_id"] for _, content in live}) == 1
    lines = [content["data"]["text/plain"] for _, content in live]
    steps = [int(line.split("/30")[0].split()[-1]) for line in lines if "/30" in line]
    assert len(steps) > 3
    assert (sorted(set(steps)), steps[-1]) == (steps, 30)
    assert any("loss 0.0333" in line for line in lines)
    assert lines[-1] == ""
    (value,) = [
        content["data"]["text/html"] for kind, content in messages if kind == "execute_result"
    ]
    assert "<polyline" in value
    printed = "".join(content["text"] for kind, content in messages if kind == "stream")
    assert "finished in" in printed
    assert "step 2/30" not in printed
