"""Tell by name or value which settings are secrets; strip them for saving. (either side)"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

CERTAIN = re.compile(
    r"SECRET|PASSW(?:OR)?D|PASSPHRASE|CREDENTIAL|API_?KEY|CONN(?:ECTION)?_?STR|WEBHOOK|COOKIE",
    re.IGNORECASE,
)
"""What makes any name that of a secret, as in AZURE_STORAGE_CONNECTION_STRING."""
LIKELY = re.compile(
    r"TOKEN(?:_|$)|(?:^|_)(?:AUTH|AUTHORIZATION|OAUTH|DSN|KEY|PASS|PGPASS|PWD|SAS|SIG|SIGNATURE)(?:_|$)",
    re.IGNORECASE,
)
"""Whole words in the name of a secret, unless its value is a number.

`token` matches, `tokenizer` and `num_keys` do not.
"""
NO_SECRET = re.compile(
    r"_(?:CLASS|COUNT|DIM|DIR|FILE|LEN|LENGTH|MODE|NAME|PATH|SIZE|TYPE)S?$|(?:^|_)(?:BOS|CLS|EOS|MASK|PAD|SEP|UNK)_TOKEN$",
    re.IGNORECASE,
)
"""Endings of names that only describe a secret, or name a model's token.

An example is AWS_WEB_IDENTITY_TOKEN_FILE.
"""
NO_VALUES = frozenset({"", "true", "false", "none", "null", "auto"})
"""Values that are no secrets, whatever the name."""
WORD_END = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
IN_URL = re.compile(r"(://[^/\s:@]*:|https?://)([^/\s]+)(?=@)")
"""A password or a token in a URL.

Examples: postgres://me:word@host/db and git+https://token@github.com/x/y.
"""
SLACK_HOST = r"hooks\.slack(?:-gov)?\.com"
"""The hosts of Slack's incoming webhooks, as a regular expression."""
SLACK = re.compile(rf"(https?://{SLACK_HOST}/)([^\s'\"]+)")
"""Slack's webhooks: who has the path may write to the channel."""
ASSIGNED = re.compile(
    r"""(?<![\w./-])(?:--([\w-]+)[\s=]\s*|([\w.-]+)(?:=|["']?\s*:\s+|["']\s*:)\s*["']?)(?=\S)"""
)
"""A name before its value within a text.

Examples: `--token x`, `wandb.api_key=x`, `Authorization: Bearer x`, JSON.
"""
MASK = "***"

Replace = Callable[[str, Any], Any]
"""(name, secret) -> the replacement."""


def is_secret(name: str, value: object) -> bool:
    """Report whether a value must not be saved or printed because of its name.

    The name is that of a setting, a variable or a flag.
    """
    text, by_name = str(value), _by_name(name)
    if by_name == "no" or text.lower() in NO_VALUES:
        return False
    return by_name == "certain" or not _is_number(text)


@functools.cache  # for the settings of a job, which every snapshot contains
def _by_name(name: str) -> Literal["certain", "likely", "no"]:
    words = WORD_END.sub("_", name)
    if NO_SECRET.search(words):
        return "no"
    if CERTAIN.search(words):
        return "certain"
    return "likely" if LIKELY.search(words) else "no"


def masked(value: Any, name: str = "") -> Any:
    """Return settings, or the value of the setting `name`, with MASK in place of each secret."""
    return replace_secrets(value, name, lambda _, secret: MASK)


def replace_secrets(value: Any, name: str, replace: Replace) -> Any:
    """Return the same dicts, lists and scalars, with each secret replaced.

    `name`: the name of the setting with this value; it applies to everything below it. `replace`
    gets the name of the secret's own setting, flag or variable.
    """
    if isinstance(value, Mapping):
        return {
            key: replace_secrets(each, f"{name}.{key}" if name else str(key), replace)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return list(_replace_in_list(value, name, replace))
    if is_secret(name, value):
        return replace(name, value)
    return _replace_in_text(value, name, replace) if isinstance(value, str) else value


def _replace_in_list(values: Sequence[Any], name: str, replace: Replace) -> Iterator[Any]:
    """Yield each element, with secrets replaced. The element after `--token` gets that name."""
    flag = ""
    for index, value in enumerate(values):
        is_flag = isinstance(value, str) and value.startswith("-")
        own = flag if flag and not is_flag else str(index)
        yield replace_secrets(value, f"{name}.{own}", replace)
        flag = value.lstrip("-") if is_flag and "=" not in value else ""


def _replace_in_text(text: str, name: str, replace: Replace) -> str:
    """Replace the passwords of URLs, and all text after the name of a secret."""
    end, secret = len(text), ""
    for found in ASSIGNED.finditer(text):
        own, rest = found[1] or found[2], text[found.end() :]
        if is_secret(own, rest.split()[0].strip("\"',;}])")):
            end, secret = found.end(), replace(f"{name}.{own}", rest)
            break
    plain = text[:end]
    for pattern in (IN_URL, SLACK):
        plain = pattern.sub(lambda url: url[1] + replace(name, url[2]), plain)
    return plain + secret


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
