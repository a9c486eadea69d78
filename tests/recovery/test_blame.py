"""Who began it: real strings of real libraries, and ranks of gloo that are really ended.
(driver)"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.node.xids import describe_xid
from raydist.recovery import blame
from raydist.recovery.blame import blame_reason, failure_text, first_cause, is_victim, last_words
from raydist.reporting.advice import advice_for
from raydist.shared.outcome import End, EndKind
from raydist.shared.rank_names import rank_ranges

TAIL = "Check the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f"
PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
CLOSED = (
    f"{PAIR}:561] Connection closed by peer [127.0.0.1]:16611. "
    f"This is typically caused by a remote worker crashing. {TAIL}"
)
RESET = (
    f"{PAIR}:545] Read error [127.0.0.1]:29062: Connection reset by peer. This is typically "
    "caused by a remote worker "
    f"hanging or bugs in the application. {TAIL}"
)
WAITED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 4000ms for recv operation to complete"
)
BARRIER = (
    f"[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception: \n{RESET}"
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, remote process "
    "exited or there was a "
    "network error, NCCL version 2.19.3\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote "
    "process exiting prematurely."
)
ECC = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with "
    "exception: CUDA error: uncorrectable ECC error encountered"
)
WATCHDOG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, "
    "NumelIn=112, "
    "NumelOut=112, Timeout(ms)=1800000) ran for 1800011 milliseconds before timing out."
)
HOROVOD = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an "
    "attempt to allreduce, "
    "allgather or broadcast a tensor after one of the ranks finished execution."
)
REQUESTS = (
    "HTTPSConnectionPool(host='data.example.org', port=443): Max retries exceeded with url: /v1 "
    "(Caused by NewConnectionError('<urllib3.connection.HTTPSConnection object at 0x7f>: Failed "
    "to establish a new connection: [Errno 111] Connection refused'))"
)
PSYCOPG = (
    'connection to server at "10.0.0.9", port 5432 failed: Connection refused\n\tIs the server '
    "running on that host and accepting TCP/IP connections?"
)

VICTIMS = [
    ("RuntimeError", CLOSED),
    ("RuntimeError", RESET),
    ("RuntimeError", WAITED),
    ("RuntimeError", BARRIER),
    ("RuntimeError", WATCHDOG),
    ("RuntimeError", "Connection refused"),
    ("DistStoreError", "wait timeout after 4000ms, keys: /default_pg/0//cpu//0/1"),
    (
        "DistNetworkError",
        "The client socket has timed out after 4000ms while trying to connect to (127.0.0.1, "
        "37371).",
    ),
    ("DistNetworkError", "Broken pipe"),
    ("DistBackendError", NCCL),
    ("RuntimeError", "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ("HorovodInternalError", HOROVOD),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ("BrokenPipeError", "[Errno 32] Broken pipe"),
    ("HorovodInternalError", ""),
    ("DistBackendError", "words of a version to come"),
]
CULPRITS = [
    End(1, "b", "raised", 5.0, type="ValueError", message="loss is nan"),
    End(
        1,
        "b",
        "raised",
        5.0,
        type="RuntimeError",
        message="shapes cannot be multiplied (2x64 and 10x4)",
    ),
    End(
        1,
        "b",
        "raised",
        5.0,
        type="OutOfMemoryError",
        message="CUDA out of memory. Tried to allocate 20.00 MiB.",
    ),
    End(1, "b", "raised", 5.0, type="TimeoutError", message="the data server did not answer"),
    End(1, "b", "exited", 5.0, code=3),
    End(1, "b", "killed", 5.0, signal=signal.SIGKILL),
    End(1, "b", "killed", 5.0, signal=signal.SIGSEGV),
    End(1, "b", "killed", 5.0, signal=signal.SIGBUS),
    End(1, "b", "killed", 5.0, signal=signal.SIGABRT),
    End(1, "b", "lost", 5.0, message="The node was terminated"),
    End(1, "b", "raised", 5.0, type="DistBackendError", message=ECC),
    End(1, "b", "raised", 5.0, type="ConnectionError", message=REQUESTS),
    End(1, "b", "raised", 5.0, type="OperationalError", message=PSYCOPG),
]


def raised(rank: int, kind: str, message: str, at: float = 1.0, **more: Any) -> End:
    return End(rank, f"host-{rank}", "raised", at, type=kind, message=message, **more)


@pytest.mark.parametrize(("kind", "message"), VICTIMS)
def test_what_a_peers_death_causes_is_a_victims_error(kind: str, message: str) -> None:
    assert is_victim(raised(0, kind, message))


@pytest.mark.parametrize(
    "culprit", [end for end in CULPRITS if end.signal != signal.SIGABRT], ids=lambda end: end.how
)
def test_what_nobody_else_causes_is_no_victims_end(culprit: End) -> None:
    assert not is_victim(culprit)


@pytest.mark.parametrize(
    "culprit", CULPRITS, ids=lambda end: f"{end.how}-{end.type or end.signal or end.code}"
)
@pytest.mark.parametrize(("kind", "message"), VICTIMS)
def test_a_culprit_goes_before_victims_that_noticed_earlier(
    kind: str, message: str, culprit: End
) -> None:
    victims = [raised(rank, kind, message, at=1.0) for rank in (0, 2)]
    assert first_cause([victims[0], culprit, victims[1]]) is culprit


@pytest.mark.parametrize(
    ("kind", "message"), [("ConnectionError", REQUESTS), ("OperationalError", PSYCOPG)]
)
def test_a_server_that_a_rank_does_not_reach_is_no_other_rank(kind: str, message: str) -> None:
    waits = End(0, "host-0", "stopped", 2.0, step=3)
    ends = [waits, raised(1, kind, message, step=3), raised(2, "RuntimeError", CLOSED, at=0.9)]
    assert (
        blame_reason(ends[:2]) == "the only rank that failed; the others were stopped because of it"
    )
    assert blame_reason(ends) == (
        "rank 2's error is typical of losing a peer; rank 1's failure is not caused by other ranks"
    )
    assert "perhaps waited for" not in failure_text(ends)
    assert advice_for(ends[1]).startswith("correct the job at the last line shown")


def test_among_culprits_the_earliest_began_it() -> None:
    late, early = raised(0, "ValueError", "a", at=2.0), raised(1, "KeyError", "b", at=1.5)
    assert first_cause([late, early]) is early


def test_an_abort_may_be_a_watchdogs_so_a_sure_culprit_goes_before_it() -> None:
    aborted = End(0, "a", "killed", 1.0, signal=signal.SIGABRT)
    exited = End(1, "b", "exited", 9.0, code=1)
    assert is_victim(aborted)
    assert first_cause([aborted, exited]) is exited


def test_mpi_finalize_may_fail_because_another_rank_aborts() -> None:
    left = End(0, "a", "killed", 1.0, signal=signal.SIGSEGV, phase="finalize")
    aborted = End(1, "b", "exited", 1.1, code=9)
    assert is_victim(left)
    assert first_cause([left, aborted]) is aborted
    assert first_cause([left]) is left


def test_an_abort_for_a_broken_gpu_goes_before_other_aborts() -> None:
    other = End(0, "a", "killed", 1.0, signal=signal.SIGABRT, message=WATCHDOG)
    broken = End(1, "b", "killed", 1.1, signal=signal.SIGABRT, message=ECC)
    assert first_cause([other, broken]) is broken
    assert "not caused by other ranks" in blame_reason([other, broken])


def test_a_rank_that_was_stopped_is_named_if_its_gpu_is_at_fault() -> None:
    """It may have hung, and the others have waited for it."""
    victim = raised(0, "RuntimeError", RESET)
    broken = End(1, "b", "stopped", 2.0, step=7, message=describe_xid(119, "3"))
    assert f"stopped: rank 1 on b, step 7: {broken.message}" in failure_text([victim, broken])
    program = replace(broken, message=describe_xid(31, "3"))
    assert "Xid" not in failure_text([victim, program])


def test_of_victims_alone_the_earliest_is_told() -> None:
    first, second = (
        raised(1, "RuntimeError", RESET, at=1.0),
        raised(0, "RuntimeError", CLOSED, at=2.0),
    )
    assert first_cause([second, first]) is first


GLOO_ABORT = """
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4. Received \
data size doesn't match expected size. Is there a distributed collective mismatch in your code?
Fatal Python error: Aborted

Thread 0x00007f6fbc2ff6c0 (most recent call first):
"""
SHAPES = (
    "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3], but another "
    "rank sent [5]."
)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            GLOO_ABORT,
            "[enforce fail at /gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. "
            "8 vs 4.",
        ),
        ("a line\ndouble free or corruption (out)\n", "double free or corruption (out)"),
        (
            "F1121 10:00:00.0 12 file.cpp:3] Check failed: a == b\nmore",
            "F1121 10:00:00.0 12 file.cpp:3] Check failed",
        ),
        (
            "[rank1]:[E1125 20:08:24.2 ProcessGroupNCCL.cpp:638] [TC][rank=1][name=0] Aborting "
            "process on rank 1 due to timeout - timeout watchdog detected operation timeout\n",
            "Aborting process on rank 1 due to timeout",
        ),
        (
            "[rank1]:[E1125 23:41:17.3 WorkNCCL.cpp:362] [TC][rank=1][name=0] CUDA error during end "
            "event query: CUDA error: uncorrectable ECC error encountered\nframe #0: ...\n"
            "[rank1]:[E1125 23:41:17.7 ProcessGroupNCCL.cpp:638] [TC][rank=1][name=0] Aborting "
            "process on rank 1 due to error - timeout watchdog detected operation error\n",
            "Aborting process on rank 1 due to error - timeout watchdog detected operation error "
            "(CUDA error: uncorrectable ECC error encountered)",
        ),
        ("step 3\nstep 4\n", ""),
        ("  what(): one\n  what():  the last\n" + "x" * 70_000, "the last"),
    ],
)
def test_why_native_code_gave_up_is_read_from_the_log(log: str, words: str) -> None:
    assert last_words(log).startswith(words)
    assert bool(last_words(log)) == bool(words)


@pytest.mark.parametrize(
    "first",
    [
        End(0, "a", "killed", 2.0, signal=signal.SIGABRT, message=last_words(GLOO_ABORT)),
        End(0, "a", "raised", 2.0, type="HorovodInternalError", message=SHAPES),
    ],
    ids=["gloo", "horovod"],
)
def test_ranks_at_different_collectives_are_told_as_that(first: End) -> None:
    """Not as the end of a peer, which is what an abort and Horovod's error may be otherwise."""
    ends = [first, raised(1, "RuntimeError", RESET, at=1.0)]
    assert first_cause(ends) is first
    assert "only the job can tell which of the two is wrong" in blame_reason(ends)
    assert "call the same collectives" in advice_for(first)


def test_a_rank_that_had_finished_is_named_where_another_waited_for_it() -> None:
    """Its process is seen to end a moment after the others hear of it."""
    waited = raised(0, "RuntimeError", RESET, at=1.0)
    ends = [waited, End(1, "b", "finished", 1.1, step=60)]
    assert "rank 1 had finished before: did the job return early there?" in failure_text(ends)
    assert (
        blame_reason(ends) == "rank 1 had finished before; all errors are typical of losing a peer"
    )
    assert blame_reason([waited, End(1, "b", "stopped", 1.1)]).startswith(
        "the rank that failed first is not known; "
    )


def test_ranks_of_one_node_are_lost_at_once_whoever_is_heard_of_first() -> None:
    ends = [End(rank, f"host-{rank // 2}", "lost", 2.0 - rank / 1000) for rank in range(2)]
    ends += [raised(2, "RuntimeError", RESET), End(3, "host-1", "stopped", 3.0)]
    assert first_cause(ends) is ends[0]
    assert blame_reason(ends) == "ranks 0-1 were lost together, with their node or actor on host-0"


def test_nobody_is_blamed_where_nobody_failed() -> None:
    ends = [End(0, "a", "finished", 1.0), End(1, "a", "stopped", 1.0, signal=15)]
    assert first_cause(ends) is None
    assert failure_text(ends) == ""
    assert first_cause([]) is None


def gang(culprit: End, n: int = 8) -> list[End]:
    """Return a culprit among `n` ranks, the others closed by their peer, the last one stopped by
    us."""
    others = [raised(rank, "RuntimeError", CLOSED, step=7) for rank in range(n)]
    others[culprit.rank] = culprit
    return [*others[:-1], replace(others[-1], how="stopped", type="", message="", signal=9)]


def test_the_text_of_an_exception_has_all_that_a_person_needs() -> None:
    trace = "\n".join(f"line {n}" for n in range(40))
    log = "runs/x/rank-1.log"
    culprit = raised(
        1, "ValueError", "loss is nan", step=120, phase="backward", traceback=trace, log=log
    )
    first, *rest = failure_text(gang(culprit)).splitlines()
    assert first == "rank 1 on host-1, step 120, in backward: ValueError: loss is nan"
    assert "  line 39" in rest
    assert "  line 25" in rest
    assert "  line 24" not in rest
    assert "  log: runs/x/rank-1.log" in rest
    assert rest[-1] == "  follow-on: ranks 0, 2-6: RuntimeError: Connection closed by peer"


@pytest.mark.parametrize(
    ("culprit", "words"),
    [
        (CULPRITS[4], ["exited with code 3"]),
        (CULPRITS[5], ["SIGKILL", "out-of-memory"]),
        (CULPRITS[6], ["SIGSEGV", "native code"]),
        (CULPRITS[7], ["SIGBUS", "/dev/shm"]),
        (CULPRITS[8], ["SIGABRT", "the end of the log"]),
        (CULPRITS[9], ["lost", "The node was terminated"]),
        (End(1, "b", "killed", 5.0, signal=15), ["SIGTERM"]),
        (End(1, "b", "killed", 5.0, signal=35), ["signal 35"]),
        (raised(1, "KeyboardInterrupt", ""), ["KeyboardInterrupt"]),
    ],
)
def test_every_way_to_end_is_said_in_words(culprit: End, words: list[str]) -> None:
    first = failure_text(gang(culprit)).splitlines()[0]
    assert first.startswith("rank 1 on ")
    for word in words:
        assert word in first


def test_the_same_error_on_several_ranks_is_told_once() -> None:
    ends = [
        raised(rank, "ValueError", f"bad sample {rank} at 0x7f{rank}", at=rank, code=1)
        for rank in (1, 2, 3, 5)
    ]
    ends[2] = replace(
        ends[2], code=0, signal=9
    )  # stopped with all others, while it printed its traceback
    text = failure_text([*ends, raised(0, "KeyError", "'x'", at=9.0)])
    assert text.splitlines()[0].startswith("rank 1 ")
    assert "  the same on ranks 2-3, 5" in text
    assert "  follow-on: rank 0: KeyError: 'x'" in text
    assert text.count("bad sample") == 1


def test_a_thousand_victims_take_a_few_lines() -> None:
    text = failure_text(gang(CULPRITS[5], n=1000))
    assert len(text.splitlines()) == 2
    assert "ranks 0, 2-998:" in text


def test_a_timeout_names_the_rank_that_did_not_come() -> None:
    ends = [
        raised(0, "RuntimeError", WAITED, step=4, phase="backward"),
        End(1, "host-1", "stopped", 9.0, step=3, phase="data", signal=9),
        raised(2, "RuntimeError", WAITED, at=2.0, step=4),
    ]
    assert "perhaps waited for: rank 1 on host-1, step 3, in data" in failure_text(ends)


def test_a_rank_that_returned_early_is_named() -> None:
    ends = [raised(0, "RuntimeError", CLOSED, at=2.0), End(1, "host-1", "finished", 1.9, step=3)]
    assert "rank 1 had finished before" in failure_text(ends)
    late = [ends[0], replace(ends[1], at=3.0)]
    assert "had finished" not in failure_text(late)


def test_a_culprit_needs_no_suspects() -> None:
    assert "perhaps" not in failure_text(
        [raised(0, "ValueError", "x", step=4), End(1, "b", "stopped", 9.0, step=3)]
    )


def test_a_long_message_is_cut_in_the_follow_on_line() -> None:
    ends = [raised(0, "ValueError", "a"), raised(1, "TypeError", "b" * 500, at=2.0)]
    assert max(map(len, failure_text(ends).splitlines())) < 150


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3, 7], "0-3, 7"),
        ([9, 8, 8, 1], "1, 8-9"),
        (range(1000), "0-999"),
    ],
)
def test_ranks_as_ranges(ranks: Sequence[int], text: str) -> None:
    assert rank_ranges(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_ranges_hold_exactly_the_ranks(ranks: set[int]) -> None:
    spans = [
        [int(end) for end in span.split("-")] for span in rank_ranges(ranks).split(", ") if span
    ]
    assert {rank for span in spans for rank in range(span[0], span[-1] + 1)} == ranks
    assert all(after[0] > before[-1] + 1 for before, after in itertools.pairwise(spans))


GLOO = """
import json, os, signal, sys, time
import torch, torch.distributed as dist

def rank(number, port, how):
    os.environ.update(RANK=str(number), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo")
    tensor = torch.ones(1 << 12)
    for step in range(4):
        if number == 1 and step == 2:
            {"raise": lambda: [][0], "exit": lambda: os._exit(3),
             "shape": lambda: dist.all_reduce(torch.ones(2))}.get(how, lambda: os.kill(os.getpid(), int(how)))()
        dist.all_reduce(tensor)

def attempt(how):
    ready, told = os.pipe()
    if not (holder := os.fork()):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        signal.pause()
    port, pids, ends = int(os.read(ready, 9)), {}, {}
    read, write = os.pipe()
    for number in range(3):
        if not (pid := os.fork()):
            try:
                rank(number, port, how)
            except Exception as error:
                fact = {"type": type(error).__name__, "message": str(error), "at": time.time(), "rank": number}
                os.write(write, json.dumps(fact).encode() + b"\\n")
                os._exit(1)
            os._exit(0)
        pids[pid] = number
    while pids:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        ends[pids.pop(pid)] = {"at": time.time(), "code": max(code, 0), "signal": max(-code, 0)}
    os.close(write)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    for line in os.fdopen(read):
        fact = json.loads(line)
        ends[fact["rank"]] |= fact
    return [ends[number] | {"rank": number} for number in range(3)]

print(json.dumps({how: attempt(how) for how in sys.argv[1:]}))
"""
FAULTS = ("raise", "exit", "shape", "9", "11", "7")


@pytest.fixture(scope="module")
def attempts() -> dict[str, list[End]]:
    """What became of three real ranks each time that rank 1 was ended in one of FAULTS' ways."""
    run = subprocess.run(
        [sys.executable, "-c", GLOO, *FAULTS],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    output = run.stdout.splitlines()[-1]  # the gloo of torch 2.8 speaks before
    return {how: [as_end(**facts) for facts in ends] for how, ends in json.loads(output).items()}


def as_end(code: int, signal: int, type: str = "", **facts: Any) -> End:
    how: EndKind = "raised" if type else "killed" if signal else "exited" if code else "finished"
    return End(host="here", how=how, code=code, signal=signal, type=type, **facts)


@pytest.mark.parametrize("how", FAULTS)
def test_with_the_gloo_that_is_installed_the_right_rank_is_blamed(
    attempts: dict[str, list[End]], how: str
) -> None:
    ends = attempts[how]
    assert [end.how for end in ends if end.rank != 1] == ["raised", "raised"]
    assert all(is_victim(end) for end in ends if end.rank != 1), ends
    first = first_cause(ends)
    assert first is not None
    assert first.rank == 1
    follow_on = failure_text(ends).splitlines()[-1]
    assert follow_on.startswith("  follow-on: rank")
    assert "127.0.0.1" not in follow_on
    assert blame.short_cause(ends[0]) in (
        "RuntimeError: Connection closed by peer",
        "RuntimeError: Read error Connection reset by peer",
    )


def test_an_exit_may_be_the_echo_of_a_kill_that_is_seen_later() -> None:
    exited = End(rank=5, host="b", how="exited", at=10.0, code=15)
    killed = End(rank=3, host="b", how="killed", at=10.1, signal=9)
    assert first_cause([exited, killed]) is killed
    assert first_cause([exited, replace(killed, at=11.0)]) is exited
    assert first_cause([exited, replace(killed, signal=6)]) is exited
