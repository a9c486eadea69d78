"""docs/settings.md is made of the docstrings in settings/config.py, as `raydist train --help` is.

`python -m tests.test_settings_page` writes the page anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from raydist.settings import compose, help
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "settings.md"
HEAD = """# Settings

A setting is typed as `NAME=VALUE`, and a group of settings is chosen with `GROUP=CHOICE`:
`raydist train job=mine.py scale=2x8 optim=adamw optim.lr=3e-4`. `raydist train --help` shows
what this page shows, and `--cfg job` the settings that a command line makes.

A wrong setting starts nothing: the exit code is 2, and the message names the nearest right one.
Files of your own in `./conf` and `./jobs` are searched before [raydist's own](../conf).
Sizes and times have their unit in their name: `_s` seconds, `_mb` MiB.

`--config-name NAME` and `--config-dir DIR` choose other files of settings, and `--info` shows which
files the settings come from. `eval "$(raydist -sc install=bash)"` completes settings and their
values in the shell (also `zsh`, `fish`).

`python -m tests.test_settings_page` writes this page.
"""


def page() -> str:
    """Return the whole page."""
    with compose.hydra_set_up():
        groups = [*help.config_groups(compose.Loader())]
    parts = [part for part in help.by_part() if part]
    jumps = ", ".join(f"[`{part}.`](#{part})" for part in parts)
    lines = [HEAD, "## Groups\n", "| group | choices |", "|---|---|"]
    for name, choices in groups:
        # How many models torchvision has depends on its version.
        lines.append(
            f"| `{name}` | {cell(re.sub(' [0-9]+ image models', ' image models', choices))} |"
        )
    lines += ["", "## Every setting\n", f"Parts: {jumps}."]
    return "\n".join([*lines, *(line for part in help.by_part() for line in section(part)), ""])


def section(part: str) -> Iterator[str]:
    """Yield the settings of a part, one row for each."""
    yield from (["", f"### {part}", "", cell(help.texts()[part])] if part else [])
    yield from ("", "| setting | default | values | |", "|---|---|---|---|")
    for name, field in help.by_part()[part]:
        text = cell(help.texts()[name])
        yield f"| `{name}` | `{cell(help.default_text(field))}` | `{cell(help.type_text(field))}` | {text} |"


def cell(text: str) -> str:
    """Return the text as one cell of a table."""
    return text.replace("|", "\\|")


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "python -m tests.test_settings_page writes it anew"


if __name__ == "__main__":
    PAGE.write_text(page())
