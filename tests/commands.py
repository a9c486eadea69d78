"""The commands that the pages for people show, as they are typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from raydist import cli
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^ {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
"""A fenced block with its language, or an indented one."""
TYPED = re.compile(r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:python|torchrun|raydist) .*)$")
IN_A_SENTENCE = re.compile(r"`((?:python -m (?:raydist|bench)|raydist [a-z])[^`]*)`")


def shown() -> list[tuple[str, ...]]:
    """The words of all commands of the pages that start Python, torchrun or raydist, each once."""
    return list(dict.fromkeys(words(line) for page in PAGES for line in lines(page.read_text())))


def lines(page: str) -> Iterator[str]:
    """The lines that are commands; one that goes on after a backslash is one."""
    for language, fenced, indented in BLOCK.findall(page):
        if language in ("", "bash", "sh", "console"):
            text = fenced or re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)
            for line in text.replace("\\\n", " ").splitlines():
                yield from TYPED.findall(line)
    yield from IN_A_SENTENCE.findall(page)


def words(line: str) -> tuple[str, ...]:
    """The words of the first command of a line, as a shell splits them, without what stands for any
    or no word.

    `raydist COMMAND` is given as `python -m` of its module.
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
