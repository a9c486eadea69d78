"""torchrun's flags -> raydist's overrides, a note that a flag is not needed, or a refusal. (driver)

The names, defaults and environment variables (PET_…) are those of torch/distributed/run.py (2.15),
repeated here because importing that file takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from raydist.settings.overrides import quote
from raydist.shared import arguments
from raydist.shared.errors import ConfigError, nearest

VALUES = (
    ("nnodes", "1:1", "number of nodes, or MIN:MAX: as many as there is room for at the start"),
    ("nproc-per-node", "1", "ranks on each node: a number, or gpu, cpu, auto"),
    ("max-restarts", "0", "number of failures after which the ranks are restarted"),
    ("role", "", "ROLE_NAME of the ranks"),
    ("log-dir", "", "folder of the runs, with a log of each rank"),
    ("redirects", "0", "1, 2, 3, or LOCAL_RANK:…: output that goes to the log only"),
    ("tee", "0", "1, 2, 3, or LOCAL_RANK:…: output that goes to the log and to the screen"),
    ("local-ranks-filter", "", "local ranks whose output goes to the screen"),
    ("rdzv-id", "", "TORCHELASTIC_RUN_ID of the ranks"),
    ("numa-binding", "", "node, socket, exclusive or core-complex: CPUs near a rank's GPU"),
)
SWITCHES = {
    "module": "the script is a module: python -m",
    "no-python": "the script is a program, not a Python file",
    "run-path": "accepted: every script runs in the rank's own process",
    "standalone": "accepted",
}
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
STORE = "raydist starts the store in which ranks rendezvous"
NEEDLESS = {
    "rdzv-backend": STORE,
    "rdzv-endpoint": STORE,
    "rdzv-conf": f"{STORE}; set backend.timeout_s=SECONDS",
    "master-addr": "raydist chooses it",
    "master-port": "raydist chooses a free one",
    "local-addr": "it is the node's address in Ray; set fabric.interface=NAME for another",
    "monitor-interval": "raydist notices the end of a rank at once",
    "start-method": "a script always runs in a separate process; set start=spawn for a new "
    "interpreter",
    "event-log-handler": "events are in events.jsonl of the run folder",
    "log-line-prefix-template": "lines are shown as [RANK] line",
    "shutdown-timeout": "the ranks of a failed run are ended at once",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP stop the run cleanly",
    "duplicate-stdout-filters": "each rank's log has its whole output",
    "duplicate-stderr-filters": "each rank's log has its whole output",
}
"""Flags with a value that have no effect here, and why."""
REFUSED = {
    "virtual-local-rank": "every rank sees all GPUs of its node; call "
    "torch.cuda.set_device(LOCAL_RANK)",
    "logs-specs": "raydist writes the logs of the ranks itself",
}


class TorchrunParser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            flags = [
                flag
                for action in self._actions
                for flag in action.option_strings
                if "_" not in flag
            ]
            raise ConfigError.of(
                unknown[1], None, "torchrun has no such flag", guess=nearest(unknown[1], flags)
            )
        raise ConfigError(message)


def torchrun_parser(environ: Mapping[str, str]) -> TorchrunParser:
    """Return a parser for torchrun's command line.

    It has flags with - or _, then the script, then the script's arguments.
    """
    parser = TorchrunParser(
        prog="raydist launch",
        usage="%(prog)s [torchrun's flags] [raydist's settings, as in scale.cpus=4] script [the "
        "script's arguments]",
        description="Runs a torchrun program on the nodes of a Ray cluster. Start it once, on "
        "any node of the cluster.",
        allow_abbrev=False,
    )

    for name, default, text in VALUES:
        parser.add_argument(
            *spellings(name), default=environ.get(variable(name), default), help=text, metavar="…"
        )
    for name, text in SWITCHES.items():
        on = environ.get(variable(name), "0") not in ("", "0")
        parser.add_argument(*spellings(name), action="store_true", default=on, help=text)
    for name, why in NEEDLESS.items():
        parser.add_argument(
            *spellings(name),
            default=environ.get(variable(name)),
            help=f"not needed: {why}",
            metavar="…",
        )
    parser.add_argument(*spellings("logs-specs"), help=argparse.SUPPRESS)
    parser.add_argument(  # a switch: the word after it is the script
        *spellings("virtual-local-rank"), action="store_const", const="", help=argparse.SUPPRESS
    )
    parser.add_argument(
        *spellings("node-rank"),
        default="0",
        help="not needed: raydist is started once",
        metavar="…",
    )
    parser.add_argument(
        "--time", action="store_true", help="raydist's: show at the end where the time went"
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def spellings(name: str) -> list[str]:
    """Return the spellings of a flag that torchrun accepts."""
    short = [SHORT[name]] if name in SHORT else []
    return [*short, *dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))]


def variable(name: str) -> str:
    """Return the environment variable that has a flag's default."""
    return f"PET_{name.replace('-', '_').upper()}"


class Translated(NamedTuple):
    """torchrun's command line in raydist's terms."""

    overrides: list[str]
    notes: list[str]
    """What to print before the run."""
    runs: str
    """The folder of all runs; empty if none was named."""
    flags: list[str]
    """Flags of raydist.train."""


def translate_torchrun(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Translated:
    """Return the overrides for torchrun's command line; ConfigError for what raydist cannot do."""
    arguments = vars(torchrun_parser(environ).parse_args(list(argv)))
    flags = {name.replace("_", "-"): value for name, value in arguments.items()}
    own = list(itertools.takewhile(is_override, flags["rest"]))
    program = flags["rest"][len(own) :]
    if not program:
        example = "raydist launch [flags] train.py [its arguments]"
        raise ConfigError(f"no script is named; type {example}", "script", None, example)
    if program[0].startswith("-") and program[0] != "--":
        example = f"raydist launch {program[0]} … {shlex.join(own)} train.py"
        why = "torchrun's flags come before raydist's settings"
        raise ConfigError(f"{program[0]}: {why}; type {example}", program[0], None, example)
    for name, why in REFUSED.items():
        if flags[name] is not None:
            raise ConfigError.of(f"--{name}", flags[name] or None, f"{why}; leave this flag out")
    if flags["node-rank"] != "0":
        raise ConfigError.of(
            "--node-rank",
            flags["node-rank"],
            "raydist is started once, not on every node",
            "--nnodes N",
        )
    notes = [
        f"--{name} is not needed: {why}"
        for name, why in NEEDLESS.items()
        if flags[name] is not None
    ]
    overrides = [
        "backend=script",
        *node_overrides(flags["nnodes"]),
        *rank_overrides(flags["nproc-per-node"]),
        *restart_overrides(flags["max-restarts"]),
        *([f"env.ROLE_NAME={flags['role']}"] if flags["role"] else []),
        *([f"env.TORCHELASTIC_RUN_ID={flags['rdzv-id']}"] if flags["rdzv-id"] else []),
        *([f"scale.numa={flags['numa-binding']}"] if flags["numa-binding"] else []),
        f"watch.output={output_ranks({**flags, **typed_shape(own)})}",
    ]
    typed = typed_settings(own)
    overrides = [text for text in overrides if text.partition("=")[0] not in typed]
    if any(text.startswith("scale.max_nodes=") for text in overrides):
        notes.append(
            f"--nnodes {flags['nnodes']}: the script is restarted when a node joins, and a lost "
            "node counts towards --max-restarts, as with torchrun"
        )
    overrides += [
        *own,
        *program_overrides(program, module=flags["module"], python=not flags["no-python"]),
    ]
    return Translated(overrides, notes, flags["log-dir"], ["--time"] if flags["time"] else [])


def is_override(text: str) -> bool:
    """Report whether this is a raydist override such as scale.cpus=4, not the script's name."""
    return re.match(r"[+~]*[a-z_][\w./@-]*=", text) is not None


def typed_shape(own: Sequence[str]) -> dict[str, str]:
    """Return the numbers of nodes and ranks that raydist's own overrides set, as torchrun's flags.

    Their order does not matter: settings win over a choice of their group.
    """
    typed = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in own)}
    nodes, per_node = named_size(typed.get("scale", ""))
    shape = {
        "nnodes": typed.get("scale.max_nodes") or typed.get("scale.nodes") or nodes,
        "nproc-per-node": typed.get("scale.per_node") or per_node,
    }
    return {name: value for name, value in shape.items() if value}


def named_size(scale: str) -> tuple[str, str]:
    """Return the numbers of nodes, and of ranks on each, that a choice of scale names.

    They are in its name, as in `2x8`, or in a file of the user's own, `conf/scale/NAME.yaml`. Of a
    choice such as cluster, whose nodes are counted later, the first one is its name; a number of
    ranks that is not there is empty.
    """
    if size := re.fullmatch(r"(?:\d+\.\.)?(\d+)(?:x(\d+))?", scale):
        nodes, per_node = size.groups(default="")
        return nodes, per_node
    file = Path("conf", "scale", f"{scale}.yaml")
    if not file.is_file():
        return scale, ""
    import yaml

    known: object = None
    with suppress(OSError, ValueError, yaml.YAMLError):  # Hydra reports it
        known = yaml.safe_load(file.read_text(encoding="utf-8"))
    sizes = known if isinstance(known, dict) else {}
    nodes = sizes.get("max_nodes") or sizes.get("nodes") or scale
    return str(nodes), str(sizes.get("per_node") or "")


def typed_settings(own: Sequence[str]) -> set[str]:
    """Return the settings that raydist's own overrides set, for which no flag counts."""
    typed = {key.lstrip("+"): value for key, _, value in (text.partition("=") for text in own)}
    # Settings win over a choice of their group: those of torchrun's defaults would, too.
    of_nodes = {"scale.nodes", "scale.max_nodes"} if "scale" in typed else set()
    of_ranks = {"scale.per_node"} if named_size(typed.get("scale", ""))[1] else set()
    return {*typed, *of_nodes, *of_ranks}


def node_overrides(nnodes: str) -> list[str]:
    """Return the overrides for `--nnodes 2` or `--nnodes 2:4`."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", nnodes)
    if not match:
        raise ConfigError.of(
            "--nnodes", nnodes, "must be a number, or MIN:MAX", "--nnodes 2", "--nnodes 2:4"
        )
    least, most = int(match[1]), int(match[2] or match[1])
    return [f"scale.nodes={least}"] + ([f"scale.max_nodes={most}"] if most != least else [])


def rank_overrides(per_node: str) -> list[str]:
    """Return the overrides for --nproc-per-node.

    Its value is a number, gpu, cpu or auto (gpu if there are GPUs, else cpu).
    """
    if per_node.isdecimal():
        return [f"scale.per_node={int(per_node)}"]
    choices = {
        "cpu": ["scale.gpus=0", f"scale.per_node={os.cpu_count() or 1}"],
        "gpu": ["scale.gpus=1"],
        "auto": [],
    }
    if per_node not in choices:
        cause = "must be a number, gpu, cpu or auto"
        raise ConfigError.of("--nproc-per-node", per_node, cause, "--nproc-per-node auto")
    return choices[per_node]


def restart_overrides(max_restarts: str) -> list[str]:
    """Return the overrides for `--max-restarts 3`, a limit on the whole run, however long."""
    if not max_restarts.isdecimal():
        raise ConfigError.of("--max-restarts", max_restarts, "must be a number", "--max-restarts 3")
    return [f"restart.max={int(max_restarts)}", "restart.window_s=null"]


def output_ranks(flags: Mapping[str, str]) -> str:
    """Return the ranks whose output goes to the screen.

    They are the ranks that are neither redirected (unless teed) nor filtered out. raydist keeps
    stdout and stderr of a rank together, so redirecting one of them redirects both.
    """
    redirected, teed = local_ranks("redirects", flags), local_ranks("tee", flags)
    only = flags["local-ranks-filter"]
    if not only and (not redirected or "all" in teed):
        return "all"
    if "all" in redirected and not teed:
        return "none"
    per_node, most = flags["nproc-per-node"], flags["nnodes"].rpartition(":")[2]
    if not per_node.isdecimal():
        cause = "must be a number if only some ranks' output is shown"
        raise ConfigError.of("--nproc-per-node", per_node, cause, "--nproc-per-node 8")
    if not most.isdecimal():
        cause = "the number of nodes must be known if only some ranks' output is shown"
        raise ConfigError.of("scale", most, cause, f"scale=2x{per_node}")
    nodes = int(most)
    local = [rank for rank in map(str, range(int(per_node))) if not only or rank in only.split(",")]
    shown = [rank for rank in local if {"all", rank} & teed or not {"all", rank} & redirected]
    return (
        ",".join(str(node * int(per_node) + int(rank)) for node in range(nodes) for rank in shown)
        or "none"
    )


def local_ranks(flag: str, flags: Mapping[str, str]) -> set[str]:
    """Return the local ranks of `3`, which means "all", or of `0:1,1:2`."""
    value = flags[flag]
    if value in ("0", "1", "2", "3"):
        return set() if value == "0" else {"all"}
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        cause = "must be 0, 1, 2, 3, or LOCAL_RANK:STREAMS"
        raise ConfigError.of(f"--{flag}", value, cause, f"--{flag} 3", f"--{flag} 0:3,1:2")
    return {
        rank
        for rank, _, streams in (pair.partition(":") for pair in value.split(","))
        if streams != "0"
    }


def kept_as_typed(arg: str) -> str:
    """Return an argument so that neither a rank nor OmegaConf replaces a part of it.

    The program may have interpolations of its own: `out=${data.root}/x`. OmegaConf takes a dollar
    behind a backslash for itself, and two backslashes before an interpolation for one.
    """
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", arguments.keep_braces(arg))


def program_overrides(program: Sequence[str], module: bool, python: bool) -> list[str]:
    """Return script= and args=, each argument unchanged."""
    if program[0] == "--" and len(program) > 1:  # `raydist launch --nnodes 2 -- train.py`
        program = program[1:]
    name, args = program[0], list(program[1:])
    if module and not python:
        raise ConfigError.of(
            "--no-python", None, "only one of these flags", "--module", text="--module --no-python"
        )
    if module:
        name = f"-m {name}"
    elif python and not name.endswith(".py"):
        name, args = sys.executable, ["-u", name, *args]
    elif not python and name.endswith(".py"):
        name, args = "/usr/bin/env", [name if "/" in name else f"./{name}", *args]
    plain = re.fullmatch(r"[-\w./ ]*", name, re.ASCII)
    return [
        f"script={name if plain else quote(name)}",
        f"args={shlex.join(map(kept_as_typed, args))}",
    ]
