"""The rendezvous TCPStore, on the training address, in a process that outlives rank 0. (actor)"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from raydist.messages.server import StoreAddress, StoreOpened
from raydist.messages.wire import encode

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def store_process(kind: str, address: str, reply_fd: int) -> NoReturn:
    """Open the store, write StoreOpened to `reply_fd`, and hold the store.

    Runs in a child of the fork server.
    """
    os.setsid()
    from raydist.node.rendezvous_http import open_http_store

    try:
        hold, store = (open_http_store if kind == "horovod" else hold_store)(address)
        reply = StoreOpened(**vars(store))
    except Exception as error:
        hold, reply = None, StoreOpened(error=f"{type(error).__name__}: {error}")
    os.write(reply_fd, encode(reply))
    os.close(reply_fd)
    if hold is not None:
        hold()
    os._exit(1)


def hold_store(address: str) -> tuple[Callable[[], None], StoreAddress]:
    """Open a store; return a function that serves it until the process ends, and its address."""
    store, port = open_store(address)

    def hold() -> None:
        while store:
            signal.pause()

    return hold, StoreAddress(port, "")


def open_store(address: str) -> tuple[TCPStore, int]:
    """Open a TCPStore on a port that the kernel chooses; return the store and its port.

    TCPStore would listen on all interfaces; with a bound socket it listens only there. The port is
    bound from the start, not chosen and bound later, so that no other job can take it in between.
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
