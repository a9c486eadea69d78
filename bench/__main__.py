"""`python -m bench [launch|scripts|steps|imports …] [--rounds N] [--ranks 2,4]`: the tables of
bench/README.md."""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from bench.measure import machine

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("which", nargs="*", default=["launch", "scripts", "steps", "imports"])
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--ranks", default="2,4,8,16", help="for launch and scripts")
parser.add_argument("--parts", help="gpu: only these, as launch,recovery")
parser.add_argument(
    "--commands", action="store_true", help="launch: whole commands, until they have exited"
)
arguments = parser.parse_args()
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # each side's files are compiled once, as those of installed packages
tables = []
for name in [
    "commands" if arguments.commands and each == "launch" else each for each in arguments.which
]:
    with_ranks = name in ("launch", "scripts", "commands")
    more = (
        {"ranks": tuple(int(ranks) for ranks in arguments.ranks.split(","))} if with_ranks else {}
    )
    if name == "gpu" and arguments.parts:
        more = {"parts": arguments.parts.split(",")}
    tables.append(
        f"## {name}\n\n"
        + "\n".join(import_module(f"bench.{name}").main(rounds=arguments.rounds, **more))
    )
print(f"\n{machine()}\n\n" + "\n\n".join(tables))
