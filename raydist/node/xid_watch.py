"""Waits for the Xids of a rank's GPU, in a thread that NVML keeps asleep. (actor)"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping
from typing import Any

from raydist.node import nvml
from raydist.node.gpu_faults import own_gpu
from raydist.node.xids import FAULTS, QUIET, describe_xid

WAIT_MS = 1000
"""How long NVML waits for an event before the thread looks whether the rank has ended."""


class XidWatch:
    """The Xids of a rank's GPU while the rank ran.

    Without a driver, without the right to register for events, or with an NVML that has none, there
    are none: the thread then ends at once.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell`: gets a line for a person, once for each number."""
        self._tell = tell
        self._gpu = ""
        self._xids: list[int] = []
        self._closed = False

    def start(self, env: Mapping[str, str]) -> None:
        """Begin to wait. `env`: the variables of the rank."""
        self._gpu = own_gpu(env)
        if self._gpu:
            loop = asyncio.get_running_loop()
            # A daemon: NVML may wait for a broken GPU forever, and this process has to end.
            thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
            thread.name = "raydist-xids"
            thread.start()

    def close(self) -> None:
        """Note nothing more; the thread ends within WAIT_MS."""
        self._closed = True

    def lines(self, faults_only: bool = False) -> list[str]:
        """Return a line for each number so far. `faults_only`: of those of a GPU at fault."""
        return [
            describe_xid(number, self._gpu)
            for number in self._xids
            if number in FAULTS or not faults_only
        ]

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        library = nvml.open_nvml()
        if library is None:
            return
        events = nvml.record_xids(library, self._gpu)
        try:
            if events is not None:
                self._listen(loop, library, events)
        except RuntimeError:
            pass  # the agent's loop has closed meanwhile
        finally:
            if events is not None:
                library.nvmlEventSetFree(events)
            library.nvmlShutdown()

    def _listen(
        self, loop: asyncio.AbstractEventLoop, library: Any, events: ctypes.c_void_p
    ) -> None:
        """Note Xids until the rank has ended, or NVML can wait no longer: the GPU may be lost."""
        instance = nvml.read_instance(library, self._gpu)
        code = 0
        while code in (0, nvml.TIMEOUT) and not self._closed:
            event = nvml.Event()
            code = library.nvmlEventSetWait_v2(events, ctypes.byref(event), WAIT_MS)
            others = nvml.WHOLE not in (event.instance, instance) and event.instance != instance
            if code == 0 and not others:  # a MIG instance shares its GPU with those of other ranks
                loop.call_soon_threadsafe(self._note, int(event.data))

    def _note(self, number: int) -> None:
        if self._closed or number in self._xids:
            return
        self._xids.append(number)
        if number != QUIET:
            self._tell(describe_xid(number, self._gpu))
