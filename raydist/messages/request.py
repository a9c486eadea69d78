"""Requests of the driver to agents, with typed replies, and their transport. (either side)"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Reply = TypeVar("Reply", covariant=True)
AnyReply = TypeVar("AnyReply")


class Request(Generic[Reply]):
    """A request of the driver to the agent of one rank; its type parameter is the reply's type."""


class Transport(Protocol):
    """Sends requests to agents: through Ray's actors, or to a thread of this process."""

    def __call__(self, rank: int, request: Request[AnyReply]) -> Future[AnyReply]:
        """Send a request to the agent of a rank.

        The future raises the agent's error, or CallLost if no answer will come.
        """
        ...


class NodeRequest(NamedTuple):
    """A request to one agent of a node, among those that travel together."""

    number: int
    """The number of the request, among all to this node."""
    local_rank: int
    request: Request[Any]


class Answer(NamedTuple):
    """The answer to a NodeRequest."""

    number: int
    reply: Any = None
    error: Exception | None = None
    """What the agent raised."""
