"""The commands that README.md and docs/ show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from raydist import cli
from tests.conftest import ROOT

FIRST_PAGES = [ROOT / "README.md", ROOT / "docs/first-hour.md"]
"""What a new person reads."""
PAGES = [*FIRST_PAGES, *sorted({*ROOT.glob("docs/*.md")} - {*FIRST_PAGES})]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^ {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
"""A fenced block with its language, or an indented one."""
COMMAND = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:python|torchrun|raydist) .*)$")
IN_A_SENTENCE = re.compile(r"`((?:python -m (?:raydist|bench)|raydist [a-z])[^`]*)`")


def commands_on_pages(pages: Sequence[Path] = PAGES) -> list[tuple[str, ...]]:
    """Return the words of each command on the pages that starts Python, torchrun or raydist,
    once."""
    return list(dict.fromkeys(words(line) for page in pages for line in lines(page.read_text())))


def lines(page: str) -> Iterator[str]:
    """Yield the commands of a page. Lines that a backslash joins are one command."""
    for language, fenced, indented in BLOCK.findall(page):
        if language in ("", "bash", "sh", "console"):
            text = fenced or re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)
            for line in text.replace("\\\n", " ").splitlines():
                yield from COMMAND.findall(line)
    yield from IN_A_SENTENCE.findall(page)


def words(line: str) -> tuple[str, ...]:
    """Split the first command of a line as a shell does, without placeholders such as `…`.

    `raydist COMMAND` becomes `python -m` of its module.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    result = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        result.append(word)
    result = [word for word in result if word not in ("…", "[RUN]")]
    if result[0] == "raydist":
        command, rest = cli.select(result[1:])
        result = ["python", "-m", f"raydist.{command.module}", *rest]
    return tuple(result)
