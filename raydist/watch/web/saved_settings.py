"""The settings in a run folder, as text: read, and compared between runs. (driver)"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from raydist.settings.secrets import masked

CONFIG = ".hydra/config.yaml"
"""All settings of a run, without the values of secrets."""
OVERRIDES = ".hydra/overrides.yaml"
"""What was typed, as a list of `key=value`."""
ALWAYS_DIFFERENT = ("dir",)
"""Settings that differ between any two runs."""


class SavedSettings(NamedTuple):
    """The settings of a run; empty if its folder has none."""

    overrides: list[str]
    values: dict[str, str]
    """By the full name of a setting, its value as it stands in the file."""


def read_settings(folder: Path) -> SavedSettings:
    """Return the settings in a run folder, without the values of secrets.

    The files of a run have none, but another program may have written these.
    """
    overrides, config = _read_yaml(folder / OVERRIDES), _read_yaml(folder / CONFIG)
    return SavedSettings(
        [masked_override(str(each)) for each in overrides] if isinstance(overrides, list) else [],
        dict(setting_texts(masked(config))) if isinstance(config, dict) else {},
    )


def masked_override(text: str) -> str:
    """Return `key=value` with a mask in place of the secrets in the value."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{masked(value, key.lstrip('+~'))}"


def _read_yaml(path: Path) -> Any:
    """Return what a file holds, with all scalars as text; None if it cannot be read."""
    import yaml

    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # the one in C is ten times as fast
    try:
        return yaml.load(path.read_text(encoding="utf-8"), loader)  # it makes only text
    except (OSError, ValueError, yaml.YAMLError):
        return None


def setting_texts(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (full name, value) of each setting in nested dicts; a list is one value."""
    if isinstance(value, dict) and (value or not name):
        for key, each in value.items():
            yield from setting_texts(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, as_text(value)


def as_text(value: object) -> str:
    """Return a list or dict as a person types it, and a scalar as it is."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {as_text(each)}' for key, each in value.items())}}}"
    return str(value)


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of settings whose values differ, in the order of their first run.

    A run without any settings, of a folder without the file, does not count.
    """
    known = [settings for settings in runs if settings]
    names = dict.fromkeys(
        name for settings in known for name in settings if name not in ALWAYS_DIFFERENT
    )
    return [name for name in names if len({settings.get(name) for settings in known}) > 1]
