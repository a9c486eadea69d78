"""versions.py write FILE, or read FILE: the head writes which packages it has, the other nodes
install the same.

`write` runs on the head, `read` on a node: it prints the constraints for pip there. Both run in
~/.raydist/env. `check cluster.yaml` runs where `ray up` is typed, before a node costs money: it
compares the Ray there with the one that the file gives to the nodes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from pathlib import Path

EVERYWHERE = ("ray", "torch", "torchvision")
"""Packages that the head pins even if its image brings them: ranks need the same ones on all
nodes."""


def name_of(distribution: Distribution) -> str:
    """The normalized name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()


def is_own(distribution: Distribution) -> bool:
    """Whether it is in this environment; otherwise the machine's image brings it."""
    return Path(str(distribution.locate_file(""))).is_relative_to(sys.prefix)


def pins() -> dict[str, str]:
    """The packages of this node: name -> version, without its local part (+cu130), which not every
    index has."""
    found: dict[str, str] = {}
    for each in distributions():  # what Python would import comes first
        from_index = each.read_text("direct_url.json") is None
        if from_index and (is_own(each) or name_of(each) in EVERYWHERE):
            found.setdefault(name_of(each), each.version.partition("+")[0])
    return found


def constraints(lines: list[str]) -> Iterator[str]:
    """The head's packages without those that this node's image brings: a torch built for its driver
    stays."""
    brought = {name_of(each) for each in distributions() if not is_own(each)} - {"ray"}
    for line in lines:
        if line.partition("==")[0] not in brought:
            yield line


def other_ray(file: Path) -> str | None:
    """Return what is wrong, and what to type, if this Python's Ray is not the RAY=… of a cluster's
    file."""
    try:
        wanted = re.search(r"^[^#\n]*\bRAY=([\w.]+)", file.read_text(), re.MULTILINE)
    except OSError as error:
        return f"can't read {file}: {error.strerror}"
    if wanted is None:
        return f"{file} has no RAY=VERSION before setup.sh, so the head gets the newest Ray"
    try:
        here = version("ray")
    except PackageNotFoundError:
        return f"{sys.executable} has no Ray: type `make train`, then `. .venv/bin/activate`"
    if here == wanted[1]:
        return None
    return (
        f"this machine has Ray {here}, and the nodes get the RAY={wanted[1]} of {file}: "
        f"type pip install 'ray[default]=={wanted[1]}' here, or write RAY={here} there"
    )


def main(command: str, file: Path) -> None:
    """Write the head's versions to the file, print constraints from it, or check a cluster's
    file."""
    if command == "check":
        if (wrong := other_ray(file)) is not None:
            print(f"raydist: {wrong}", file=sys.stderr)
            sys.exit(2)
    elif command == "write":
        python = f"# Python {sys.version_info[0]}.{sys.version_info[1]}"
        lines = [f"{name}=={version}" for name, version in sorted(pins().items())]
        file.write_text("\n".join([python, *lines, ""]))
    else:
        print("\n".join(constraints(file.read_text().splitlines())))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("type: versions.py check cluster.yaml", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1], Path(sys.argv[2]))
