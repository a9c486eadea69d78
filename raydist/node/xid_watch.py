"""Waits for the Xids of a rank's GPUs, in threads that NVML keeps asleep. (actor)"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydist.node import nvml
from raydist.node.gpu_faults import own_gpus
from raydist.node.xids import FAULTS, QUIET, describe_xid

WAIT_MS = 1000
"""How long NVML waits for an event before the thread looks whether the rank has ended."""


class XidWatch:
    """The Xids of a rank's GPUs while the rank ran.

    Without a driver, without the right to register for events, or with an NVML that has none, there
    are none: the threads then end at once.
    """

    def __init__(self, tell: Callable[[str], None], count: int = 1) -> None:
        """`tell`: gets a line for a person, once for each number of a GPU. `count`: of own_gpus."""
        self._tell = tell
        self._count = count
        self.gpus: Sequence[str] = ()
        """As of own_gpus, once the rank has begun."""
        self._xids: list[tuple[int, str]] = []
        """Each with its GPU."""
        self._closed = False

    def start(self, env: Mapping[str, str]) -> None:
        """Begin to wait. `env`: the variables of the rank."""
        self.gpus = own_gpus(env, self._count)
        for gpu in self.gpus:
            loop = asyncio.get_running_loop()
            # A daemon: NVML may wait for a broken GPU forever, and this process has to end.
            thread = threading.Thread(target=self._run, args=(loop, gpu), daemon=True)
            thread.name = "raydist-xids"
            thread.start()

    def close(self) -> None:
        """Note nothing more; the threads end within WAIT_MS."""
        self._closed = True

    def lines(self, faults_only: bool = False) -> list[str]:
        """Return a line for each number so far. `faults_only`: of those of a GPU at fault."""
        return [
            describe_xid(number, gpu)
            for number, gpu in self._xids
            if number in FAULTS or not faults_only
        ]

    def _run(self, loop: asyncio.AbstractEventLoop, gpu: str) -> None:
        library = nvml.open_nvml()
        if library is None:
            return
        events = nvml.record_xids(library, gpu)
        try:
            if events is not None:
                self._listen(loop, library, events, gpu)
        except RuntimeError:
            pass  # the agent's loop has closed meanwhile
        finally:
            if events is not None:
                library.nvmlEventSetFree(events)
            library.nvmlShutdown()

    def _listen(
        self, loop: asyncio.AbstractEventLoop, library: Any, events: ctypes.c_void_p, gpu: str
    ) -> None:
        """Note Xids until the rank has ended, or NVML can wait no longer: the GPU may be lost."""
        instance = nvml.read_instance(library, gpu)
        code = 0
        while code in (0, nvml.TIMEOUT) and not self._closed:
            event = nvml.Event()
            code = library.nvmlEventSetWait_v2(events, ctypes.byref(event), WAIT_MS)
            others = nvml.WHOLE not in (event.instance, instance) and event.instance != instance
            if code == 0 and not others:  # a MIG instance shares its GPU with those of other ranks
                loop.call_soon_threadsafe(self._note, int(event.data), gpu)

    def _note(self, number: int, gpu: str) -> None:
        if self._closed or (number, gpu) in self._xids:
            return
        self._xids.append((number, gpu))
        if number != QUIET:
            self._tell(describe_xid(number, gpu))
