"""The process that serves the page of a run; its standard input ends with the driver. (driver)"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from raydist.watch.web.server import POLL_S, PageServer, serve_page
from raydist.watch.web.sweep import is_sweep


def main(folder: Path, descriptor: int) -> int:
    """Serve until the driver has ended, and then until viewers have seen the end of the run."""
    root, first = (folder, "") if is_sweep(folder) else (folder.parent, folder.name)
    server = PageServer(root, first, sys.stdin.readline().strip())

    async def until() -> None:
        await asyncio.to_thread(sys.stdin.read)
        await asyncio.sleep(1.2 * POLL_S)

    asyncio.run(serve_page(server, socket.socket(fileno=descriptor), until()))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
