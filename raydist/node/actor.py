"""The Ray actor of one rank: it holds the rank's resources; the first on a node hosts all agents there. (actor)"""

from __future__ import annotations

from raydist.node.agent import RankAgent
from raydist.node.mpi_agent import MpiRankAgent
from raydist.worker.protocol import AnyReply, Close, Request


def make_agent(backend: str) -> RankAgent:
    """A new agent, of the class that the backend needs."""
    return MpiRankAgent() if backend == "mpi" else RankAgent()


class NodeActor:
    """One actor per rank, for Ray's accounting. Only the first of a node takes part in a launch: it hosts all agents.

    Starting a Ray worker takes half a second of CPU: sixteen ranks with a worker each would wait eight seconds.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._agents: dict[int, RankAgent] = {}

    async def handle(self, local_rank: int, request: Request[AnyReply]) -> AnyReply:
        """Pass a request to the agent of a rank of this node; its reply."""
        if local_rank not in self._agents:
            self._agents[local_rank] = make_agent(self._backend)
        agent = self._agents[local_rank]
        if isinstance(request, Close):  # an agent is of one run; the actor may get another run
            del self._agents[local_rank]
        reply: AnyReply = await agent.handle(request)
        return reply

    async def gpus(self) -> tuple[str, ...]:
        """The GPUs that Ray assigned to this actor. The actor itself never uses CUDA, so Ray's mask has no effect."""
        import ray

        return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
