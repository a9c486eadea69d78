"""What a rank reports, from the pages and files that it writes."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from raydist.node.rank_reports import RankReports
from raydist.node.ras_client import RasPort
from raydist.worker.heartbeat import BEAT_PAGE, heartbeat_page, write_beat
from tests.node.test_agent import start_request


def test_a_rank_that_has_waited_for_an_attempt_is_not_quiet(tmp_path: Path) -> None:
    """If the node of another rank was replaced after minutes, that rank was taken for hung."""
    page = heartbeat_page()
    reports = RankReports(tmp_path, start_request(0), page, RasPort({}))
    write_beat(mmap.mmap(page, BEAT_PAGE), 5, 1, time.time() - 100.0)
    reports.begin(start_request(0))
    assert reports.read(None, 0.0).quiet < 1.0
    status = reports.status(1, "S")
    assert (status.quiet < 1.0, status.beat[0]) == (True, 5)
