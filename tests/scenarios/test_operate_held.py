"""Ranks that wait for a person: for longer than the timeout of the others' collectives, and at an
exception."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from tests.programs import Program
from tests.scenarios.test_operate import debug, operate

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 300
"""Limit on the wait for a program on a busy machine."""
SHORT_S = 20
"""The timeout of the program's collectives."""
SHORT = f"""
    import time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    import raydist

    dist.init_process_group("gloo")
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds={SHORT_S}))
    rank = dist.get_rank()

    def limit():
        group = dist.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    def work(step):
        if step == 5:
            if rank == 1:
                breakpoint()
            until = time.monotonic() + 60
            while rank == 0 and limit() == {SHORT_S} and time.monotonic() < until:
                time.sleep(0.01)  # computes when the other one begins to wait
        return step

    for step in range(1000000):
        work(step)
        dist.all_reduce(torch.ones(1))
        raydist.report(step=step, limit=limit())
        time.sleep(0.01)
"""

RAISES = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def work(step):
        wanted = step * 2
        if rank == 1 and step == 5:
            raise ValueError("no such step")
        return wanted

    for step in range(1000000):
        work(step)
        dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_raised_waits_and_then_fails(tmp_path: Path) -> None:
    code = textwrap.dedent(RAISES)
    (tmp_path / "raises.py").write_text(code)
    line = code.splitlines().index('        raise ValueError("no such step")') + 1
    words = ("script=raises.py", "scale=1x2", "group=inline", "watch.post_mortem=true")
    program = Program(tmp_path, *words, "hang.after_s=0.5", "hang.limit_s=5", "restart=none")
    there = f"rank 1 waits at raises.py:{line};"
    program.wait_until(lambda: there in program.screen, "the exception", LIMIT_S)
    hangs = program.events("hang")  # on a busy machine ranks may seem to hang before
    time.sleep(7)  # beyond hang.limit_s
    said = debug(tmp_path, "p step, wanted\nup\np step + 1\nn\n")
    assert "ValueError: no such step" in said
    assert f"> {tmp_path / 'raises.py'}({line})work()" in said
    assert "(rank 1) (5, 10)" in said
    assert "(rank 1) 6" in said
    assert "raydist/" not in said
    assert program.wait(LIMIT_S) == 1
    (raised,) = program.events("raised")
    assert (raised["rank"], raised["type"]) == (1, "ValueError")
    assert {each["rank"]: each["how"] for each in program.events("ended")}[1] == "raised"
    assert program.events("hang") == hangs


def test_the_others_wait_beyond_their_timeout_and_have_it_back_afterwards(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(textwrap.dedent(SHORT))
    program = Program(tmp_path, "script=short.py", "scale=1x2", "group=inline", "restart=none")
    program.wait_until(lambda: "rank 1 waits at" in program.screen, "the breakpoint", LIMIT_S)
    time.sleep(SHORT_S + 10)
    debug(tmp_path, "p step\nq\n")
    has_its_timeout_back(program)

    # a session in the other rank, at any line of Python: as long
    typed = f"import time; time.sleep({SHORT_S + 10})\nq\n"
    debug(tmp_path, typed, "rank=0")
    has_its_timeout_back(program)
    (held, released) = program.events("held", "released")
    assert (held["rank"], released["rank"]) == (1, 1)
    assert operate(tmp_path, "stop", timeout=LIMIT_S).returncode == 0
    program.wait(LIMIT_S)


def has_its_timeout_back(program: Program) -> None:
    """Assert that both ranks make steps again with the timeout that the program has chosen."""

    def ranks() -> set[int]:
        reports = program.events("report")[since:]
        return {each["rank"] for each in reports if each["values"]["limit"] == SHORT_S}

    since = len(program.events("report"))
    program.wait_until(lambda: ranks() == {0, 1}, "steps with the old timeout", LIMIT_S)
