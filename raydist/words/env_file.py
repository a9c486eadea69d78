"""`env_file=`: variables from a file, in the words of docker's --env-file. (driver)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raydist.errors import ConfigError, nearest


def read(file: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file; none without one. Values stand as they are: no quotes, no comment after them.

    A NAME alone is passed on from `environ`, where it is set there.
    """
    if not file:
        return {}
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, there) if not path.exists() else None
        offer = f"; did you mean env_file={path.with_name(close)}?" if close else ""
        raise ConfigError(f"env_file={file}: {getattr(error, 'strerror', None) or error}{offer}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.lstrip()) or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not name or any(space in name for space in " \t"):
            raise ConfigError(f"env_file={file}, line {number}: {name!r} is no name of a variable; say NAME=value")
        if equals:
            found[name] = value
        elif name in environ:
            found[name] = environ[name]
    return found
