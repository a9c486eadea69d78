"""Checks before Ray and ranks start that `model=` can be divided as `parallel=` says. (driver)"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from typing import IO

from raydist.launch import warm_server
from raydist.messages.server import ImportModules, LookAtModel
from raydist.messages.wire import PACKET, encode
from raydist.settings.config import Job
from raydist.settings.mesh import MeshShape, divides, mesh_shape
from raydist.shared.errors import ConfigError

AT_ONCE_S = 0.5
"""Limit on the wait before anything is started. A warm server answers within this time."""
LATER_S = 30.0
"""Limit on the wait for a server that still imports torch, which the ranks will need too."""
MEMORY = "raydist.training.memory"
"""The module that examines the model."""


class ModelCheck:
    """A request to the fork server of this machine to examine the model.

    A model that the job creates itself is examined by the ranks.
    """

    def __init__(self, job: Job) -> None:
        """Send the request, and wait briefly for the answer.

        Raises ConfigError if the answer comes at once and the model cannot be divided.
        """
        self._answer: IO[bytes] | None = None
        if not divides(job.parallel) or "_target_" not in job.model or ranks_by_settings(job) == 1:
            return
        if (server := warm_server.prepare(job)) is None:
            return
        shape = shape_by_settings(job)
        path = tuple(map(os.path.abspath, sys.path))
        request = LookAtModel(job.model, job.parallel.blocks, shape.pp, shape.tp, path)
        answer, its_end = os.pipe()
        self._answer = os.fdopen(answer, "rb", buffering=0)
        self._text = b""
        # The server ends its child when this is closed.
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):  # without an answer the ranks find it
            self._server.connect(f"{server.folder}/fork")
            self._server.send(encode(ImportModules((MEMORY,))))
            socket.send_fds(self._server, [encode(request)], [its_end])
        os.close(its_end)
        self._look(AT_ONCE_S)

    def refuse(self, wait_s: float = LATER_S) -> None:
        """Wait for the answer, at most `wait_s`.

        Raises ConfigError if the model cannot be divided.
        """
        self._look(wait_s)
        self._close()

    def _look(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while (
            self._answer
            and select.select([self._answer], [], [], max(0, until - time.monotonic()))[0]
        ):
            if part := self._answer.read(PACKET):
                self._text += part
                continue
            self._close()
            if self._text:
                raise ConfigError(**json.loads(self._text))

    def _close(self) -> None:
        if self._answer:
            self._answer.close()
            self._server.close()
            self._answer = None


def ranks_by_settings(job: Job) -> int | None:
    """Return the number of ranks of a job, if the settings alone specify it."""
    scale = job.scale
    return None if scale.nodes is None or scale.per_node is None else scale.nodes * scale.per_node


def shape_by_settings(job: Job) -> MeshShape:
    """Return how its model is divided, as far as the settings alone specify it."""
    if (ranks := ranks_by_settings(job)) is None or job.scale.per_node is None:
        return MeshShape(pp=job.parallel.pp or 1, tp=job.parallel.tp or 1)
    return mesh_shape(job.parallel, ranks, job.scale.per_node)
