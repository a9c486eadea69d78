"""Adds the pages outside docs/ to the site, and sends links to other files to the repository (a
hook of mkdocs)."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmarks.md",
}
"""Pages of the repository, and their names on the site."""
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.remove(files.src_uris["site.py"])
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point each link at a page of the site; at the repository, if it is a file that the site does
    not have."""
    origin = next((source for source, name in OUTSIDE.items() if name == page.file.src_uri), None)
    folder = posixpath.dirname(origin) if origin else "docs"

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        inside = OUTSIDE.get(path, posixpath.relpath(path, "docs"))
        if inside in files.src_uris:
            beside = posixpath.dirname(page.file.src_uri) or "."
            return f"]({posixpath.relpath(inside, beside)}{match[2] or ''})"
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it
        # the file is not on the site
        return (
            f"]({config.repo_url.rstrip('/')}/blob/main/{path}{match[2] or ''})"
            if config.repo_url
            else "](#)"
        )

    return LINK.sub(target, markdown)
