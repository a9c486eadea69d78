"""Overrides as typed -> overrides in Hydra's grammar; meaningless ones are refused. (pure)

`model.num_classes=10` gets the `++` that Hydra needs, and `env.FLAGS=--a=b,c` the quotes. Hydra
checks whether a choice exists and whether a value has the right type.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

from raydist.settings.config import Job
from raydist.settings.secrets import masked
from raydist.shared.errors import ConfigError

VERBATIM = ("env", "scale.labels")
"""Dictionaries of text. Their values are literal, so they are quoted for Hydra's grammar."""
SPECIAL, ESCAPED = re.compile(r"([][(){}:=, ])"), r"\\\1"
"""Characters that must be escaped in a key between braces in Hydra's grammar."""
NOT_A_NAME = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?|null|true|false", re.IGNORECASE)
"""Text that Hydra reads as a number, a bool or null, where a choice must be a name."""
ELEMENT = re.compile(r"\s*(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,]*)\s*(?=,|$)")
"""One element of a list in Hydra's grammar."""
TOKEN = re.compile(r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?=\s*(?:[],]|$))|.", re.DOTALL)
"""A quoted element, or any other character of a list in Hydra's grammar."""


class Override(NamedTuple):
    """An override `sign` `key` = `value`; `value` is None if there is no `=`."""

    text: str
    sign: str
    key: str
    value: str | None

    @classmethod
    def parse(cls, text: str) -> Override:
        sign = next((each for each in ("++", "+", "~") if text.startswith(each)), "")
        key, equals, value = text[len(sign) :].partition("=")
        return cls(text, sign, key.strip(), value if equals else None)

    def wrong(self, cause: str, *suggestions: str, **named: Any) -> ConfigError:
        value, texts = without_secrets(self.key, self.value, self.text, cause, *suggestions)
        text, cause, *ways = texts
        return ConfigError.of(self.key, value, cause, *ways, text=text, **named)


def without_secrets(key: str, value: str | None, *texts: str) -> tuple[str | None, list[str]]:
    """Return the value of an override, and texts that contain it, with *** in place of secrets."""
    safe = masked(value, key.lstrip("+~"))
    if value is None or safe == value:
        return value, [*texts]
    return safe, [
        text.replace(f"={value}", f"={safe}").replace(f"='{value}", f"='{safe}") for text in texts
    ]


def setting_fields(
    kind: type = Job, prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield each setting by its full name, such as `optim.lr`, in the order of the dataclasses."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from setting_fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


SETTINGS = dict(setting_fields())
LISTS = [name for name, field in SETTINGS.items() if field.type == "list[str]"]
"""Settings that are typed as a list, or as in a shell."""
TEXTS = frozenset(name for name, field in SETTINGS.items() if field.type == "str")
"""Settings that are any text."""
PARTS = frozenset(name[: dot.start()] for name in SETTINGS for dot in re.finditer(r"\.", name))
OPEN = tuple(name for name, field in SETTINGS.items() if str(field.type).startswith("dict["))
"""The dictionaries: settings that accept any key."""


def dictionary_of(key: str) -> str | None:
    """Return the dictionary that `key` is an entry of, or None."""
    return next((name for name in OPEN if key.startswith(f"{name}.")), None)


def example(key: str) -> str:
    """Return a valid override of a setting: its default, or a value of its type."""
    field = SETTINGS.get(key)
    kind = str(field.type).partition(" | ")[0] if field else ""
    if kind.startswith("dict"):
        return f"{key}.NAME=VALUE"
    if kind.startswith("list"):
        return f"{key}=[VALUE,VALUE]"
    default = field.default if field and field.default not in (None, "") else None
    value = (
        default
        if isinstance(default, int | float | str)
        else {"int": 1, "float": 1.0}.get(kind, "VALUE")
    )
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def translate_overrides(
    texts: Sequence[str], groups: Collection[str], multirun: bool = False
) -> list[str]:
    """Return the overrides in Hydra's grammar, one for each of spread(texts).

    `groups`: the config groups. ConfigError for an override that has no meaning.
    """
    overrides = [Override.parse(text) for text in spread(texts)]
    chosen: dict[str, Override] = {}
    for override in overrides:
        if (
            override.key in groups
            and (first := chosen.setdefault(override.key, override)) is not override
        ):
            text = f"{first.text} {override.text}"
            raise ConfigError.of(
                override.key, override.value, "chosen twice", override.text, text=text
            )
    return [_translate(override, groups, multirun) for override in overrides]


def spread(texts: Sequence[str]) -> Iterator[str]:
    """Replace `scale.nodes=2..8` by the two settings that it stands for.

    Also replace `optim._target_=CLASS` by the choice `optim=CLASS`, which has no arguments of
    another optimizer.
    """
    for text in texts:
        if span := re.fullmatch(r"(?:\+\+)?scale\.nodes=(\d+)\.\.(\d+)", text):
            yield from (f"scale.nodes={span[1]}", f"scale.max_nodes={span[2]}")
        elif target := re.fullmatch(r"(?:\+\+)?optim\._target_=(.+)", text):
            yield f"optim={target[1]}"
        else:
            yield text


def _translate(override: Override, groups: Collection[str], multirun: bool) -> str:
    text, sign, key, value = override
    if key.startswith(("hydra.", "hydra/")) or "@" in key:
        return text
    if not key:
        raise override.wrong("an override is key=value", "backend=gloo")
    dictionary = dictionary_of(key)
    if key not in groups and key not in SETTINGS and key not in PARTS and not dictionary:
        raise unknown(key, value, groups, text)
    if value is None and sign != "~":
        raise override.wrong(
            "its value is missing", f"{key}=CHOICE" if key in groups else example(key)
        )
    if key in groups:
        return _choice(override)
    if dictionary:
        return _entry(override, dictionary, multirun)
    if key in ("dir", "sweep.dir"):
        raise override.wrong(
            f"raydist sets {key} itself", f"hydra.{'sweep' if key != 'dir' else 'run'}.dir={value}"
        )
    if key in PARTS and not (value or "").startswith("{"):
        inside = [name for name in SETTINGS if name.startswith(f"{key}.")]
        raise override.wrong(f"{key} has the settings {', '.join(inside)}", example(inside[0]))
    if value is None or sign == "~":
        raise override.wrong("a setting cannot be removed", example(key))
    if sign == "+":
        raise override.wrong("the setting exists already", f"{key}={value}")
    if key == "fabric.hca" and not multirun and not value.startswith(("[", "$")):
        value = value.replace(",", " ")  # as NCCL_IB_HCA has them
    if key in LISTS:
        return f"{key}={','.join(as_list(key, each) for each in lists_of(key, value, multirun))}"
    if key in ("watch.output", "sweep.objective", "notify.webhook", "notify.command"):
        return f"{key}={quote(_unquote(value))}"  # its commas do not separate values of a sweep
    if key in TEXTS and NOT_A_NAME.fullmatch(value) and value.lower() != "null":
        return f"{sign}{key}={quote(value)}"  # Hydra would make 1.1 of name=1.10
    return f"{sign}{key}={_quote_home(value)}"


def lists_of(key: str, value: str, multirun: bool) -> list[str]:
    """Return the values of a setting that is a list; a sweep may have several of them.

    They are typed as `[--lr,0.1],[--lr,0.2]`, or by `choice(…)`. Any other comma is a part of the
    text, as in `--betas 0.9,0.99`; but no HCA's name has one.
    """
    choice = re.fullmatch(r"choice\((.*)\)", value, re.DOTALL) if multirun else None
    parts, depth = [""], 0
    for token in TOKEN.findall(choice[1] if choice else value):
        depth += (token == "[") - (token == "]")
        if token == "," and not depth:
            parts.append("")
        else:
            parts[-1] += token
    parts = [_unquote(each.strip()) for each in parts]
    lists = all(each.startswith("[") and each.endswith("]") for each in parts)
    names = multirun and key == "fabric.hca" and "${" not in value
    return parts if choice or lists or names else [value]


def as_list(key: str, value: str) -> str:
    """Return a value as a list in Hydra's grammar, its elements quoted.

    The value is `--rank {rank} --lr 0.1`, as typed in a shell, or a list such as
    `[--rank,{rank}]`.
    """
    if value.startswith("[") and value.endswith("]"):
        elements = [_unquote(each.strip()) for each in ELEMENT.findall(value[1:-1]) if each.strip()]
    else:
        try:
            elements = shlex.split(value)
        except ValueError as error:
            shown = masked(value, key)
            raise ConfigError.of(key, shown, str(error), f"{key}=[VALUE,VALUE]") from error
    return f"[{','.join(map(quote, elements))}]"


def _choice(override: Override) -> str:
    sign, key, value = override[1:]
    if sign in ("+", "++"):
        raise override.wrong("the group exists already", f"{key}={value}")
    if value is None:
        return override.text
    if value.startswith(("[", "{")):
        raise override.wrong(
            "a group takes one choice", f"{key}={value.strip('[]{}').partition(',')[0]}"
        )
    # Each value of a sweep may look like a number.
    choices = (
        f"'{each}'" if NOT_A_NAME.fullmatch(each) else _quote_home(each)
        for each in value.split(",")
    )
    return f"{sign}{key}={','.join(choices)}"


def _entry(override: Override, dictionary: str, multirun: bool) -> str:
    """Return an entry of a dictionary; a key that the schema does not name needs `++` in Hydra."""
    name, value = override.key[len(dictionary) + 1 :], override.value
    if not name:
        raise override.wrong(f"{dictionary} is a dictionary", f"{dictionary}.NAME={value}")
    if override.sign == "~" or value is None:
        return override.text
    if dictionary == "env" and re.search(r"\s", name):
        cause = f"{name!r} is not a variable's name"
        raise override.wrong(cause, f"env.{'_'.join(name.split())}={value}")
    # The values of a sweep contain commas. So may a connection string, which is a single value.
    several = multirun and "," in value and dictionary == "env" and masked(value, name) == value
    if dictionary in VERBATIM and not several and not value.startswith(("'", '"', "${")):
        value = quote(value)
    else:
        value = _quote_home(value)
    if dictionary.startswith("scale.") and not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        # Labels of Ray such as ray.io/market-type: Hydra's grammar allows these characters only in
        # braces.
        return f"++{dictionary}={{{SPECIAL.sub(ESCAPED, name)}:{value}}}"
    return f"++{override.key}={value}"


def quote(value: str) -> str:
    """Quote a value for Hydra's grammar."""
    # A backslash is escaped only before a quote and at the end.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def _unquote(value: str) -> str:
    """Return the text of a quoted value; any other value unchanged."""
    mark = value[:1]
    if len(value) < 2 or mark != value[-1] or mark not in "'\"":
        return value
    return re.sub(rf"(\\+)({mark}|$)", lambda m: m[1][: len(m[1]) // 2] + m[2], value[1:-1])


def _quote_home(value: str) -> str:
    """Quote a value that begins with `~/`.

    Hydra's grammar has no `~`, and not every shell expands it after a `=`.
    """
    return quote(value) if value.startswith("~/") else value


def unknown(
    key: str, value: str | None, groups: Collection[str] = (), text: str = ""
) -> ConfigError:
    """Return the error for a setting that does not exist, with the most likely intended one."""
    known = sorted(name for name in {*SETTINGS, *PARTS, *groups} if not name.startswith("hydra"))
    parent = key.rpartition(".")[0]
    siblings = (
        [name for name in known if name.rpartition(".")[0] == parent] if parent in PARTS else []
    )
    value, (text,) = without_secrets(key, value, text)
    close = nearest_key(key, known, siblings)
    guess = f"{close}={value}" if close and value else close
    listed = siblings or [name for name in known if "." not in name]
    return ConfigError.of(
        key, value, f"there is no setting {key}", guess=guess, known=listed, text=text
    )


def nearest_key(key: str, known: Sequence[str], siblings: Sequence[str] = ()) -> str | None:
    """Return the setting that was probably meant.

    It is a setting with the same last part, else one next to it with a similar name, else a similar
    one.
    """
    last = key.rpartition(".")[2]
    by_last: dict[str, str] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], name)
    if last in by_last:
        return by_last[last]
    for names in ({name.rpartition(".")[2]: name for name in siblings}, by_last):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=0.6):
            return names[close[0]]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return close[0] if close else None
