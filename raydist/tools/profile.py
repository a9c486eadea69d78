"""The command `raydist profile`: the same steps of all ranks, in one file for Perfetto. (driver)

`python -m raydist.tools.profile` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raydist.messages.operate import MakeProfile, TextReply
from raydist.settings.profiled import MAX_STEPS
from raydist.shared.errors import ConfigError
from raydist.tools.command_line import run_tool
from raydist.tools.running import connected_run, receive, run_and_ranks, run_parser, take_options

DESCRIPTION = """\
Profiles the same steps of all ranks by torch's profiler, while the training continues. It writes a
file into the run folder, with a row for each rank and each GPU: open it at
https://ui.perfetto.dev.

    raydist profile steps=5
    raydist profile rank=0,3 steps=2 memory=true
    raydist profile seconds=2
"""
MAX_S = 60.0
"""A profile has megabytes for each rank and second."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit code: 0; 1 if a rank can't be profiled; 2 for a wrong word, if no such run runs, or if
    its program has no steps that raydist sees.
    """

    def profile() -> int:
        more = "; rank=0,2 for some of the ranks; steps=5 (default) or seconds=2; memory=true"
        parser = run_parser("profile", DESCRIPTION, more)
        arguments = parser.parse(sys.argv[1:] if argv is None else argv)
        options, words = take_options(arguments.overrides, ("steps", "seconds", "memory"))
        place, ranks = run_and_ranks("raydist profile", words)
        request = make_request(options, ranks)
        with connected_run(place, arguments) as link:
            link.send(request)
            print(*receive(link, TextReply).lines, flush=True)
            reply = receive(link, TextReply)
        print(*reply.lines, f"profile: {reply.file} in the run folder", sep="\n")
        return 0

    return run_tool(profile)


def make_request(options: dict[str, str], ranks: Sequence[int]) -> MakeProfile:
    """Return the request that a person means. ConfigError: a value is wrong."""
    if {"steps", "seconds"} <= options.keys():
        raise ConfigError.of("seconds", options["seconds"], "steps= is typed too", "steps=5")
    memory = options.get("memory", "false")
    if memory not in ("true", "false"):
        raise ConfigError.of("memory", memory, "must be true or false", "memory=true")
    if "seconds" in options:
        text = options["seconds"]
        seconds = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
        if not 0 < seconds <= MAX_S:
            cause = f"must be more than 0, and {MAX_S:g} or less"
            raise ConfigError.of("seconds", text, cause, "seconds=2")
        return MakeProfile(ranks, 0, seconds, memory == "true")
    text = options.get("steps", "5")
    if not text.isdecimal() or not 0 < int(text) <= MAX_STEPS:
        raise ConfigError.of("steps", text, f"must be 1 to {MAX_STEPS}", "steps=5")
    return MakeProfile(ranks, int(text), 0.0, memory == "true")


if __name__ == "__main__":
    sys.exit(main())
