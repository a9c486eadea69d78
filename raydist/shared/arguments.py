"""Replace placeholders in a program's arguments: `--rank {rank}` gets each rank's value. (pure)"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from raydist.shared import env_names
from raydist.shared.errors import ConfigError

PLACEHOLDERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "node_rank": "GROUP_RANK",
    "init_method": "",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "backend": "",
}
"""The names that may stand in braces, each with the environment variable that holds its value."""
BRACES = re.compile(r"(\{+)([A-Za-z_]\w*)(\}+)")


def check_arguments(args: Sequence[str], init_method: str, backend: str) -> None:
    """Raise ConfigError for a placeholder that is unknown, or has no value.

    There is no port with some values of `init_method` and `backend`.
    """
    for arg in args:
        for match in BRACES.finditer(arg):
            name = match[2]
            if min(len(match[1]), len(match[3])) > 1:
                continue
            if name not in PLACEHOLDERS:
                known = [f"{{{each}}}" for each in PLACEHOLDERS]
                cause = f"unknown placeholder ({{{{{name}}}}} is that text in braces)"
                raise ConfigError.unknown("args", f"{{{name}}}", known, cause)
            if name == "master_port" and init_method == "file":
                cause = "with init_method=file there is no port"
                raise ConfigError.of("args", "{master_port}", cause, "init_method=tcp")
            if name == "master_port" and backend == "horovod":
                cause = "with backend=horovod raydist opens no port; type a number instead"
                raise ConfigError.of("args", "{master_port}", cause)


def fill(args: Sequence[str], env: Mapping[str, str], init_method: str, backend: str) -> list[str]:
    """Return the arguments of one rank, with the placeholders replaced.

    `env` has the rank's variables. Doubled braces become single ones, other braces stay.
    """
    values = {name: env.get(variable, "") for name, variable in PLACEHOLDERS.items() if variable}
    values |= {"init_method": meeting_url(env, init_method), "backend": backend}

    def put(match: re.Match[str]) -> str:
        left = match[1]
        name = match[2]
        right = match[3]
        if min(len(left), len(right)) > 1:
            return f"{left[1:]}{name}{right[1:]}"
        return f"{left[1:]}{values[name]}{right[1:]}"

    return [BRACES.sub(put, arg) for arg in args]


def keep_braces(arg: str) -> str:
    """Double the braces of an argument, so that `fill` returns it unchanged."""
    return BRACES.sub(lambda match: f"{{{match[0]}}}", arg)


def meeting_url(env: Mapping[str, str], init_method: str) -> str:
    """Return the `init_method` that a program passes to torch.distributed.init_process_group."""
    if init_method == "tcp":
        host = env["MASTER_ADDR"]
        return f"tcp://{f'[{host}]' if ':' in host else host}:{env['MASTER_PORT']}"
    return f"file://{env[env_names.RENDEZVOUS_FILE]}" if init_method == "file" else "env://"


def seen_from(folder: str, script: str) -> str:
    """Return the path of a script relative to the folder that holds it.

    Other nodes may have that folder at another path. A script outside the folder, `-m module` and a
    bare name stay as they are.
    """
    inside = os.path.relpath(script, folder) if os.path.isabs(script) else ""
    if not inside or inside.startswith(".."):
        return script
    return inside if inside.endswith(".py") else os.path.join(".", inside)
