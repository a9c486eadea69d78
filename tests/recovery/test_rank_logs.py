"""What the end of a rank's log says of this attempt."""

from __future__ import annotations

from pathlib import Path

from raydist.recovery.rank_logs import TAIL, RankLogs


def test_the_end_of_a_log_has_nothing_of_earlier_attempts(tmp_path: Path) -> None:
    """A CUDA error of a broken GPU was found in it again, and the next node was blamed for it."""
    for output in (b"CUDA error: uncorrectable ECC error\n", b"connection closed by peer\n"):
        with RankLogs(tmp_path / "logs", 2) as logs:
            logs.append(1, output, b"")
            assert logs.tail(0) == ""
            assert logs.tail(1) == output.decode()
    with RankLogs(tmp_path / "logs", 2) as logs:
        logs.append(1, b"a" * TAIL + b"end", b"")
        assert logs.tail(1) == "a" * (TAIL - 3) + "end"
