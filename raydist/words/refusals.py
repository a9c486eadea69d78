"""What Hydra and OmegaConf refuse, said as one ConfigError: the wrong word, and the one to type instead. (driver)"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from raydist.errors import ConfigError, nearest, suggest
from raydist.words.translate import PARTS, SETTINGS, nearest_key, unknown

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
FEW = 25
SWEEP = re.compile(r"Ambiguous value for argument '(.*?)'\n|Sweep parameters '(.*)' requires", re.DOTALL)
IN_FILE = re.compile(
    r"In '([^']+)': (?:\w+ raised while composing config:\n)?(.*?)(?:\n\s*full_key: (\S+)|$)", re.DOTALL
)


@contextmanager
def in_plain_words(words: Sequence[str]) -> Iterator[None]:
    """Around composing: what is raised comes out as a ConfigError that names one of the words, or the file."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(explain(error, words)) from error


def explain(error: BaseException, words: Sequence[str]) -> str:
    """The refusal in words for a person."""
    match error:
        case MissingConfigException():
            return missing_choice(error)
        case UnicodeDecodeError():
            return f"a file in conf/ is not text in UTF-8: {error}"
        case OverrideParseException():
            return f"{error.override}: {_grammar(error)}"
        case YAMLError():
            return broken_yaml(error)
        case InterpolationResolutionError():
            return f"{error.full_key}: {_first(error)}{_meant(error)}"
        case ValidationError() if error.full_key:
            return wrong_type(error, words)
    if (sweep := SWEEP.search(str(error))) is not None:
        word = sweep[1] or sweep[2]
        return f'{word}: several values; add --multirun to run each, or quote it to mean one: "{_quoted(word)}"'
    if isinstance(error.__cause__, OmegaConfBaseException) and error.__cause__.full_key:
        return explain_cause(error.__cause__, words)
    if (in_file := IN_FILE.match(str(error))) is not None:
        return _in_file(*in_file.groups())
    return _first(error)


def _meant(error: BaseException) -> str:
    missing = re.match(r"Interpolation key '([^']+)' not found", str(error))
    close = nearest_key(missing[1], list(SETTINGS)) if missing else None
    return f"; did you mean ${{{close}}}?" if close else ""


def explain_cause(cause: OmegaConfBaseException, words: Sequence[str]) -> str:
    """What OmegaConf had against a key or its value."""
    key = str(cause.full_key)
    if isinstance(cause, ValidationError | InterpolationResolutionError):
        return explain(cause, words)
    if key not in SETTINGS and key not in PARTS and not key.startswith("hydra"):
        return unknown(key, "VALUE", ())
    return f"{key}: {_first(cause)}"


def missing_choice(error: MissingConfigException) -> str:
    """A group has no such choice: the nearest one, and some of those that it has."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or ())
    if not group:
        return f"--config-name {choice}: there is no {choice}.yaml in conf/"
    parent = re.match(r"In '([^']+/[^']+)'", str(error))
    place = f"conf/{parent[1]}.yaml: " if parent else ""
    if error.options is None and place:
        return f"{place}its defaults name {choice}, and there is no conf/{group}/{choice}.yaml"
    return f"{place}{group}={choice}: {offer(group, choice, options)}"


def offer(group: str, choice: str, options: Sequence[str]) -> str:
    """The nearest choice of a group, and the known ones, few of them where they are many."""
    if group == "scale":
        digits = re.findall(r"\d+", choice)
        meant = nearest(choice, options) or (f"{digits[0]}x{digits[1]}" if len(digits) > 1 else _one_node(digits))
        return (
            f"did you mean scale={meant}? (known: {', '.join(options)}, and NODESxRANKS, as scale=2x8 or scale=2..8x8)"
        )
    if len(options) <= FEW:
        return suggest(choice, options, prefix=f"{group}=")
    close = nearest(choice, options)
    start = f"did you mean {group}={close}? " if close else ""
    alike = [name for name in options if name[:3] == (close or choice)[:3]][:FEW]
    return f"{start}({len(options)} are known, such as {', '.join(alike or options[:FEW])})"


def _one_node(digits: Sequence[str]) -> str:
    return f"1x{digits[0]}" if digits and int(digits[0]) else "local"


def wrong_type(error: ValidationError, words: Sequence[str]) -> str:
    """A value of the wrong kind: which kind it has to be, and a value that would do."""
    key = str(error.full_key)
    setting = SETTINGS.get(key)
    typed = next((word for word in words if word.lstrip("+").partition("=")[0] == key), key)
    if setting is None:
        return f"{typed}: {_first(error)}"
    kind, _, optional = str(setting.type).partition(" | ")
    fitting = KINDS.get(kind, "a dictionary" if kind.startswith("dict") else kind) + (" or null" if optional else "")
    example = setting.default if isinstance(setting.default, int | float | str) else _example(key, kind)
    value = str(example).lower() if isinstance(example, bool) else example
    return f"{typed}: must be {fitting}; say {f'{key}.NAME=VALUE' if kind.startswith('dict') else f'{key}={value}'}"


def _example(key: str, kind: str) -> Any:
    return {"int": 1, "float": 1.0, "bool": "true"}.get(kind, "VALUE")


def broken_yaml(error: YAMLError) -> str:
    """Which file, where in it, and what YAML made of it."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{mark.name}, line {mark.line + 1}" if mark else "a file in conf/"
    return f"{place} is not YAML: {getattr(error, 'problem', None) or _first(error)}"


def _grammar(error: OverrideParseException) -> str:
    """The grammar's complaint, without the parser's own words."""
    told = str(error.__cause__ or error).splitlines()
    reason = next((line for line in told if not line.startswith(("Error parsing", "See http"))), "")
    reason = re.sub(
        r"^LexerNoViableAltException: .*", "there is a character in it that has a meaning of its own", reason
    )
    key, _, value = error.override.partition("=")
    return f"{reason}; words are key=value, and odd characters want quotes: \"{key}='{value}'\""


def _quoted(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{key}='{value}'"


def _first(error: BaseException) -> str:
    """The first paragraph of a message, without Hydra's and OmegaConf's appendices."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [
        line
        for line in lines
        if line and not line.startswith(("full_key:", "object_type", "See http", "reference_type"))
    ]
    return "; ".join(kept) or type(error).__name__


def _in_file(file: str, message: str, key: str | None) -> str:
    """What is wrong in a file of conf/, as far as Hydra tells."""
    reason = " ".join(message.split())
    if key and key not in SETTINGS and key not in PARTS:
        reason = unknown(key, "", ())
    return f"conf/{file}.yaml: {reason}"
