"""Which ways of `raydist stacks` work on a node, by what the node lets py-spy trace."""

from __future__ import annotations

import pytest

from raydist.shared.stack_ways import Tracing, native_obstacle, ways_line


@pytest.mark.parametrize(
    "node",
    [
        Tracing(py_spy=True),
        Tracing(py_spy=True, yama=1, capable=False),  # ranks admit any process of their user
        Tracing(py_spy=True, yama=2),
        Tracing(py_spy=True, agent_user=0, rank_user=1000),
        Tracing(py_spy=True, capable=False, agent_user=1000, rank_user=1000),
    ],
)
def test_all_ways_work(node: Tracing) -> None:
    assert native_obstacle(node) is None
    assert "frames of C code" in ways_line(None)


@pytest.mark.parametrize(
    ("node", "why", "fix"),
    [
        (Tracing(py_spy=False, yama=3, filtered=True), "not installed", "pip install py-spy"),
        (Tracing(py_spy=True, yama=3, filtered=True), "seccomp", "--cap-add=SYS_PTRACE"),
        (Tracing(py_spy=True, yama=3), "ptrace_scope=3 forbids", "/etc/sysctl.d"),
        (Tracing(py_spy=True, yama=2, capable=False), "ptrace_scope=2", "ptrace_scope=1, or"),
        (
            Tracing(py_spy=True, capable=False, agent_user=0, rank_user=1000),
            "user 1000 and its agent, without CAP_SYS_PTRACE, as user 0",
            "SYS_PTRACE",
        ),
    ],
)
def test_frames_of_c_code_have_an_obstacle(node: Tracing, why: str, fix: str) -> None:
    found = native_obstacle(node)
    assert found is not None
    assert why in found.why
    assert fix in found.fix
    line = ways_line(found)
    assert line.startswith("raydist stacks and raydist debug work")
    assert line.endswith(found.why)
