"""The commands that the pages for people show, as they are typed, and made small enough for a test."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```$|((?:^ {4}.*\n)+)", re.MULTILINE | re.DOTALL)
"""A fenced block without another language, or an indented one."""
SHELL = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:python|torchrun) .*)$")


@dataclass(frozen=True)
class Command:
    """A command of a page: its words, as a shell splits them."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


def shown() -> Iterator[Command]:
    """All commands of the pages that start Python or torchrun, each once."""
    seen = set[tuple[str, ...]]()
    for page in PAGES:
        for line in lines(page):
            match = SHELL.match(line)
            if match is None:
                continue
            words = split(match[1])
            if words not in seen:
                seen.add(words)
                yield Command(page.name, words)


def lines(page: Path) -> Iterator[str]:
    """The lines of a page's blocks of code, without their indent; a line that goes on with a backslash is one."""
    for fenced, indented in BLOCK.findall(page.read_text()):
        text = fenced or re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)
        yield from text.replace("\\\n", " ").splitlines()


def split(line: str) -> tuple[str, ...]:
    """The words of the first command of a line, without its comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    return tuple(word for word in words if word != "…")
