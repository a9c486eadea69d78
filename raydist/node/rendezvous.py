"""The rendezvous TCPStore, served on the training address by a process that outlives rank 0. (actor)"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from raydist.worker.protocol import StoreAddress

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def hold_store(address: str) -> tuple[Callable[[], None], StoreAddress]:
    """Open a store; a function that serves it until the process ends, and its address."""
    store, port = open_store(address)

    def hold() -> None:
        while store:
            signal.pause()

    return hold, StoreAddress(port, "")


def open_store(address: str) -> tuple[TCPStore, int]:
    """Open a TCPStore on a port that the kernel chooses; the store and its port.

    TCPStore would listen on all interfaces; with a bound socket it listens only there. The port is bound from the
    start, not chosen and bound later, so that no other job can take it in between.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The backlog holds a thousand ranks that connect at the same time.
    listener = socket.create_server((address, 0), family=family, backlog=4096)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=60),
    )
    return store, port
