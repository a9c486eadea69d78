"""Where ranks meet: the store, held open on the training address by a process that outlives rank 0. (actor)"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def hold_store(address: str) -> tuple[Callable[[], None], dict[str, Any]]:
    """A store that lives as long as the call of the first that this gives back; the second says where it is."""
    store, port = open_store(address)

    def hold() -> None:
        while store:
            signal.pause()

    return hold, {"store": port, "secret": ""}


def open_store(address: str) -> tuple[TCPStore, int]:
    """A TCPStore on a port that the kernel chose, and that port.

    TCPStore itself would listen on all interfaces; given a socket that is bound already, it listens only there. The
    port is held from the start, never guessed and bound later, so no other job can take it in between.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # The backlog is for a thousand ranks that connect in the same moment.
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
