"""NCCL's log in a separate file: passed on with fabric.debug, and the end of a rank that took
sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

import raydist
from raydist.network import checks_node
from raydist.node import nccl_output
from raydist.node.nccl_output import NcclLog
from raydist.shared.errors import RaydistError, RunFailed
from tests.node.test_dryrun import needs_nccl
from tests.worker.test_program import logs, run

P = "node-1:1:1 [0] NCCL INFO "
SOCKETS, INFINIBAND = f"{P}Using network Socket\n", f"{P}Using network IB\n"
NO_LIBRARY = f"{P}NET/IB : No device found.\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_only_what_is_new_is_passed_on_and_only_where_somebody_asked(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.nccl"
    path.write_text("of the attempt before")
    aloud, silent = (NcclLog(path, aloud=aloud, strict=False) for aloud in (True, False))
    assert (aloud.news(), silent.news()) == (b"", b"")
    path.write_text("one")
    assert (aloud.news(), silent.news()) == (b"one", b"")
    path.write_text("one two")
    assert (aloud.news(), aloud.news()) == (b" two", b"")


def test_strict_refuses_sockets_with_the_reason_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.nccl"
    strict = NcclLog(path, aloud=False, strict=True)
    assert strict.refusal() == ""
    path.write_text(NO_LIBRARY)
    assert strict.refusal() == ""
    path.write_text(NO_LIBRARY + SOCKETS)
    assert strict.refusal().startswith("fabric.strict: NCCL took NET/Socket")
    assert strict.refusal() == ""  # once is enough
    for log, infiniband in ((INFINIBAND, True), (SOCKETS, False)):
        other = NcclLog(path, aloud=False, strict=infiniband)
        path.write_text(log)
        assert other.refusal() == ""


def test_nccls_words_come_from_its_own_file_else_from_the_ranks_log(tmp_path: Path) -> None:
    own, shared = tmp_path / "rank-0.nccl", tmp_path / "rank-0.log"
    assert nccl_output.read_nccl_output(own, shared) == ""
    shared.write_text(SOCKETS)
    assert nccl_output.read_nccl_output(own, shared) == SOCKETS
    own.write_text(INFINIBAND)
    assert nccl_output.read_nccl_output(own, shared) == INFINIBAND


@needs_nccl
def test_with_debug_the_real_nccl_writes_beside_the_ranks_own_output() -> None:
    done = run("nccl_speaks.py", "backend=script", "fabric.debug=true")
    assert logs(done) == ["the rank's own line\n"] * 2
    for rank in range(2):
        log = (done.dir / "logs" / f"rank-{rank}.nccl").read_text()
        assert "NCCL INFO" in log
        assert "Bootstrap" in log


def test_a_rank_whose_nccl_took_sockets_is_ended_with_that_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        checks_node, "TCP_ONLY", ()
    )  # else a job without GPUs is refused before it starts
    words = f"args={SOCKETS.strip()!r}"
    with pytest.raises(RunFailed) as caught:
        run("nccl_speaks.py", "backend=script", "fabric.strict=true", "fabric.debug=true", words)
    assert "fabric.strict: NCCL took NET/Socket" in str(caught.value)


def test_a_rank_in_this_very_process_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without Ray: what the site has set is told, and strict refuses."""
    words = ("scale=1x1", "group=inline", "backend=gloo", "watch.progress=none")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    done = raydist.run(lambda: 1, *words)
    assert any("NCCL_ALGO=Ring is set in the environment" in one for one in done.warnings)
    with pytest.raises(RaydistError, match=r"fabric\.strict: .*gloo supports TCP only"):
        raydist.run(lambda: 1, *words, "fabric.strict=true")
