"""`env_file=`: environment variables from a file in the format of docker's --env-file. (driver)"""

from __future__ import annotations

from collections.abc import Mapping

from raydist.settings.lookup import missing_path
from raydist.shared.errors import ConfigError
from raydist.shared.home import expand_home


def read_env_file(file: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a file; none if `file` is empty.

    Values are literal: no quotes, no trailing comments. A line with only a NAME takes the variable
    from `environ`, if it is set there.
    """
    if not file:
        return {}
    path = expand_home("env_file", file)
    if not path.exists():
        raise missing_path("env_file", file, path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of(
            "env_file", file, f"it cannot be read ({error})", "env_file=FILE"
        ) from error
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.lstrip()) or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not name or any(space in name for space in " \t"):
            raise ConfigError(
                f"env_file={file}, line {number}: {name!r} is not a variable's name; write "
                "NAME=value",
                "env_file",
                file,
                "NAME=value",
            )
        if equals:
            variables[name] = value
        elif name in environ:
            variables[name] = environ[name]
    return variables
