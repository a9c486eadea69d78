"""Reach the driver of a submitted job through the port of Ray's dashboard alone. (driver)

The dashboard has nothing that passes messages on, but it submits jobs and shows their logs. A small
job on the driver's node (`relay_job.py`) gets the messages from the store into which the dashboard
puts uploaded packages, and prints what the driver replies; Ray's log API streams that. The small
job is deleted after the command. Ray's token is needed for each of these requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shlex
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raydist.cluster import ray_private
from raydist.messages.wire import Message, decode, encode
from raydist.shared.errors import LaunchError, last_line
from raydist.watch.operate.connection import FILE, DriverAddress
from raydist.watch.operate.relay_job import CLOSED, SIGN

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

EVERY_S = 0.1
"""Seconds between two looks of Ray at the log, or of this process at one that is not there yet."""
CHECK_S = 2.0
"""Seconds without a word of the small job after which its status is asked for."""
END_S = 10.0
"""Limit on the wait for the end of the small job, before it is deleted."""
NOTICE_S = 1.5
"""Seconds before the small job is deleted: Ray looks after a job every second, and would list one
that it has not seen end as failed."""
DELETES = 3
"""How often it is deleted, until it is gone: a busy Ray looks less often."""
SIGN_S = 20.0
"""Seconds between two signs of life of this process: the small job ends without them."""
ON_NODE = 0.001
"""The part of a node's own resource that keeps the small job on it."""


class JobLink(AbstractContextManager["JobLink"]):
    """A connection to the driver of a submitted job: the same methods as CommandLink."""

    def __init__(self, client: JobSubmissionClient, info: Any, address: DriverAddress) -> None:
        """Prepare it; the small job starts with the first message. `info`: Ray's JobDetails."""
        self._client = client
        self._info = info
        self._address = address
        self._name = f"raydist-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        """Of messages: a thread and a signal handler may send while another message is sent."""
        self._submitted = False
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._lines = self._printed()
        self._reading: asyncio.Future[bytes | None] | None = None
        """The next line, which `receive` did not wait for to the end."""

    def send(self, message: Message) -> None:
        """Send a message. OSError: the dashboard does not answer."""
        if not self._submitted:
            self._submitted = True
            self._submit()
            threading.Thread(target=self._show_life, name="raydist-life", daemon=True).start()
        package = f"{self._name}-{next(self._numbers)}.zip"
        ray_private.send_package(self._client, package, encode(message))

    def _submit(self) -> None:
        words = ["python", "-m", "raydist.watch.operate.relay_job"]
        node = urlsplit(self._info.driver_agent_http_address).hostname
        try:
            self._client.submit_job(
                entrypoint=shlex.join([*words, self._address.socket, self._name]),
                submission_id=self._name,
                runtime_env=self._info.runtime_env,  # so it is the same raydist
                entrypoint_resources={f"node:{node}": ON_NODE},
            )
        except RuntimeError as error:  # of Ray
            raise LaunchError(f"no job can be submitted there: {last_line(error)}") from error

    def _show_life(self) -> None:
        while not self._closed.wait(SIGN_S):
            with contextlib.suppress(Exception):  # of the connection: the next one may arrive
                ray_private.send_package(self._client, f"{self._name}-{SIGN}.zip", b"here")

    def receive(self, within_s: float | None = None) -> Message | None:
        """Return the next message; None after the last.

        TimeoutError: none came in `within_s` seconds (None: waits). LaunchError: the small job has
        failed.
        """
        while (line := self._next_line(within_s)) is not None:
            if line == CLOSED:
                return None
            with contextlib.suppress(ValueError):  # a line of Ray's own
                return decode(line)
        raise LaunchError(
            f"the job {self._name}, which passes messages on, has failed: "
            f"{self._client.get_job_info(self._name).message}"
        )

    def _next_line(self, within_s: float | None) -> bytes | None:
        """Return the next line of the small job's log; None after the last. TimeoutError."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(anext(self._lines, None), loop=self._loop)
        wait = asyncio.wait({self._reading}, timeout=within_s)
        done, _ = self._loop.run_until_complete(wait)
        if not done:
            raise TimeoutError
        (read,), self._reading = done, None
        return read.result()

    async def _printed(self) -> AsyncIterator[bytes]:
        """Yield the lines of the small job's log, each once, until the job is over."""
        seen, over = 0, False
        while not over:
            over = self._is_over()  # first: what is read afterwards is all
            number = 0
            with contextlib.suppress(
                OSError
            ):  # the log does not exist yet, or the connection broke
                async for line in self._read_lines(follow=not over):
                    number += 1
                    if number > seen:
                        seen = number
                        yield line
            await asyncio.sleep(EVERY_S)

    async def _read_lines(self, follow: bool) -> AsyncIterator[bytes]:
        """Yield the lines of the small job's log from its beginning. `follow`: until it is over."""
        node, log = self._info.driver_node_id, f"job-driver-{self._name}.log"
        blocks = ray_private.read_log(self._client, node, log, follow, EVERY_S)
        rest, reading = b"", asyncio.ensure_future(anext(blocks, b""))
        try:
            while True:
                done, _ = await asyncio.wait({reading}, timeout=CHECK_S)
                if done:
                    if not (block := reading.result()):
                        return
                    reading = asyncio.ensure_future(anext(blocks, b""))
                    *lines, rest = (rest + block).split(b"\n")
                    for line in lines:
                        yield line
                elif self._is_over():
                    return
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    def _is_over(self) -> bool:
        return bool(self._client.get_job_status(self._name).is_terminal())

    def close(self) -> None:
        """End the small job, and delete it."""
        self._closed.set()
        self._loop.run_until_complete(self._end_reading())
        self._loop.close()
        if not self._submitted:
            return
        # Of Ray: there is no such job any more. Or the connection to the dashboard is lost, which
        # the command says.
        with contextlib.suppress(RuntimeError, OSError):
            self._client.stop_job(self._name)
            until = time.monotonic() + END_S
            while not self._is_over() and time.monotonic() < until:
                time.sleep(EVERY_S)
            for _ in range(DELETES):
                time.sleep(NOTICE_S)
                self._client.delete_job(self._name)

    async def _end_reading(self) -> None:
        """End the task that Ctrl-C has left, if any, and close the log."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_job_address(client: JobSubmissionClient, job: str, info: Any) -> DriverAddress | None:
    """Return where the driver of a job's run listens; None if no ranks run."""

    async def read() -> bytes:
        name = f"raydist/{job}/{FILE}"
        return b"".join(
            [
                block
                async for block in ray_private.read_log(
                    client, info.driver_node_id, name, follow=False
                )
            ]
        )

    try:
        return DriverAddress(**json.loads(asyncio.run(read())))
    except (OSError, ValueError, TypeError):
        return None
