"""Replace secrets in overrides and config files by references, which Hydra saves. (driver)

A reference is `${raydist.secret:job.args.api_key}`. Only the driver's process knows the values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException

from raydist.settings.secrets import MASK, Replace, replace_secrets

REFERENCE = "${raydist.secret:"
_secrets: dict[str, object] = {}
_shown: ContextVar[bool] = ContextVar("shown", default=False)


def secret_value(name: str) -> Any:
    """Return the value that a reference stands for; OmegaConf calls this to resolve it."""
    if _shown.get():
        return MASK
    if name not in _secrets:
        raise LookupError(f"{name} is a secret, so its value is not saved; type it again")
    return _secrets[name]


@contextmanager
def values_masked() -> Iterator[None]:
    """Let each reference stand for *** while the block runs: it prints resolved settings."""
    before = _shown.set(True)
    try:
        yield
    finally:
        _shown.reset(before)


def assume_values(overrides: Iterable[str]) -> None:
    """Let each reference in saved overrides stand for some text, for a check that runs nothing."""
    for name in re.findall(re.escape(REFERENCE) + r"([^}]+)", " ".join(overrides)):
        _secrets.setdefault(name, MASK)


def refer_to(name: str, value: Any) -> str:
    """Return a reference to a value, which is treated as a secret whatever its name."""
    return _References()(name, value)


def hide(value: Any, name: str) -> Any:
    """Return the value of a setting, with references to the secrets in it."""
    return replace_secrets(value, name, _unless_reference(_References()))


def hide_all(overrides: Iterable[str]) -> list[str]:
    """Return overrides in Hydra's grammar, with references to the secrets in them."""
    references = _References()
    hidden = []
    for text in overrides:
        try:
            hidden.append(_replace_in(text, references))
        except HydraException:
            hidden.append(text)  # it will be refused
    return hidden


def mask_override(text: str) -> str:
    """Return an override as typed, with *** in place of the secrets in it."""
    return _replace_typed(text, lambda _, value: MASK)


def names_of_secrets(overrides: Iterable[str]) -> list[str]:
    """Return the names of the secrets in overrides as typed."""
    names: dict[str, None] = {}

    def note(name: str, value: Any) -> Any:
        names[name] = None
        return MASK

    for text in overrides:
        _replace_typed(text, note)
    return [*names]


class _References:
    """A callable that replaces secrets by references.

    Two values of the same name get two references.
    """

    def __init__(self) -> None:
        self._given: dict[str, object] = {}

    def __call__(self, name: str, value: Any) -> str:
        # OmegaConf's grammar allows only these characters in a reference.
        name = re.sub(r"[^\w.-]", "_", name)
        more = (f"{name}.{number}" for number in itertools.count(2))
        own = next(
            each for each in itertools.chain([name], more) if self._given.get(each, value) == value
        )
        self._given[own] = _secrets[own] = value
        return f"{REFERENCE}{own}}}"


def _replace_typed(text: str, replace: Replace) -> str:
    """Do what _replace_in does, for an override as typed: it may lack quotes that Hydra needs."""
    try:
        return _replace_in(text, replace)
    except HydraException:
        key, equals, value = text.partition("=")
        return (
            f"{key}{equals}{replace_secrets(value, key.lstrip('+~'), _unless_reference(replace))}"
        )


def _replace_in(text: str, replace: Replace) -> str:
    """Replace the secrets in an override; without a secret the text stays the same.

    HydraException: Hydra cannot read it.
    """
    replace = _unless_reference(replace)
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    name = override.key_or_group
    if isinstance(value, ChoiceSweep):
        values = [Override._convert_value(each) for each in value.list]
        # Not as a list: each is the setting's value in one run.
        replaced = [replace_secrets(each, name, replace) for each in values]
        if replaced == values:
            return text
        choices = ",".join(map(_written, replaced))
        return (
            f"{override.get_key_element()}={choices if value.simple_form else f'choice({choices})'}"
        )
    changed = replace_secrets(value, name, replace)
    return text if changed == value else f"{override.get_key_element()}={_written(changed)}"


def _unless_reference(replace: Replace) -> Replace:
    """Apply `replace` to literal values only. A reference to a variable or a setting stays."""
    return lambda name, value: (
        value if isinstance(value, str) and "${" in value else replace(name, value)
    )


def _written(value: Any) -> str:
    """Format a value in Hydra's grammar."""
    return str(Override._get_value_element_as_str(_quoted(value)))


def _quoted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _quoted(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_quoted(each) for each in value]
    return QuotedString(value, Quote.single) if isinstance(value, str) and value != MASK else value
