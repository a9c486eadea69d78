"""The states that a fork server holds: for whom, until when, and what happens if memory is short."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from raydist.node import held_states
from raydist.node.held_states import HeldStates
from raydist.node.snapshots import SnapshotBuffers
from raydist.shared import cgroup

SIZE = 1 << 20


def buffers() -> SnapshotBuffers:
    """Return the memory of one rank, of SIZE bytes, which an agent uses."""
    made = SnapshotBuffers(Path("run"), Path("checkpoints"))
    made.descriptors[0] = os.memfd_create("test")
    os.pwrite(made.descriptors[0], bytes(SIZE), 0)
    return made


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with ExitStack() as opened:
        yield tuple(opened.enter_context(each) for each in socket.socketpair())  # type: ignore[misc]


def test_states_outlive_the_agents_and_the_next_placement_takes_them(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    agent, keeper = sockets
    held, memory = HeldStates(), buffers()
    memory.agents.add(agent)
    held.hold("key", memory)
    assert held.keep("key", keeper)
    assert held.take("key") == (None, ()), "an agent still uses them"
    memory.release(agent)
    assert memory.size() >= SIZE
    assert held.find("key")
    assert held.take("key") == (memory, {keeper})
    assert (held.find("key"), held.keep("key", keeper), bool(held)) == (False, False, False)
    memory.free_unused()
    assert not memory.descriptors


def test_what_nobody_keeps_is_freed_and_all_if_memory_is_short(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, kept, left = HeldStates(), buffers(), buffers()
    held.hold("kept", kept)
    held.hold("left", left)
    for keeper in sockets:
        held.keep("kept" if keeper is sockets[0] else "left", keeper)
    monkeypatch.setattr(cgroup, "memory_left", lambda: 3 * SIZE)
    assert held.drop_unwanted() == []
    held.leave(sockets[1])
    assert held.drop_unwanted() == []
    assert (bool(kept.descriptors), bool(left.descriptors)) == (True, False)
    monkeypatch.setattr(cgroup, "memory_left", lambda: SIZE // 2)
    assert held.drop_unwanted() == [sockets[0]]
    assert not kept.descriptors
    assert not held


def test_states_without_a_keeper_are_held_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    held, memory = HeldStates(), buffers()
    held.hold("key", memory)
    held.drop_unwanted()
    assert held.descriptors() == [*memory.descriptors.values()]
    monkeypatch.setattr(held_states, "HOLD_S", -1.0)
    assert held.find("key")
    held.drop_unwanted()
    assert not held
