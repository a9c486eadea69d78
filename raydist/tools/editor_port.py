"""Where an editor on this machine connects to debug a rank: on 127.0.0.1, once. (driver)"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path

from raydist.messages.operate import DebuggerState, TypedLine
from raydist.shared.errors import ConfigError
from raydist.tools.running import Link, receive

HERE = "127.0.0.1"
PORT = 5678
"""What VS Code suggests for a new configuration."""
ACCEPT_S = 0.2
"""Seconds that a look for the editor takes, between two at the run."""
TCP_TABLE = Path("/proc/net/tcp")
ESTABLISHED = "01"
"""Its state of a connection with two ends (include/net/tcp_states.h of Linux)."""
NOBODY = -1
LAUNCH = {
    "name": "raydist",
    "type": "debugpy",
    "request": "attach",
    "connect": {"host": HERE, "port": PORT},
    "pathMappings": [{"localRoot": "${workspaceFolder}", "remoteRoot": "."}],
}
"""A configuration of launch.json. `.` is the folder of the rank."""


def listen_for_editor(port: int) -> socket.socket:
    """Return a socket that listens for the editor. ConfigError: another program has the port."""
    try:
        return socket.create_server((HERE, port))
    except OSError as error:
        why = f"another program listens there ({error.strerror})"
        raise ConfigError.of("--port", str(port), why, f"--port {port + 1}") from error


def launch_json(rank: int, port: int) -> str:
    """Return the configuration with which VS Code debugs the rank."""
    own = {"name": f"raydist: rank {rank}", "connect": {"host": HERE, "port": port}}
    return json.dumps({**LAUNCH, **own}, indent=4)


def wait_for_editor(listener: socket.socket, link: Link) -> socket.socket:
    """Return the connection of the editor. ConnectionError: the run has ended meanwhile.

    Other users of this machine are refused: whoever debugs a rank can do anything in it.
    """
    listener.settimeout(ACCEPT_S)
    while True:
        with contextlib.suppress(TimeoutError):
            if link.receive(0.0) is None:
                raise ConnectionResetError
        with contextlib.suppress(TimeoutError):
            connected, peer = listener.accept()
            connected.settimeout(None)
            if user_of(peer) in (None, 0, os.getuid()):
                return connected
            connected.close()


def user_of(peer: tuple[str, int]) -> int | None:
    """Return the user of the socket with this address on this machine; None: Linux does not say.

    NOBODY if its other end is closed: Linux then names root, or has no row any more.

    Source: proc_net_tcp of the kernel's documentation.
    """
    host = int.from_bytes(socket.inet_aton(peer[0]), "little")
    with contextlib.suppress(OSError, ValueError):
        for line in TCP_TABLE.read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[1], fields[3]) == (f"{host:08X}:{peer[1]:04X}", ESTABLISHED):
                return int(fields[7])
        return NOBODY
    return None


def pass_both_ways(editor: socket.socket, link: Link) -> None:
    """Pass on what the editor and debugpy send, until the session is over.

    Without an editor it soon is.
    """
    thread = threading.Thread(target=pass_requests, args=(editor, link), daemon=True)
    thread.start()
    while True:
        state = receive(link, DebuggerState)
        with contextlib.suppress(OSError):  # the editor has gone, which the thread says
            editor.sendall(state.text.encode("utf-8", "surrogateescape"))
        if state.over:
            return


def pass_requests(editor: socket.socket, link: Link) -> None:
    """Pass on what the editor sends, and that it has gone."""
    with contextlib.suppress(Exception):  # the run has ended: the main thread sees it, too
        with contextlib.suppress(OSError):
            while data := editor.recv(1 << 14):
                link.send(TypedLine(data.decode("utf-8", "surrogateescape")))
        link.send(TypedLine(""))
