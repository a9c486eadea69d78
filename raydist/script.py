"""The words of a program that wants its rank on the command line: `--rank {rank}`, for each rank its own. (pure)"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from raydist.errors import ConfigError, suggest

WORDS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "node_rank": "GROUP_RANK",
    "init_method": "",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "backend": "",
}
"""What may stand between braces, and the variable that has it."""
BRACES = re.compile(r"(\{+)([A-Za-z_]\w*)(\}+)")


def check(args: Sequence[str], init_method: str) -> None:
    """Refuse a word that nobody knows, and one that this way to meet has no answer for."""
    for arg in args:
        for match in BRACES.finditer(arg):
            word = match[2]
            if min(len(match[1]), len(match[3])) > 1:
                continue
            if word not in WORDS:
                known = suggest(f"{{{word}}}", [f"{{{each}}}" for each in WORDS])
                raise ConfigError(f"args: {{{word}}} in {arg}: {known}; say {{{{{word}}}}} for the braces themselves")
            if word == "master_port" and init_method == "file":
                raise ConfigError("args: {master_port}: init_method=file opens none; say init_method=tcp")


def fill(args: Sequence[str], env: Mapping[str, str], init_method: str, backend: str) -> list[str]:
    """The arguments of one rank. `env`: its variables. Doubled braces become single ones; others are let be."""
    known = {word: env.get(name, "") for word, name in WORDS.items() if name}
    known |= {"init_method": meeting(env, init_method), "backend": backend}

    def put(match: re.Match[str]) -> str:
        left, word, right = match[1], match[2], match[3]
        if min(len(left), len(right)) > 1:
            return f"{left[1:]}{word}{right[1:]}"
        return f"{left[1:]}{known[word]}{right[1:]}"

    return [BRACES.sub(put, arg) for arg in args]


def keep_braces(arg: str) -> str:
    """An argument that is meant as it stands: `fill` gives it back."""
    return BRACES.sub(lambda match: f"{{{match[0]}}}", arg)


def meeting(env: Mapping[str, str], init_method: str) -> str:
    """What a program gives to init_process_group."""
    if init_method == "tcp":
        host = env["MASTER_ADDR"]
        return f"tcp://{f'[{host}]' if ':' in host else host}:{env['MASTER_PORT']}"
    return f"file://{env['RAYDIST_RENDEZVOUS_FILE']}" if init_method == "file" else "env://"


def seen_from(folder: str, script: str) -> str:
    """A script as seen from a folder, of which other nodes may have a copy elsewhere; `-m module`, a bare name."""
    inside = os.path.relpath(script, folder) if os.path.isabs(script) else ""
    if not inside or inside.startswith(".."):
        return script
    return inside if inside.endswith(".py") else os.path.join(".", inside)
