"""Fork servers that stay on their node for the next run of the same user, environment and Python.
(either side)

Each has a folder in `servers_folder()`, with its socket `fork`, which only its user can reach. A
process that wants one claims it: the server then serves this process alone, until the process lets
go or dies. It ends after some time without a claim, when the Ray ends that it was started under or
had its last run on, and when a file that it has imported has changed.
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

from raydist.messages.agent import Open
from raydist.messages.server import (
    BeginRun,
    Busy,
    Claim,
    Claimed,
    ImportModules,
    Pong,
    ServerMessage,
)
from raydist.messages.wire import PACKET, Message, decode, encode
from raydist.node.fork_launcher import ForkServer, boot_id, heritage, node_folder, own_search_path
from raydist.shared import env_names
from raydist.shared.errors import ConfigError
from raydist.shared.own_path import own_folder
from raydist.shared.version import __version__

CLAIM_S = 1.0
"""Longest wait for a server's answer: one that imports modules is another run's."""
CHECK_S = 10.0
"""Longest wait for the answer of a server that looks whether the files of its modules have changed:
thousands, at a millisecond each on a network file system. To import them takes longer."""
MOST = 4
"""Servers that a user has on a node: each has some hundred MB."""
VOLATILE = (
    "RAY_",
    "RAYDIST_",
    "SSH_",
    "XDG_",
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
"""The beginnings of variables that differ from command to command, and that no module reads at
import."""


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
    """No run uses it now."""


def choose(request: Open, folder: Path) -> tuple[ForkServer | None, Path, tuple[str, ...]]:
    """The fork server of a run's agents: the server if it is their own, its folder, and what it has
    to import.

    The driver's, if a rank would inherit the same from it; else one that stays on the node; else a
    new one in `folder`.
    """
    warm_server, own = request.warm_server, None
    if warm_server is not None and warm_server.heritage == heritage():
        place = Path(warm_server.folder)
    elif request.start == "fork" and (own := obtain(request.threads, request.env, request.keep_s)):
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
    """A server that was kept, or a new one that will be for `keep_s` seconds; None if servers are
    not kept here.

    `threads`, `env`, `modules`: as for ForkServer.launch; the modules are for a new one.
    """
    keep_s = min(keep_s, most_s())
    if not keep_s or (where := servers_folder()) is None:
        return None
    name = fingerprint(threads, env)
    for folder in sorted(where.glob(f"{name}-*")):
        if server := claim(folder):
            return server
    end_surplus()
    folder, guard = where / f"{name}-{uuid.uuid4().hex[:6]}", os.environ.get("RAY_RAYLET_PID", "1")
    for _ in range(2):
        with contextlib.suppress(
            FileNotFoundError
        ):  # the last server has just removed the folder that all are in
            where.mkdir(mode=0o700, exist_ok=True)
            return ForkServer.launch(
                folder, "fork", threads, keep_s, modules=modules, env=env, keep=guard
            )
    return None


def end_surplus() -> None:
    """End the oldest servers that are free, so that there is room for one more."""
    known = kept_servers()  # this removes the folders of those that have died
    surplus = len(known) + 1 - MOST
    for oldest in [each for each in known if each.free][: max(0, surplus)]:
        end(oldest.folder)


def most_s() -> float:
    """The most seconds that servers may stay on this node; infinite if its admin has not set
    any."""
    text = os.environ.get(env_names.KEEP_WARM, "inf")
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:
            return seconds
    raise ConfigError.of(
        env_names.KEEP_WARM, text, "must be a number of seconds", f"{env_names.KEEP_WARM}=300"
    )


def servers_folder(make: bool = True) -> Path | None:
    """The folder of this user's servers on this node; None if it is not there, or not this user's
    own."""
    path = servers_path()
    with contextlib.suppress(OSError):
        if own_folder(path, make):
            return path
    return None


def servers_path() -> Path:
    """Where the folder of this user's servers on this node is, or would be.

    Its name has the id of the boot: TMPDIR may be on a file system that other machines have, too.
    """
    name = f"raydist-{os.getuid()}-{boot_id()[:8]}-warm"
    return node_folder(name, room=len("/123456789012-123456/fork"))


def claim(folder: Path) -> ForkServer | None:
    """Claim the server of a folder; None if it is gone, serves another process, or has imported
    files that changed."""
    ours, its = socket.socketpair()
    with its:
        if ask(folder, Claim(), descriptors=[its.fileno()]) == Claimed(True):
            return ForkServer(folder, ours)
    ours.close()
    return None


def ask(folder: Path, *messages: ServerMessage, descriptors: Sequence[int] = ()) -> Message | None:
    """Send messages to the server of a folder, descriptors with the last; its reply to that, or
    None.

    The folder of a server that died is removed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(CLAIM_S)
        try:
            sock.connect(str(folder / "fork"))
            for message in messages[:-1]:
                sock.send(encode(message))
            socket.send_fds(sock, [encode(messages[-1])], list(descriptors))
            while isinstance(
                reply := decode(sock.recv(PACKET)), Busy | Pong
            ):  # for another one, as a rule: no reply
                sock.settimeout(CHECK_S)
            return reply
        except ConnectionRefusedError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            pass
    return None


def tell(folder: Path, message: ServerMessage) -> None:
    """Send a message to the server of a folder, if it is there; nobody waits for its reply."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.connect(str(folder / "fork"))
        sock.send(encode(message))


def fingerprint(threads: int, env: Mapping[str, str]) -> str:
    """A name for servers that may start each other's ranks: a hash of all that a rank inherits from
    its server."""
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
    """The servers of this user on this node, oldest first."""
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
    """End the server of a folder; False if it serves a run, or is gone."""
    if (server := claim(Path(folder))) is None:
        return False
    ask(
        server.folder, BeginRun(folder, 0), ImportModules(())
    )  # its reply to the second: it has read both
    server.end()
    return True
