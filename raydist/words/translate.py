"""Words as a person types them -> words as Hydra reads them; a word that can't be right is refused. (pure)

`model.num_classes=10` gets its `++`, `env.FLAGS=--a=b,c` its quotes, a secret stays out of every file. What a group
offers and whether a value fits is Hydra's business; that the word means anything at all is settled here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from raydist.config import SECRET, Job
from raydist.errors import ConfigError

VERBATIM = ("env", "scale.labels")
"""Dictionaries of text: their values are meant as they stand, whatever Hydra's grammar makes of them."""
ODD, ESCAPED = re.compile(r"([][(){}:=, ])"), r"\\\1"
"""What Hydra's grammar wants a backslash before, in a key between braces."""
NO_NAME = re.compile(r"[+-]?[\d.]+|null|true|false", re.IGNORECASE)
"""What Hydra reads as a number, a truth value or nothing, where the name of a choice is wanted."""
ELEMENT = re.compile(r"\s*(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,]*)\s*(?=,|$)")
"""One element of a list as Hydra writes it."""
WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=]*)(?P<equals>=)?(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Word:
    """`sign` `key` = `value`; value is None where there is no `=`."""

    text: str
    sign: str
    key: str
    value: str | None

    @classmethod
    def of(cls, text: str) -> Word:
        match = WORD.fullmatch(text)
        assert match is not None, text  # every text matches
        return cls(text, match["sign"] or "", match["key"].strip(), match["value"] if match["equals"] else None)


def settings(kind: type = Job, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every setting with its full name, as `optim.lr`, in the order of the dataclasses."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


SETTINGS = dict(settings())
PARTS = frozenset(name[: dot.start()] for name in SETTINGS for dot in re.finditer(r"\.", name))
OPEN = tuple(name for name, field in SETTINGS.items() if str(field.type).startswith("dict["))


def open_dict(key: str) -> str | None:
    """The dictionary that `key` is an entry of, if it is one that takes any key."""
    return next((name for name in OPEN if key.startswith(f"{name}.")), None)


def translate(
    words: Sequence[str], groups: Collection[str], multirun: bool = False
) -> tuple[list[str], dict[str, str]]:
    """The words for Hydra, and the secrets that were in them by the name of their environment variable.

    `groups`: the config groups that there are. ConfigError for a word that means nothing.
    """
    typed = [Word.of(text) for text in spread(words)]
    _refuse_twice([word for word in typed if word.key in groups])
    secrets: dict[str, str] = {}
    return [_translate(word, groups, multirun, secrets) for word in typed], secrets


def spread(words: Sequence[str]) -> Iterator[str]:
    """`scale.nodes=2..8` as the two settings that it says."""
    for text in words:
        if span := re.fullmatch(r"(?:\+\+)?scale\.nodes=(\d+)\.\.(\d+)", text):
            yield from (f"scale.nodes={span[1]}", f"scale.max_nodes={span[2]}")
        else:
            yield text


def _translate(word: Word, groups: Collection[str], multirun: bool, secrets: dict[str, str]) -> str:
    if word.key.startswith(("hydra.", "hydra/")) or "@" in word.key:
        return word.text
    if not word.key:
        raise ConfigError(f"{word.text}: words are key=value, as in backend=gloo")
    if word.value is None and word.sign != "~":
        raise ConfigError(f"{word.text}: {_say_value(word, groups)}")
    if word.key in groups:
        return _group(word)
    if (opened := open_dict(word.key)) is not None:
        return _entry(word, opened, multirun, secrets)
    if word.key not in SETTINGS and word.key not in PARTS:
        raise ConfigError(f"{word.text}: {unknown(word.key, word.value, groups)}")
    if word.key == "dir":
        raise ConfigError(f"{word.text}: dir is filled in by raydist; say hydra.run.dir={word.value}")
    if word.key in PARTS and not (word.value or "").startswith("{"):
        inside = [name for name in SETTINGS if name.startswith(f"{word.key}.")]
        raise ConfigError(f"{word.text}: {word.key} has settings of its own; say one of {', '.join(inside)}")
    if word.sign == "~":
        raise ConfigError(f"{word.text}: {word.key} can't be taken away; say {word.key}=VALUE")
    if word.sign == "+":
        raise ConfigError(f"{word.text}: {word.key} is there already; say {word.text[1:]} (without the +)")
    if word.key in ("args", "pip"):
        return f"{word.key}={as_list(word.key, word.value or '')}"
    if word.key == "watch.output":
        return f"watch.output={quote(_unquote(word.value or ''))}"  # ranks, not the choices of a sweep
    return f"{word.sign}{word.key}={_quote_home(word.value or '')}"


def as_list(key: str, value: str) -> str:
    """`--rank {rank} --lr 0.1`, as typed in a shell, or `[--rank,{rank}]`: each word quoted, as braces have to be."""
    if value.startswith("[") and value.endswith("]"):
        found = [_unquote(each.strip()) for each in ELEMENT.findall(value[1:-1]) if each.strip()]
    else:
        try:
            found = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"{key}={value}: {error}; say {key}=[WORD,WORD]") from error
    return f"[{','.join(map(quote, found))}]"


def _refuse_twice(chosen: Sequence[Word]) -> None:
    first: dict[str, Word] = {}
    for word in chosen:
        before = first.setdefault(word.key, word)
        if before is not word:
            raise ConfigError(f"{before.text} {word.text}: {word.key} is chosen twice; say it once")


def _say_value(word: Word, groups: Collection[str]) -> str:
    if word.key in groups or word.key in SETTINGS or open_dict(word.key):
        return f"its value is missing; say {word.key}=VALUE"
    return f"words are key=value; {unknown(word.key, 'VALUE', groups)}"


def _group(word: Word) -> str:
    if word.sign in ("+", "++"):
        raise ConfigError(f"{word.text}: {word.key} is there already; say {word.key}={word.value} (without the +)")
    if word.value is None:
        return word.text
    if word.value.startswith(("[", "{")):
        raise ConfigError(f"{word.text}: one choice at a time; say {word.key}=CHOICE")
    # of a sweep's choices each may look like a number
    choices = (f"'{each}'" if NO_NAME.fullmatch(each) else _quote_home(each) for each in word.value.split(","))
    return f"{word.sign}{word.key}={','.join(choices)}"


def _entry(word: Word, opened: str, multirun: bool, secrets: dict[str, str]) -> str:
    """An entry of an open dictionary: Hydra wants `++` before a key that the schema does not name."""
    name = word.key[len(opened) + 1 :]
    if not name:
        raise ConfigError(f"{word.text}: {opened} is a dictionary; say {opened}.NAME=VALUE")
    if word.sign == "~" or word.value is None:
        return word.text
    value = word.value
    if opened == "env" and SECRET.search(name) and not value.startswith("${"):
        secrets[name] = _unquote(value)
        value = f"${{raydist.secret:{name}}}"
    elif (
        opened in VERBATIM
        and not (multirun and "," in value and opened == "env")
        and not value.startswith(("'", '"', "${"))
    ):
        value = quote(value)
    else:
        value = _quote_home(value)
    if opened.startswith("scale.") and not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        # Ray's own labels, such as ray.io/market-type, hold what Hydra's grammar has only for keys in braces
        return f"++{opened}={{{ODD.sub(ESCAPED, name)}:{value}}}"
    return f"++{word.key}={value}"


def quote(value: str) -> str:
    """The value between quotes, as Hydra's grammar reads it back."""
    # a backslash needs another one only before a quote, and at the end
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def _unquote(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _quote_home(value: str) -> str:
    """Hydra's grammar has no `~`, which not every shell replaces after a `=`."""
    return quote(value) if value.startswith("~/") else value


def unknown(key: str, value: str | None, groups: Collection[str]) -> str:
    """Why a key is refused, and the one to type instead."""
    known = sorted({*SETTINGS, *PARTS, *groups} - {g for g in groups if g.startswith("hydra")})
    parent = key.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == parent] if parent in PARTS else []
    listed = beside or [name for name in known if "." not in name]
    best = nearest_key(key, known, beside)
    offer = f"did you mean {best}{f'={value}' if value else ''}? " if best else ""
    return f"there is no setting {key}; {offer}(known: {', '.join(listed)})"


def nearest_key(key: str, known: Sequence[str], beside: Sequence[str] = ()) -> str | None:
    """The setting that was meant: one of that very name elsewhere, or a neighbour of nearly that name, or any such."""
    last = key.rpartition(".")[2]
    by_last: dict[str, str] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], name)
    if last in by_last:
        return by_last[last]
    for names in ({name.rpartition(".")[2]: name for name in beside}, by_last):
        if close := difflib.get_close_matches(last, names, n=1, cutoff=0.6):
            return names[close[0]]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return close[0] if close else None
