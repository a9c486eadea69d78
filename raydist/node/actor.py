"""The Ray actor of one rank: holds its resources; a node's first also hosts all agents. (actor)"""

from __future__ import annotations

import asyncio
import pickle
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from raydist.cluster import ray_private
from raydist.messages.agent import Close, GetNews, RankNews
from raydist.messages.deputy import Deputize, Duty
from raydist.messages.request import Answer, NodeRequest, Request
from raydist.node.agent import RankAgent
from raydist.node.deputy_process import DeputyProcess
from raydist.node.mpi_agent import MpiRankAgent
from raydist.shared.errors import LaunchError

HOLD_S = 0.02
"""Limit on the time that a rank's news waits for that of the node's other ranks."""


def make_agent(backend: str) -> RankAgent:
    """Return a new agent, of the class that the backend needs."""
    return MpiRankAgent() if backend == "mpi" else RankAgent()


class AgentHost:
    """Hosts all agents of a node: in an actor, or in a thread of a driver without Ray."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._agents: dict[int, RankAgent] = {}
        self._answers: list[Answer] = []
        """The answers that no call has taken yet."""
        self._waiter: asyncio.Future[None] | None = None
        """The future of the call that waits for answers."""
        self._answering_ranks: set[int] = set()
        """The local ranks whose agents are answering GetNews."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deputy: DeputyProcess | None = None
        self._step = 0
        """The newest step that a rank of this node has reported."""

    async def exchange(self, requests: Sequence[NodeRequest]) -> list[Answer]:
        """Pass requests to agents of this node, and return answers once there is at least one.

        They may answer requests of earlier calls: a slow answer does not delay the others. Only the
        newest call waits; an earlier one returns at once.
        """
        loop = asyncio.get_running_loop()
        if self._deputy is not None:
            self._deputy.note_question(self._step)
        for request in requests:
            task = loop.create_task(self._handle(request))
            self._tasks.add(task)  # the loop holds only weak references
            task.add_done_callback(self._tasks.discard)
        self._wake()
        if not self._answers:
            self._waiter = waiter = loop.create_future()
            await waiter
        answers, self._answers = self._answers, []
        return answers

    async def _handle(self, sent: NodeRequest) -> None:
        """Have an agent answer a request."""
        number, local_rank, request = sent
        if local_rank not in self._agents:
            self._agents[local_rank] = make_agent(self._backend)
        agent = self._agents[local_rank]
        if isinstance(request, Close):  # an agent belongs to one run; the actor may serve another
            del self._agents[local_rank]
            if not self._agents:
                self._step = 0
                self._dismiss_deputy()
        loop, late = asyncio.get_running_loop(), float("inf")
        if isinstance(request, GetNews):
            self._answering_ranks.add(local_rank)
            late = loop.time() + request.patience
        try:
            answer = Answer(number, await self._reply(agent, request))
        except Exception as error:
            answer = Answer(number, error=picklable(error))
        self._answers.append(answer)
        if isinstance(request, GetNews):
            self._answering_ranks.discard(local_rank)
        if loop.time() >= late and self._answering_ranks:
            self._ask_all()
            loop.call_later(HOLD_S, self._wake)
        else:
            self._wake()

    async def _reply(self, agent: RankAgent, request: Request[Any]) -> Any:
        """Return the reply to a request: that of the agent, unless the whole node is asked."""
        if isinstance(request, Deputize):
            return await self._deputize(request.duty)
        reply = await agent.handle(request)
        if isinstance(reply, RankNews):
            self._step = max(self._step, reply.beat[0])
        return reply

    async def _deputize(self, duty: Duty) -> None:
        """Start a deputy, then dismiss that of an earlier attempt, which knows other nodes."""
        deputy = await asyncio.to_thread(DeputyProcess.start, duty)
        self._dismiss_deputy()
        self._deputy = deputy
        deputy.note_question(self._step)
        if not self._agents:  # the run ended meanwhile
            self._dismiss_deputy()

    def _dismiss_deputy(self) -> None:
        if self._deputy is not None:
            self._deputy.dismiss()
            self._deputy = None

    def _ask_all(self) -> None:
        """Have all other ranks reply with their news too, because one rank's news is due.

        One reply costs the driver as much as many.
        """
        for local_rank in self._answering_ranks:
            self._agents[local_rank].tell_now()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class NodeActor(AgentHost):
    """One actor per rank, for Ray's accounting.

    Only the first of a node takes part in a launch: it hosts all agents. Starting a Ray worker
    takes half a second of CPU: sixteen ranks with a worker each would wait eight seconds. __init__
    has no arguments: Ray would read them before it, with the serializers that it skips.
    """

    backend = ""
    """The backend for which its agents are made."""

    def __init__(self) -> None:
        ray_private.skip_serializers()
        super().__init__(self.backend)

    async def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that Ray assigned to this actor.

        The actor itself never uses CUDA, so Ray's mask has no effect.
        """
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


class MpiNodeActor(NodeActor):
    """The NodeActor of a run under mpirun."""

    backend = "mpi"


def picklable(error: Exception) -> Exception:
    """Return this error, or its text as a LaunchError if it can't be pickled."""
    try:
        if sys.version_info >= (3, 11):
            error.add_note("".join(traceback.format_exception(error)))
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LaunchError(f"{type(error).__name__}: {error}")
    return error
