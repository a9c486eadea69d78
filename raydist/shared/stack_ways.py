"""What a node lets one process see of another -> which ways of `raydist stacks` work. (pure)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Tracing:
    """What decides whether py-spy, started by an agent, may trace a rank (ptrace(2))."""

    py_spy: bool
    """Whether it is installed."""
    yama: int = 0
    """kernel.yama.ptrace_scope; 0 in a kernel without Yama."""
    capable: bool = True
    """Whether the agent has CAP_SYS_PTRACE."""
    filtered: bool = False
    """Whether a seccomp filter refuses the system calls that py-spy needs."""
    agent_user: int = 0
    rank_user: int = 0
    """The user ids; equal unless the program changes its own."""


class Obstacle(NamedTuple):
    """Why there are no frames of C code."""

    why: str
    fix: str
    """What to type."""

    def line(self) -> str:
        """Format it as `why: what to type`."""
        return f"{self.why}: {self.fix}"


CAPABILITY = (
    "docker run --cap-add=SYS_PTRACE; on Kubernetes SYS_PTRACE in the container's "
    "securityContext.capabilities.add"
)
ALWAYS = "raydist stacks and raydist debug work: they trace no process"


def native_obstacle(node: Tracing) -> Obstacle | None:
    """Return why `raydist stacks --native` can't work on a node; None if it can.

    Yama's 1 is no obstacle: ranks admit any process of their user (worker/main.py).
    """
    if not node.py_spy:
        return Obstacle("py-spy is not installed", "pip install py-spy")
    if node.filtered:
        return Obstacle("the container's seccomp profile forbids ptrace", CAPABILITY)
    if node.yama >= 3:
        return Obstacle(
            "kernel.yama.ptrace_scope=3 forbids ptrace until the next boot",
            "set 1 in /etc/sysctl.d, and reboot",
        )
    if node.yama == 2 and not node.capable:
        return Obstacle(
            "kernel.yama.ptrace_scope=2 forbids ptrace without CAP_SYS_PTRACE",
            f"sysctl -w kernel.yama.ptrace_scope=1, or {CAPABILITY}",
        )
    if node.agent_user != node.rank_user and not node.capable:
        return Obstacle(
            f"the rank runs as user {node.rank_user} and its agent, without CAP_SYS_PTRACE, as "
            f"user {node.agent_user}",
            CAPABILITY,
        )
    return None


def ways_line(obstacle: Obstacle | None) -> str:
    """Return which ways of `raydist stacks` work on a node."""
    if obstacle is None:
        return f"{ALWAYS}; --native shows the frames of C code"
    return f"{ALWAYS}; --native shows no frames of C code: {obstacle.why}"
