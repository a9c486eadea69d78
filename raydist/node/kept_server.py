"""Fork servers kept on their node for later runs of the same user and Python. (either side)

A later run uses a server only if the environment is the same too (`fingerprint`). Each server has a
folder in `servers_folder()`, with its socket `fork`, which only its user can reach. A process that
wants a server claims it: the server then serves this process alone, until the process lets go or
dies. The server ends after some time without a claim, when the Ray ends under which it was started
or had its last run, and when a file that it has imported has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.cluster import ray_private
from raydist.messages.agent import Open
from raydist.messages.server import (
    BeginRun,
    Busy,
    Claim,
    Claimed,
    ImportModules,
    KeepStates,
    Pong,
    ServerMessage,
)
from raydist.messages.wire import PACKET, Message, decode, encode
from raydist.node.fork_launcher import ForkServer, heritage, node_folder, own_search_path
from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.shared.own_path import boot_id, own_folder
from raydist.shared.version import __version__

CLAIM_S = 1.0
"""Limit on the wait for a server's answer: a server that imports modules belongs to another run."""
CHECK_S = 10.0
"""Limit on the wait for a server that checks whether the files of its modules have changed:
thousands of files, at a millisecond each on a network file system. Importing them takes longer."""
MAX_SERVERS = 4
"""Maximum servers of a user on a node: each takes a few hundred MB."""
VOLATILE = (
    "RAY_",
    "RAYDIST_",
    "SSH_",
    "XDG_RUNTIME_DIR",
    "XDG_SEAT",
    "XDG_SESSION_",
    "XDG_VTNR",
    "TERM",
    "TMUX",
    "LS_COLORS",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "COLUMNS",
    "LINES",
    "WINDOWID",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "PYTHONPATH",
    "HYDRA_",
)
"""Prefixes of variables that differ from command to command and that no module reads at import."""


@dataclass(frozen=True)
class KeptServer:
    """What a person sees of a server."""

    folder: str
    host: str
    pid: int
    born: float
    """Seconds since the epoch."""
    memory: int
    """Resident bytes."""
    free: bool
    """Whether no run uses it now."""


def choose(request: Open, folder: Path) -> tuple[ForkServer | None, Path, tuple[str, ...]]:
    """Return the run's fork server, its folder, and the modules that it has to import.

    The server is None if the agents do not own it. The choice is the driver's server, if a rank
    would inherit the same from it; else that which holds the run's states; else another one that
    stays on the node; else a new one in `folder`.
    """
    warm_server, own = request.warm_server, None
    if (
        warm_server is not None
        and warm_server.heritage == heritage()
        and os.path.exists(warm_server.folder)  # it may have ended since
    ):
        place = Path(warm_server.folder)
    elif request.start == "fork" and (
        own := (claim(Path(request.held.folder)) if request.held else None)
        or obtain(request.threads, request.env, request.keep_s)
    ):
        place = own.folder
    else:
        return (
            ForkServer.launch(folder, request.start, request.threads, env=request.env),
            folder,
            request.modules,
        )
    return own, place, request.installed


def obtain(
    threads: int, env: Mapping[str, str], keep_s: float, modules: Sequence[str] = ()
) -> ForkServer | None:
    """Return a kept server, or a new one to be kept for `keep_s` seconds.

    `threads`, `env`, `modules`: as for ForkServer.launch; the modules are for a new server. Returns
    None if no server may be kept on this node.
    """
    keep_s = min(keep_s, most_s())
    if not keep_s or (where := servers_folder()) is None:
        return None
    name = fingerprint(threads, env)
    for folder in sorted(where.glob(f"{name}-*")):
        if server := claim(folder):
            return server
    end_surplus()
    folder, guard = where / f"{name}-{uuid.uuid4().hex[:6]}", str(ray_private.raylet_pid() or 1)
    for _ in range(2):
        # The last server may just have removed the folder that contains all of them.
        with contextlib.suppress(FileNotFoundError):
            where.mkdir(mode=0o700, exist_ok=True)
            return ForkServer.launch(
                folder, "fork", threads, keep_s, modules=modules, env=env, keep=guard
            )
    return None


def end_surplus() -> None:
    """End the oldest free servers, to make room for one more."""
    known = kept_servers()  # this removes the folders of dead servers
    surplus = len(known) + 1 - MAX_SERVERS
    for oldest in [each for each in known if each.free][: max(0, surplus)]:
        end(oldest.folder)


def most_s() -> float:
    """Return the maximum seconds that servers may stay on this node.

    Infinite if the node's admin has set no limit.
    """
    text = os.environ.get(env_names.KEEP_WARM, "inf")
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise ConfigError.of(
        env_names.KEEP_WARM, text, "must be a number of seconds", f"{env_names.KEEP_WARM}=300"
    )


def servers_folder(make: bool = True) -> Path | None:
    """Return the folder of this user's servers on this node.

    None if it does not exist, or is not this user's own.
    """
    path = servers_path()
    with contextlib.suppress(OSError):
        if own_folder(path, make):
            return path
    return None


def servers_path() -> Path:
    """Return the path of the folder of this user's servers on this node, which may not exist yet.

    Its name contains the boot id, because TMPDIR may be on a file system shared with other
    machines.
    """
    name = f"raydist-{os.getuid()}-{boot_id()[:8]}-warm"
    return node_folder(name, room=len("/123456789012-123456/fork.new"))


def claim(folder: Path) -> ForkServer | None:
    """Claim the server of a folder.

    Returns None if it is gone, serves another process, or has imported files that have changed.
    """
    ours, its = socket.socketpair()
    with its:
        if ask(folder, Claim(), descriptors=[its.fileno()]) == Claimed(True):
            return ForkServer(folder, ours)
    ours.close()
    return None


def ask(folder: Path, *messages: ServerMessage, descriptors: Sequence[int] = ()) -> Message | None:
    """Send messages to the server of a folder, and return its reply to the last one, or None.

    The descriptors go with the last message. The folder of a server that died is removed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(CLAIM_S)
        try:
            sock.connect(str(folder / "fork"))
            for message in messages[:-1]:
                sock.send(encode(message))
            socket.send_fds(sock, [encode(messages[-1])], list(descriptors))
            # Busy and Pong are as a rule for another process: no reply.
            while isinstance(reply := decode(sock.recv(PACKET)), Busy | Pong):
                sock.settimeout(CHECK_S)
            return reply
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            pass
    return None


def keep_states(folder: str, key: str) -> None:
    """Have the server of a folder hold these states until this process ends, or it drops them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
        sock.connect(str(Path(folder) / "fork"))
        sock.send(encode(KeepStates(key)))
        sock.recv(1)


def tell(folder: Path, message: ServerMessage) -> None:
    """Send a message to the server of a folder, if it is there, without waiting for a reply."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect(str(folder / "fork"))
        sock.send(encode(message))


def fingerprint(threads: int, env: Mapping[str, str]) -> str:
    """Return a name that servers share if they may start each other's ranks.

    It is a hash of all that a rank inherits from its server.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(VOLATILE)}
    with contextlib.suppress(OSError):
        own["oom_score_adj"] = Path("/proc/self/oom_score_adj").read_text()
    parts = [
        heritage(),
        os.getpriority(os.PRIO_PROCESS, 0),
        __version__,
        threads,
        sorted({**own, **env}.items()),
        own_search_path(),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()


def kept_servers() -> list[KeptServer]:
    """Return the servers of this user on this node, oldest first."""
    where, found = servers_folder(make=False), []
    for note in where.glob("*/server.json") if where else ():
        with contextlib.suppress(OSError, ValueError, KeyError):
            plain = json.loads(note.read_text())
            free = ask(note.parent, Claim()) == Claimed(True)
            if not note.exists():  # it has died: nothing listens there
                continue
            memory = int(Path(f"/proc/{plain['pid']}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
            found.append(
                KeptServer(
                    str(note.parent),
                    socket.gethostname(),
                    plain["pid"],
                    plain["born"],
                    memory,
                    free,
                )
            )
    return sorted(found, key=lambda server: server.born)


def end(folder: str) -> bool:
    """End the server of a folder; return False if it serves a run, or is gone."""
    if (server := claim(Path(folder))) is None:
        return False
    # Its reply to the second message shows that it has read both.
    ask(server.folder, BeginRun(folder, 0), ImportModules(()))
    server.end()
    return True
