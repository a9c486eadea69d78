"""The note and tags that a person gives a run: a file in its folder. (driver)"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raydist.shared.record_names import NOTE

LONGEST = 10_000
"""Maximum number of characters of a note that is read."""
MAX_TAGS = 50


class RunNote(NamedTuple):
    """What a person has written about a run."""

    text: str = ""
    tags: Sequence[str] = ()


def read_note(folder: Path) -> RunNote:
    """Return the note of a run; empty if there is none, or something else is in the file."""
    try:
        found = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        tags = [str(tag) for tag in found["tags"]]
        return RunNote(str(found["text"])[:LONGEST], tags[:MAX_TAGS])
    except (OSError, ValueError, TypeError, KeyError):
        return RunNote()


def write_note(folder: Path, note: RunNote) -> None:
    """Replace the note of a run as a whole; an empty one is removed.

    OSError: the folder can't be written.
    """
    path = folder / NOTE
    if note == RunNote("", []):
        path.unlink(missing_ok=True)
        return
    descriptor, new = tempfile.mkstemp(prefix=f".{NOTE}-", dir=folder)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(note._asdict(), file, ensure_ascii=False, indent=1)
            file.write("\n")
        # mkstemp's file is its owner's alone, but others who may read the run may read its note.
        Path(new).chmod((folder.stat().st_mode & 0o444) | 0o600)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def changed_note(
    note: RunNote, text: str | None, add: Sequence[str], remove: Sequence[str]
) -> RunNote:
    """Return a note with another text (None: the same), with more tags and without others."""
    tags = dict.fromkeys([*note.tags, *add])
    kept = [tag for tag in tags if tag not in remove]
    return RunNote(note.text if text is None else text, kept)
