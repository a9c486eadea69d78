"""Errors of Hydra and OmegaConf -> one ConfigError with the setting and a suggestion. (driver)"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException, ValidationError
from yaml import Mark, MarkedYAMLError, YAMLError

from raydist.settings.overrides import (
    PARTS,
    SETTINGS,
    Override,
    dictionary_of,
    example,
    nearest_key,
    unknown,
    without_secrets,
)
from raydist.shared.errors import ConfigError, nearest

TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
IN_FILE = re.compile(r"In '([^']+/[^']+)'")
"""How Hydra's message begins if the error is in a file of conf/.

Hydra's exceptions have no field for that.
"""


@contextmanager
def config_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Convert errors of Hydra and OmegaConf in the block to ConfigError.

    The ConfigError names the override or the file that caused it.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise explain(error, overrides) from error


def explain(error: BaseException, overrides: Sequence[str] = ()) -> ConfigError:
    """Return the ConfigError for an error that composing `overrides` raised."""
    match error:
        case OverrideParseException():
            return _unreadable(Override.parse(error.override))
        case MissingConfigException():
            return _missing_choice(error, overrides)
        case MarkedYAMLError(problem_mark=Mark() as mark):
            return ConfigError(
                f"{mark.name}, line {mark.line + 1} is not YAML: {error.problem}", value=mark.name
            )
    file = IN_FILE.match(str(error))
    where = f"conf/{file[1]}.yaml: " if file else ""
    source: BaseException | None = error
    while source and not (isinstance(source, OmegaConfBaseException) and source.full_key):
        source = source.__cause__ or source.__context__
    if isinstance(source, OmegaConfBaseException):
        return _wrong_value(source, str(source.full_key), where, overrides)
    for override in map(Override.parse, overrides):
        if f"{override.key}={override.value}" in str(error):
            return override.wrong(_text(error))
    return ConfigError(
        f"{where or 'conf/: '}{_text(error.__context__ if file and error.__context__ else error)}"
    )


def _unreadable(override: Override) -> ConfigError:
    """Return the error for an override that is not in Hydra's grammar."""
    # raydist itself puts ++ before the entries of dictionaries.
    key = f"{'' if dictionary_of(override.key) else override.sign}{override.key}"
    quoted = f"\"{key}='{override.value or ''}'\""
    value, (quoted,) = without_secrets(key, override.value or "", quoted)
    return ConfigError.of(key, value, "a value with special characters must be quoted", quoted)


def _wrong_value(
    error: OmegaConfBaseException, key: str, where: str, overrides: Sequence[str]
) -> ConfigError:
    """Return the error for a setting that OmegaConf refused.

    The cause is its name, its type, or an interpolation in it.
    """
    known = key in SETTINGS or key in PARTS or dictionary_of(key) is not None
    if not known and not key.startswith("hydra"):
        return unknown(key, None, text=where.removesuffix(": ") or key)
    override = next(
        (parsed for text in overrides if (parsed := Override.parse(text)).key == key and not where),
        None,
    )
    value = override.value if override else error.value
    if value is None and error.child_node is not None:
        value = str(error.child_node._value())  # an interpolation
    shown = override.text if override else f"{where}{key}" + ("" if value is None else f"={value}")
    if isinstance(error, ValidationError) and key in SETTINGS:
        kind, _, optional = str(SETTINGS[key].type).partition(" | ")
        kind = TYPES.get(kind, "a dictionary" if kind.startswith("dict") else kind)
        return ConfigError.of(
            key, value, f"must be {kind}{' or null' if optional else ''}", example(key), text=shown
        )
    guess = None
    if isinstance(error, InterpolationKeyError):
        names = re.findall(r"\$\{([\w.]+)\}", value or "")
        close = next(
            (nearest_key(name, list(SETTINGS)) for name in names if name not in SETTINGS), None
        )
        guess = close and f"{key}=${{{close}}}"
    return ConfigError.of(key, value, _text(error), guess=guess, text=shown)


def _missing_choice(error: MissingConfigException, overrides: Sequence[str]) -> ConfigError:
    """Return the error for a choice that the group does not have.

    It names the nearest choice, and some of the existing ones.
    """
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group:
        return ConfigError.of(
            "--config-name", choice, f"there is no {choice}.yaml in conf/", "--config-name config"
        )
    file, parsed = IN_FILE.match(str(error)), map(Override.parse, overrides)
    in_command = file is None or any((each.key, each.value) == (group, choice) for each in parsed)
    cause = (
        "there is no such choice"
        if in_command or file is None
        else f"conf/{file[1]}.yaml names it, but it does not exist"
    )
    options = list(error.options or ())
    if group == "scale":
        digits = re.findall(r"\d+", choice)
        size = (
            "x".join(digits[:2] if len(digits) > 1 else ["1", *digits])
            if any(map(int, digits))
            else "local"
        )
        known = [*options, "NODESxRANKS, as in scale=2x8 or scale=2..8x8"]
        return ConfigError.of(
            group, choice, cause, guess=f"scale={nearest(choice, options) or size}", known=known
        )
    return ConfigError.unknown(group, choice, options, cause)


def refuse_sweeps(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override with several values, which only --multirun can run."""
    for parsed in OverridesParser.create().parse_overrides(list(overrides)):
        if parsed.is_sweep_override():
            override = Override.parse(parsed.input_line or "")
            quoted = f"\"{override.key}='{override.value}'\""
            raise override.wrong("it has several values", f"--multirun {override.text}", quoted)


def _text(error: BaseException) -> str:
    """Return the message without the lines about types that OmegaConf appends."""
    lines = [line.strip() for line in re.split(r"\n\s*full_key:", str(error))[0].splitlines()]
    return "; ".join(line for line in lines if line) or type(error).__name__
