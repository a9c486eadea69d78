"""The command `raydist sweep add`: add trials to a sweep, by their settings. (driver)"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Transformer

from raydist.settings import references
from raydist.settings.compose import SweepConfig
from raydist.settings.overrides import Override, spread
from raydist.shared.errors import ConfigError
from raydist.shared.home import expand_home
from raydist.sweeps.flow import checked
from raydist.sweeps.folder import is_running, read_summary
from raydist.sweeps.requests import write_request
from raydist.sweeps.space import CHECKED, Choice, Space, part_of
from raydist.sweeps.table import settings_text
from raydist.tools.command_line import ToolParser
from raydist.watch.web.sweep import SUMMARY

DESCRIPTION = """\
Adds trials to a sweep, by their settings, while it runs or after its end.

    raydist sweep add runs/digits/DATE_sweep optim.lr=0.02 model=mlp
    raydist sweep add runs/digits/DATE_sweep optim.lr=0.02,0.03 model=mlp train.epochs=9

They need a value for each setting that the sweep varies, and may have others.
"""
PATIENCE_S = 30.0
"""Longest wait for the driver of the sweep to look for new requests."""
LOOK_S = 0.2
NEVER = ("sweep", "hydra", "notify")
"""Settings that belong to the sweep as a whole."""
REFUSED = "a trial that is added cannot have this"


def add_trials(argv: Sequence[str]) -> int:
    """Check and add the trials, and say what becomes of them. ConfigError: nothing was added."""
    parser = ToolParser("sweep add", DESCRIPTION)
    parser.positional("FOLDER SETTING=VALUE …", "folder of the sweep; settings of the trials")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="as it was for the sweep")
    arguments = parser.parse(argv)
    folder, *words = arguments.overrides or [""]
    if not folder or "=" in folder or not words:
        cause = (
            "it needs the folder of the sweep and the settings of the trials: FOLDER optim.lr=0.02"
        )
        raise ConfigError.of("raydist sweep add", None, cause)
    path = expand_home("FOLDER", folder).absolute()
    summary = read_summary(folder, "FOLDER")
    if (owner := (path / SUMMARY).stat().st_uid) != os.getuid():
        cause = f"the sweep belongs to uid {owner}, and only that user can add trials"
        raise ConfigError.of("FOLDER", folder, cause)
    trials = trials_of(summary, words, arguments.config_dir)
    try:
        name = write_request(path, trials)
    except OSError as error:
        raise ConfigError.of("FOLDER", folder, f"nothing can be added: {error}") from error
    numbers = wait_until_taken(path, name, len(trials))
    for settings, number in itertools.zip_longest(trials, numbers):
        trial = "a trial" if number is None else f"trial {number}"
        print(f"added  {trial}: {settings_text(settings)}")
    if len(numbers) < len(trials) and is_running(path):
        print("the sweep has not answered yet: it takes them when it looks next")
    elif len(numbers) < len(trials):
        print(f"the sweep has ended; to run them, type\n  raydist sweep sweep.resume={path}")
    return 0


def trials_of(
    summary: Mapping[str, Any], words: Sequence[str], config_dir: str | None = None
) -> list[dict[str, str]]:
    """Return the settings of each trial that these words describe, checked as the sweep's own are.

    `summary`: the content of sweep.json. ConfigError: a wrong name or value, or a missing one.
    """
    added = [Override.parse(text) for text in spread(words)]
    for each in added:
        first = each.key.replace("/", ".").split(".")[0]
        if each.sign == "~" or first in NEVER:
            raise each.wrong(REFUSED)
    before: list[str] = summary["overrides"]
    references.assume_values(before)  # those of secrets are not known here, and nothing is run
    name = summary.get("function")
    where = (summary["config_name"], config_dir, stand_in(name) if name else None)
    space = Space(SweepConfig(before, *where))
    keys = {each.key for each in added}
    kept = [text for text in before if Override.parse(text).key not in keys]
    config = SweepConfig([*kept, *words], *where)
    for each in added:
        if each.key not in config.overrides:  # a label with characters that need braces
            raise each.wrong(REFUSED)
    if missing := [key for key in space.parts if key not in keys]:
        cause = "the sweep varies it, so a trial that is added needs a value of it"
        example = space.parts[missing[0]].ends()[0]
        raise ConfigError.of(missing[0], None, cause, f"{missing[0]}={example}")
    ordered = list(dict.fromkeys([*space.parts, *(each.key for each in added)]))
    values = [values_to_add(key, config, space) for key in ordered]
    combinations = itertools.islice(itertools.product(*values), CHECKED + 1)
    trials = [dict(zip(ordered, each, strict=True)) for each in combinations]
    if len(trials) > CHECKED:
        cause = f"one command adds at most {CHECKED} trials"
        raise ConfigError.of("raydist sweep add", None, cause)
    for settings in trials:
        checked(space.job(settings))
    return trials


def values_to_add(key: str, config: SweepConfig, space: Space) -> Sequence[str]:
    """Return the values of a setting in the added trials, as in overrides."""
    override = config.overrides[key]
    if references.REFERENCE in override.get_value_string():
        raise ConfigError.of(
            key, None, "a secret is not saved, so it cannot be added", f"{key}='${{oc.env:NAME}}'"
        )
    if not override.is_sweep_override():
        text, known = override.get_value_string(), space.parts.get(key)
        # As the sweep writes its own: 0.10 is its 0.1.
        same = str(Transformer.encode(override.value()))  # type: ignore[arg-type]
        return [same if isinstance(known, Choice) and same in known.values else text]
    part = part_of(key, override)
    if isinstance(part, Choice):
        return part.values
    raise ConfigError.of(
        key, override.get_value_string(), "a trial has one value", f"{key}={part.ends()[0]}"
    )


def stand_in(name: str) -> Callable[..., Any]:
    """Return a function of this name, MODULE:NAME, for a sweep of a function that Python passed."""

    def function() -> None: ...

    function.__module__, _, function.__qualname__ = name.partition(":")
    return function


def wait_until_taken(sweep: Path, request: str, count: int) -> list[int]:
    """Return the numbers of a request's trials once the driver has created all of them.

    Fewer: the sweep has ended, or its driver does not look.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        last = not is_running(sweep) or time.monotonic() > until
        trials = read_summary(str(sweep))["trials"]
        numbers = [each["number"] for each in trials if each.get("added") == request]
        if len(numbers) == count or last:
            return numbers
        time.sleep(LOOK_S)
