"""The command `raydist warm`: list the fork servers that nodes keep for the next run. (driver)

`python -m raydist.tools.warm` is the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from raydist.cluster import connect
from raydist.node import kept_server
from raydist.node.kept_server import KeptServer
from raydist.settings.config import Job
from raydist.shared.rank_names import counted
from raydist.tools.command_line import run_tool
from raydist.tools.plan import connected
from raydist.train import Parser

OnNodes = Callable[[Callable[[], Any]], list[Any]]
"""Calls a function on each node; returns its values."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit code: 0; 2 for a wrong flag."""

    def warm() -> int:
        parser = Parser(
            prog="raydist warm",
            description="Lists the fork servers that stay on this machine, and on the nodes of a "
            "running Ray cluster, "
            "for the next run (scale.keep_warm_s). They are this user's only; no run needs them.",
        )
        parser.add_argument("--end", action="store_true", help="end those that no run uses")
        arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
        with nodes() as on_nodes:
            print("\n".join(end_servers(on_nodes) if arguments.end else list_servers(on_nodes)))
        return 0

    return run_tool(warm)


def list_servers(on_nodes: OnNodes) -> Iterator[str]:
    """Yield a line for each server."""
    servers = {
        (each["host"], each["pid"]): KeptServer(**each)
        for found in on_nodes(servers_here)
        for each in found
    }
    if not servers:
        yield "no fork server waits for a run"
        return
    yield f"{'host':20}  {'pid':>8}  {'age':>7}  {'memory':>9}  state"
    for server in sorted(servers.values(), key=lambda each: (each.host, each.born)):
        age, state = time.time() - server.born, "waits" if server.free else "in use"
        mib = server.memory / 2**20
        yield f"{server.host:20}  {server.pid:8}  {age:5.0f} s  {mib:5.0f} MiB  {state}"


def end_servers(on_nodes: OnNodes) -> Iterator[str]:
    """End all servers that no run uses; yield a line with their number."""
    ended = sum(on_nodes(end_free))
    yield f"{counted(ended, 'fork server')} ended"


def servers_here() -> list[dict[str, Any]]:
    """Return the servers of this node."""
    return [asdict(server) for server in kept_server.kept_servers()]


def end_free() -> int:
    """End the servers of this node that no run uses; return their number."""
    return sum(kept_server.end(server.folder) for server in kept_server.kept_servers())


@contextmanager
def nodes() -> Iterator[OnNodes]:
    """Yield a way to call a function on this machine and on each node of the running Ray."""
    if not connect.running_address():
        yield lambda function: [function()]
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def call(function: Callable[[], Any]) -> list[Any]:
        task = ray.remote(num_cpus=0)(function)
        pinned = [
            NodeAffinitySchedulingStrategy(node.id, soft=False) for node in connect.alive_nodes()
        ]
        waiting = [task.options(scheduling_strategy=each).remote() for each in pinned]
        return [function(), *ray.get(waiting)]

    with connected(Job()):
        yield call


if __name__ == "__main__":
    sys.exit(main())
