"""The command `raydist note`: give a run a note and tags, which the list of runs shows. (driver)

`python -m raydist.tools.note` is the same.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from raydist.shared.errors import ConfigError, nearest
from raydist.shared.home import runs_folder
from raydist.state import object_store
from raydist.tools.command_line import ToolParser, run_tool
from raydist.watch.web.run_note import (
    LONGEST,
    MAX_TAGS,
    RunNote,
    changed_note,
    read_note,
    write_note,
)
from raydist.watch.web.runs import find_place, no_run
from raydist.watch.web.sweep import is_sweep

TAG = re.compile(r"[\w.:/-]{1,40}")


def note_parser() -> ToolParser:
    """Return the parser of the run, the text and the flags."""
    parser = ToolParser("note", "Gives a run a note and tags; without any, shows them.")
    parser.positional("RUN [TEXT]", "folder of a run or of a sweep, or newest; and the note")
    parser.add_argument("--tag", metavar="NAME", action="append", default=[], help="add a tag")
    parser.add_argument("--untag", metavar="NAME", action="append", default=[], help="remove a tag")
    parser.add_argument("--clear", action="store_true", help="remove the note and all tags first")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Change or show the note of a run.

    The exit code: 0; 2 for a wrong word, if there is no such run, or if it can't be written.
    """
    return run_tool(lambda: note(note_parser().parse(sys.argv[1:] if argv is None else argv)))


def note(arguments: argparse.Namespace) -> int:
    """Change the note as typed, and print it."""
    place, *texts = arguments.overrides or ["newest"]
    if len(texts) > 1:
        raise ConfigError.of(
            "TEXT", " ".join(texts), "a note is one word of the shell", f'"{" ".join(texts)}"'
        )
    folder = folder_of(place)
    before = read_note(folder)
    text = texts[0] if texts else None
    check_note(text or "", arguments.tag)
    if unknown := [tag for tag in arguments.untag if tag not in before.tags]:
        raise ConfigError.of(
            "--untag",
            unknown[0],
            "the run has no such tag",
            guess=nearest(unknown[0], list(before.tags)),
            known=list(before.tags),
        )
    kept = RunNote() if arguments.clear else before
    after = changed_note(kept, text, arguments.tag, arguments.untag)
    if len(after.tags) > MAX_TAGS:
        raise ConfigError.of(
            "--tag", arguments.tag[-1], f"a run has at most {MAX_TAGS} tags", "--untag NAME first"
        )
    if arguments.clear or text is not None or arguments.tag or arguments.untag:
        try:
            write_note(folder, after)
        except OSError as error:
            raise no_run(
                place, f"its note cannot be written ({error.strerror})", "a folder of yours"
            ) from error
    print(f"run   {folder}\nnote  {after.text}\ntags  {' '.join(after.tags)}")
    return 0


def folder_of(place: str) -> Path:
    """Return the folder of the run or sweep that a person means. ConfigError: there is none."""
    if object_store.scheme(place):
        raise no_run(place, "a note is a file in a run folder of this machine", "newest")
    root, first = find_place(place, runs_folder())
    if not first and not is_sweep(root):
        raise no_run(place, "a note belongs to one run", "the folder of one")
    return root / first


def check_note(text: str, tags: Sequence[str]) -> None:
    """Refuse a note that is too long, and a tag that cannot be found by its name."""
    if len(text) > LONGEST:
        cause = f"a note has at most {LONGEST} characters"
        raise ConfigError.of("TEXT", f"{text[:30]}…", cause, "the name of a file with the text")
    if (typed := re.fullmatch(r"(tag|untag)s?=(.*)", text, re.DOTALL)) is not None:
        raise ConfigError.of("TEXT", text, "tags have a flag", f"--{typed[1]} {typed[2] or 'NAME'}")
    for tag in tags:
        if not TAG.fullmatch(tag):
            cause = "a tag is one word of letters, digits and -_.:/"
            fitting = re.sub(r"[^\w.:/-]+", "-", tag).strip("-")[:40] or "baseline"
            raise ConfigError.of("--tag", tag, cause, f"--tag {fitting}")


if __name__ == "__main__":
    sys.exit(main())
