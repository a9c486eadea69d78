"""Which settings are secrets, by name or by value; settings without them, for files and checkpoints. (either side)"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SECRET = re.compile(
    r"TOKEN|SECRET|PASS|PWD|KEY|CREDENTIAL|AUTH|CONN(?:ECTION)?_?STR|WEBHOOK|COOKIE|(?:^|_)(?:DSN|SAS)(?:_|$)",
    re.IGNORECASE,
)
"""Names of secrets, as PGPASS, MYSQL_PWD, AZURE_STORAGE_CONNECTION_STRING."""
IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""A password in a URL, as in DATABASE_URL=postgres://me:word@host/db."""
MASK = "***"


def is_secret(name: str, value: object) -> bool:
    """Whether the value of an environment variable or of an argument must not be saved or printed."""
    return bool(SECRET.search(name) or IN_URL.search(str(value)))


def command_line_warning(overrides: Sequence[str]) -> str:
    """A warning if one of these overrides is a secret, otherwise empty: all users can read a command line."""
    typed = [text.lstrip("+").partition("=") for text in overrides]
    names = [name for name, _, value in typed if name.startswith("env.") and "${" not in value
             and _secret_argument(name.removeprefix("env."), value)]  # fmt: skip
    if not names:
        return ""
    return (
        f"{', '.join(names)}: every user of this machine can read a command line; write NAME=value into a file, and "
        "set env_file=FILE"
    )


def mask_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The settings of a Job with MASK in place of secrets; and those of them that are in arguments.

    If some variables are of env_file=, the values of all are secrets.
    """
    hidden = set[str]()

    def mask(value: Any, secret: bool) -> Any:
        if secret:
            hidden.add(value)
        return MASK if secret else value

    file = bool(settings["env_file"])
    env = {name: MASK if file or is_secret(name, value) else value for name, value in settings["env"].items()}
    own = {name: mask(value, _secret_argument(name, value)) for name, value in settings["job"]["args"].items()}
    arguments = [f"{flag}{mask(text, _secret_argument(flag or before, text))}"
                 for before, flag, text in _arguments(settings["args"])]  # fmt: skip
    return {**settings, "env": env, "job": {**settings["job"], "args": own}, "args": arguments}, hidden


def _arguments(args: Any) -> Iterator[tuple[str, str, str]]:
    """Each argument of a program: the flag before it, its own `--flag=`, and its value."""
    before = ""
    for arg in map(str, args):
        flag, equals, value = arg.partition("=")
        own = equals and flag.startswith("-")
        yield before, f"{flag}=" if own else "", value if own else arg
        before = arg if arg.startswith("-") and not own else ""


def _secret_argument(name: str, value: Any) -> bool:
    """As is_secret. A number is none: num_keys=4 is a size, --max-tokens 100 a limit."""
    try:
        float(value)
    except (TypeError, ValueError):
        return isinstance(value, str) and is_secret(name, value)
    return False
