"""Messages: what is sent arrives equal, and each request has an answer of its type."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from raydist.messages import agent, checkup, command, deputy, mpirun, rank, request, server, writer
from raydist.messages.checkup import CheckupRequest
from raydist.messages.command import CommandRequest
from raydist.messages.rank import Activity, Collective, Holding, ReleaseRank, StopAfter
from raydist.messages.request import Request
from raydist.messages.server import (
    Ended,
    ImportModules,
    KeptSteps,
    ListSteps,
    OpenStore,
    RankSpec,
    SignalProcess,
    Warm,
    WriteCheckpoint,
)
from raydist.messages.wire import TAG, Message, decode, encode
from raydist.messages.writer import (
    CommitShards,
    ListShards,
    RandomStates,
    ReadRandomStates,
    UnseenShards,
    WriteShards,
)
from raydist.network.facts import Facts
from raydist.network.nccl_log import Log
from raydist.network.traffic import Ports
from raydist.node.actor import AgentHost
from raydist.node.agent import RankAgent
from raydist.node.checkup import Checkup
from raydist.node.commands import Commands
from raydist.node.mpi_agent import MpiRankAgent
from raydist.shared.kinds import Event
from tests.records import event

WIRES = (agent, checkup, command, deputy, mpirun, rank, request, server, writer)
SPEC = RankSpec(
    1, {"RANK": "1"}, "{}", ("a.py", "--x"), "a.py", "/", ("/lib",), "/tmp/value", None, (0, 1)
)


COLLECTIVE: Collective = {
    "process_group": ["0", "default_pg"], "collective_seq_id": 3, "p2p_seq_id": 0, "is_p2p": False,
    "profiling_name": "gloo:all_reduce", "input_sizes": [[3]], "state": "scheduled", "retired": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        SPEC,
        ImportModules(("torch", "json")),
        OpenStore("tcp", "10.0.0.1"),
        WriteCheckpoint(last=False),
        WriteCheckpoint(step=7, random=("AAE=", "AgM=")),
        ListSteps(8),
        KeptSteps((6, 7)),
        ReadRandomStates(7, 16),
        RandomStates(("AAE=",)),
        ListShards(),
        WriteShards(5, "mark", 4, (1, 3)),
        CommitShards(5, "mark", 4, {"a": {"bytes": 1, "xxh3_128": "x"}}, 3, None),
        UnseenShards(("a", "b"), "/runs"),
        SignalProcess(7, 9),
        Warm({"torch": "ImportError: no"}, cuda=True),
        Ended(7, 0, 9, 1.5),
        StopAfter(3),
        ReleaseRank(),
        Activity("Thread 0x1", (COLLECTIVE,)),
        Holding(4),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b'{"protocol": "Elsewhere"}',
        b'{"protocol": "ServerMessage"}',
        b'{"protocol": "Ended", "x": 1}',
        b"x",
    ],
)
def test_anything_else_is_no_message(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)


def test_an_event_is_no_message() -> None:
    raised = event("raised", rank=1, type="ValueError", message="no")
    assert TAG not in raised.to_json()


def requests() -> list[type[Any]]:
    """Return every class of requests that is sent."""
    kinds: list[type[Any]] = [Request]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [kind for kind in kinds if is_dataclass(kind)]


@pytest.mark.parametrize("kind", requests(), ids=lambda kind: kind.__name__)
def test_a_request_names_the_type_of_its_reply(kind: type[Any]) -> None:
    bases = (Request, CheckupRequest, CommandRequest)
    base = next(base for base in kind.__orig_bases__ if typing.get_origin(base) in bases)
    (reply,) = get_args(base)
    assert reply is not Any
    names = {name: value for wire in WIRES for name, value in vars(wire).items()}
    names |= {"Facts": Facts, "Event": Event, "Log": Log, "Ports": Ports}
    hints = get_type_hints(kind, names)
    assert hints.keys() == {field.name for field in fields(kind)}
    assert Any not in hints.values()


@pytest.mark.parametrize("kind", requests(), ids=lambda kind: kind.__name__)
def test_an_agent_answers_each_request(kind: type[Any]) -> None:
    handlers: list[Any] = [AgentHost._reply, RankAgent.handle, MpiRankAgent.handle]
    if issubclass(kind, CheckupRequest):
        handlers = [Checkup.handle]
    if issubclass(kind, CommandRequest):
        handlers = [Commands.handle]
    assert any(kind.__name__ in handler.__code__.co_names for handler in handlers)
