"""The last state of several nodes: the step that all ranks have, with the generators of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.launch.flush import FlushNode, flush, newest_common_step
from raydist.messages.agent import Flush, Flushed
from raydist.messages.request import Request
from raydist.messages.server import KeptSteps, ListSteps, WriteCheckpoint
from raydist.messages.wire import decode, encode
from raydist.messages.writer import ListShards, ReadRandomStates
from raydist.node import snapshots, writer_requests
from raydist.settings.config import Checkpoint
from raydist.shared.kinds import Event
from raydist.state import checkpoint_files
from raydist.state.snapshot import SnapshotBuffer
from raydist.state.snapshot_layout import LAST_SLOT, blank_page
from raydist.state.write import SaveRequest


class Node:
    """The memories of a node's ranks, and its answers to the driver."""

    def __init__(self, folder: Path, ranks: range, world_size: int) -> None:
        """`ranks`: those of this node. `world_size`: the number of all."""
        self.ranks = ranks
        self.folder = folder
        self.silent: type[Any] | None = None
        """The request that it does not answer."""
        self.asked: list[str] = []
        self.buffers = snapshots.SnapshotBuffers(folder, folder)
        for local in range(len(ranks)):
            self.buffers.descriptors[local] = os.memfd_create("test")
            os.pwrite(self.buffers.descriptors[local], blank_page(), 0)
        request = SaveRequest(0, {}, {}, world_size, str(folder), str(folder), 3, None)
        self.memory(ranks[0]).fill_request(LAST_SLOT, request)

    def memory(self, rank: int) -> SnapshotBuffer:
        return SnapshotBuffer(self.buffers.descriptors[self.ranks.index(rank)])

    def keep(self, rank: int, step: int, world_size: int) -> None:
        """Keep the state of a rank: its generators tell step and rank."""
        own = {"random": drawn(rank, step), "loss": step / 10, "world_size": world_size}
        whole = {"model": torch.full((2,), float(step))} if rank == self.ranks[0] else {}
        self.memory(rank).write(step, {"own": own, **whole})

    def ask(self, request: Request[Any]) -> Future[Any]:
        self.asked.append(type(request).__name__)
        reply: Future[Any] = Future()
        if self.silent is not None and isinstance(request, self.silent):
            reply.set_exception(ConnectionError("the actor is gone"))
        else:
            reply.set_result(self.answer(request))
        return reply

    def answer(self, request: Any) -> Any:
        descriptors = self.buffers.descriptors
        match request:
            case Flush(step, random):
                sent: Any = decode(encode(WriteCheckpoint(step=step, random=random)))
                had_state = self.buffers.wants_writer(sent)
                events = snapshots.write_checkpoint(descriptors, sent) if had_state else []
                return Flushed([each.to_json() for each in events], had_state)
            case ListSteps(ranks):
                return decode(encode(KeptSteps(self.buffers.common_steps(ranks))))
            case ReadRandomStates():
                reply = writer_requests.answer_request(descriptors, self.folder, request)
                assert reply is not None
                return decode(encode(reply))
            case ListShards():
                assert not self.buffers.wants_writer(request)
        return None


def drawn(rank: int, step: int) -> torch.Tensor:
    return torch.tensor([rank, step, 7], dtype=torch.uint8)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    """Makes nodes whose ranks have kept these steps: a list of steps for each rank of each node."""
    made: list[Node] = []

    def nodes(*steps: Sequence[Sequence[int]], kept_by: int | None = None) -> list[Node]:
        first, world_size = 0, sum(map(len, steps))
        for of_node in steps:
            node = Node(tmp_path, range(first, first + len(of_node)), world_size)
            for rank, own in zip(node.ranks, of_node, strict=True):
                for step in own:
                    node.keep(rank, step, kept_by or world_size)
            made.append(node)
            first += len(of_node)
        return made

    yield nodes
    for node in made:
        for descriptor in node.buffers.descriptors.values():
            os.close(descriptor)


def as_asked(nodes: Sequence[Node]) -> list[FlushNode]:
    return [FlushNode(f"host-{i}", node.ask, len(node.ranks)) for i, node in enumerate(nodes)]


def flushed(nodes: Sequence[Node], world_size: int | None = None) -> tuple[int, Any, list[Event]]:
    """Return the step that was saved, the generators in it, and the events."""
    events: list[Event] = []
    ranks = world_size or sum(len(node.ranks) for node in nodes)
    assert flush(as_asked(nodes), Checkpoint(), events.append, ranks) == ""
    saved = checkpoint_files.newest(nodes[0].folder)
    assert saved is not None
    assert saved.metrics == {"loss": saved.step / 10}
    state = checkpoint_files.read_state(saved.path)
    assert state["model"].tolist() == [saved.step] * 2
    return saved.step, state["random"], events


@pytest.mark.parametrize(
    ("held", "step"),
    [
        ([[4, 5], [4, 5]], 5),
        ([[4, 5], [3, 4]], 4),
        ([[4, 5], [5, 6]], 5),
        ([[4, 5], [5, 6], [3, 4]], -1),
        ([[4, 5], []], -1),  # too little memory, or no state yet
        ([[4, 5], None], -1),
        ([[], []], -1),
    ],
)
def test_the_newest_step_that_all_nodes_hold(held: list[Collection[int] | None], step: int) -> None:
    assert newest_common_step(held) == step


@pytest.mark.parametrize(
    ("steps", "saved"),
    [
        (([[4, 5], [4, 5]], [[4, 5], [4, 5]]), 5),
        (([[4, 5], [4, 5]], [[3, 4], [4, 5]]), 4),
        (([[3, 4], [3, 4]], [[4, 5], [4, 5]]), 4),
        (([[4, 5]], [[3, 4]], [[4, 5]]), 4),
    ],
)
def test_the_state_of_several_nodes_has_the_generators_of_all_ranks(
    make: Callable[..., list[Node]], steps: Any, saved: int
) -> None:
    nodes = make(*steps)
    step, random, events = flushed(nodes)
    ranks = sum(map(len, steps))
    assert step == saved
    assert torch.equal(random, torch.stack([drawn(rank, saved) for rank in range(ranks)]))
    assert [each.kind for each in events] == ["saved"]
    # The fork server of rank 0 writes what it still owes when its agents leave: nothing.
    first = nodes[0].buffers
    assert first.newest_step() == saved
    assert not snapshots.write_checkpoint(first.descriptors, WriteCheckpoint())


def test_ranks_of_one_node_are_not_asked(make: Callable[..., list[Node]]) -> None:
    nodes = make([[4, 5], [3, 4]])
    step, random, _ = flushed(nodes)
    assert (step, len(random)) == (4, 2)
    assert nodes[0].asked == ["Flush", "ListShards"]


@pytest.mark.parametrize("silent", [ListSteps, ReadRandomStates])
def test_without_an_answer_of_all_nodes_the_newest_state_lacks_the_generators(
    make: Callable[..., list[Node]], silent: type[Any]
) -> None:
    nodes = make([[4, 5]], [[3, 4]])
    nodes[1].silent = silent
    step, random, (warning, _) = flushed(nodes)
    assert (step, len(random)) == (5, 0)
    assert "step 5 was saved without the random generators of some ranks" in str(warning)


def test_a_lost_node_costs_no_question(make: Callable[..., list[Node]]) -> None:
    nodes = make([[4, 5]], [[4, 5]])
    step, random, _ = flushed(nodes[:1], world_size=2)
    assert (step, len(random)) == (5, 0)
    assert nodes[0].asked == ["Flush", "ListShards"]


def test_another_node_writes_the_same_step(make: Callable[..., list[Node]]) -> None:
    nodes = make([[4, 5]], [[3, 4]])
    nodes[0].silent = Flush
    step, random, _ = flushed(nodes)
    assert (step, random.tolist()) == (4, [[0, 4, 7], [1, 4, 7]])


@pytest.mark.parametrize("nobody", [False, True])
def test_a_node_without_a_state_leaves_it_to_the_next_one(
    make: Callable[..., list[Node]], nobody: bool
) -> None:
    """It has replaced a lost one, and its ranks have not kept a step yet."""
    nodes = make([[]], [[]], [[] if nobody else [4, 5]])
    if nobody:
        events: list[Event] = []
        assert (flush(as_asked(nodes), Checkpoint(), events.append, 3), events) == ("", [])
        return
    step, random, (warning, _) = flushed(nodes)
    assert (step, len(random)) == (5, 0)
    assert "step 5 was saved without the random generators of some ranks" in str(warning)


def test_a_state_that_is_lost_with_its_only_node_is_a_warning(
    make: Callable[..., list[Node]],
) -> None:
    """Nothing was said: the node of rank 0, which has replaced a lost one, answers."""
    nodes = make([[]], [[4, 5]], [[]])
    nodes[1].silent = Flush
    events: list[Event] = []
    why = flush(as_asked(nodes), Checkpoint(), events.append, 3)
    assert why == (
        "the state of step 5 may be lost: no node that had it could write it "
        "(host-1: ConnectionError: the actor is gone)"
    )
    nodes[2].keep(2, 4, 3)
    assert flushed(nodes)[0] == 4


def test_generators_of_another_number_of_ranks_are_left_out(
    make: Callable[..., list[Node]],
) -> None:
    """The ranks of this attempt began with new ones, and have kept no step yet."""
    _, random, _ = flushed(make([[4, 5], [4, 5]], kept_by=3))
    assert len(random) == 0
