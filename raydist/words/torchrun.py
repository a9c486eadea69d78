"""torchrun's flags -> raydist's words: each is obeyed, noted as needless, or refused with what to say instead. (driver)

Their names, defaults and environment variables (PET_…) are those of torch/distributed/run.py (2.15), which is not asked
for them because importing it takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from raydist import script
from raydist.errors import ConfigError, nearest

Flags = tuple[tuple[str, str, str], ...]
VALUES: Flags = (
    ("nnodes", "1:1", "nodes, or MIN:MAX of them: as many of these as there is room for when it starts"),
    ("nproc-per-node", "1", "ranks on each node: a number, or gpu, cpu, auto"),
    ("max-restarts", "0", "failures after which the ranks are started again"),
    ("role", "", "ROLE_NAME of the ranks"),
    ("log-dir", "", "folder of the runs, with a log of each rank"),
    ("redirects", "0", "1, 2, 3, or LOCAL_RANK:…: output that goes to the log only"),
    ("tee", "0", "1, 2, 3, or LOCAL_RANK:…: output that goes to the log and to the screen"),
    ("local-ranks-filter", "", "local ranks whose output goes to the screen"),
    ("rdzv-id", "", "TORCHELASTIC_RUN_ID of the ranks"),
)
SWITCHES: Flags = (
    ("module", "", "the script is a module: python -m"),
    ("no-python", "", "the script is a program of its own"),
    ("run-path", "", "accepted: every script runs in the rank itself"),
    ("standalone", "", "accepted"),
)
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
NEEDLESS = {
    "rdzv-backend": "ranks meet in a store that raydist holds",
    "rdzv-endpoint": "ranks meet in a store that raydist holds",
    "rdzv-conf": "ranks meet in a store that raydist holds; say backend.timeout_s=SECONDS",
    "master-addr": "raydist finds it",
    "master-port": "raydist takes a free one and holds it",
    "local-addr": "it is the node's address in Ray; say fabric.interface=NAME for another",
    "monitor-interval": "an end is heard at once",
    "start-method": "a script is always run by itself; say start=spawn for a new interpreter",
    "event-log-handler": "events are in events.jsonl of the run folder",
    "log-line-prefix-template": "lines are shown as [RANK] line",
    "shutdown-timeout": "ranks of a failed run are ended at once",
    "signals-to-handle": "SIGINT, SIGTERM and SIGHUP end the run in order",
    "duplicate-stdout-filters": "each rank's whole output is in its log",
    "duplicate-stderr-filters": "each rank's whole output is in its log",
}
"""Flags that have a value and change nothing here, and why."""
REFUSED = {
    "virtual-local-rank": "every rank sees all GPUs of its node, and torch.cuda.set_device(LOCAL_RANK) picks",
    "numa-binding": "raydist binds no ranks to cores",
    "logs-specs": "raydist writes a log for each rank by itself",
}


class Parser(argparse.ArgumentParser):
    """Refuses as the rest of raydist does."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            flags = [flag for action in self._actions for flag in action.option_strings if "_" not in flag]
            close = nearest(unknown[1], flags)
            raise ConfigError(
                f"{unknown[1]}: torchrun has no such flag" + (f"; did you mean {close}?" if close else "")
            )
        raise ConfigError(message)


def parser(environ: Mapping[str, str]) -> Parser:
    """torchrun's command line: flags with - or _, then the script, then what is the script's own."""
    made = Parser(
        prog="python -m raydist.tools.launch",
        usage="%(prog)s [torchrun's flags] [raydist's words, as scale.cpus=4] script [the script's arguments]",
        description="Runs what torchrun runs, on the nodes of a Ray cluster: once, from anywhere in it.",
        allow_abbrev=False,
    )
    for name, default, text in VALUES:
        made.add_argument(*spelled(name), default=environ.get(variable(name), default), help=text, metavar="…")
    for name, _, text in SWITCHES:
        on = environ.get(variable(name), "0") not in ("", "0")
        made.add_argument(*spelled(name), action="store_true", default=on, help=text)
    for name, why in NEEDLESS.items():
        made.add_argument(*spelled(name), default=environ.get(variable(name)), help=f"needless: {why}", metavar="…")
    for name in REFUSED:
        made.add_argument(*spelled(name), nargs="?", const="", help=argparse.SUPPRESS)
    made.add_argument(*spelled("node-rank"), default="0", help="needless: it is started once", metavar="…")
    made.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def spelled(name: str) -> list[str]:
    """A flag in torchrun's spellings."""
    short = [SHORT[name]] if name in SHORT else []
    return [*short, *dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))]


def variable(name: str) -> str:
    """The environment variable that a flag has its default from."""
    return f"PET_{name.replace('-', '_').upper()}"


class Said(NamedTuple):
    """A command line of torchrun's in raydist's words."""

    words: list[str]
    notes: list[str]
    """What a person should be told."""
    runs: str
    """The folder of all runs, if one was named."""


def translate(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Said:
    """The command line in raydist's words; ConfigError for what can't be said in them."""
    typed = vars(parser(environ).parse_args(list(argv)))
    rest: list[str] = typed["rest"]
    own = list(itertools.takewhile(setting, rest))
    rest = rest[len(own) :]
    if not rest:
        raise ConfigError("which script? Say python -m raydist.tools.launch [flags] train.py [its arguments]")
    for name, why in REFUSED.items():
        if typed[key(name)] is not None:
            raise ConfigError(f"--{name}: {why}; leave it out")
    if typed["node_rank"] != "0":
        raise ConfigError(
            f"--node-rank {typed['node_rank']}: raydist is started once, not on every node; say --nnodes N alone"
        )
    notes = [f"--{name} is not needed: {why}" for name, why in NEEDLESS.items() if typed[key(name)] is not None]
    if any(word.startswith("scale.max_nodes=") for word in nodes(typed["nnodes"])):
        notes.append(f"--nnodes {typed['nnodes']}: the script is started again when a node comes, as torchrun does it")
    made = [
        "backend=script",
        *nodes(typed["nnodes"]),
        *ranks(typed["nproc_per_node"]),
        *restarts(typed["max_restarts"]),
    ]
    made += [f"env.ROLE_NAME={typed['role']}"] if typed["role"] else []
    made += [f"env.TORCHELASTIC_RUN_ID={typed['rdzv_id']}"] if typed["rdzv_id"] else []
    made += [f"watch.output={shown(typed)}"]
    chosen = {word.partition("=")[0] for word in own}
    made = [word for word in made if word.partition("=")[0] not in chosen]
    made += [*own, *program(rest, module=typed["module"], python=not typed["no_python"])]
    return Said(made, notes, typed["log_dir"])


def key(name: str) -> str:
    return name.replace("-", "_")


def setting(word: str) -> bool:
    """Whether a word is raydist's own, as scale.cpus=4, and not the script's name."""
    return re.match(r"[+~]*[a-z_][\w./@-]*=", word) is not None


def nodes(asked: str) -> list[str]:
    """--nnodes 2, or 2:4."""
    least, _, most = asked.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ConfigError(f"--nnodes {asked}: say a number, or MIN:MAX as in --nnodes 2:4")
    found = [f"scale.nodes={int(least)}"]
    return found + ([f"scale.max_nodes={int(most)}"] if most and int(most) != int(least) else [])


def ranks(asked: str) -> list[str]:
    """--nproc-per-node 8, gpu, cpu or auto (gpu where there are any, else cpu)."""
    if asked.isdecimal():
        return [f"scale.per_node={int(asked)}"]
    if asked == "cpu":
        return ["scale.gpus=0", f"scale.per_node={os.cpu_count() or 1}"]
    if asked in ("gpu", "auto"):
        return ["scale.gpus=1"] if asked == "gpu" else []
    raise ConfigError(f"--nproc-per-node {asked}: say a number, gpu, cpu or auto")


def restarts(asked: str) -> list[str]:
    """--max-restarts 3: in the whole run, however long it takes."""
    if not asked.isdecimal():
        raise ConfigError(f"--max-restarts {asked}: say a number")
    return [f"restart.max={int(asked)}", "restart.window_s=null"]


def shown(typed: Mapping[str, str]) -> str:
    """The ranks whose output goes to the screen: not those that are redirected and not teed, nor those filtered out.

    raydist keeps stdout and stderr of a rank together: whoever redirects one of them redirects both.
    """
    away, teed, only = streams("redirects", typed), streams("tee", typed), typed["local_ranks_filter"]
    if not only and (not away or "all" in teed):
        return "all"
    if "all" in away and not teed:
        return "none"
    each, most = typed["nproc_per_node"], typed["nnodes"].rpartition(":")[2]
    if not each.isdecimal():
        raise ConfigError(f"--nproc-per-node {each}: say a number, for some ranks' output goes elsewhere than others'")
    local = [str(one) for one in range(int(each)) if not only or str(one) in only.split(",")]
    seen = [one for one in local if "all" in teed or one in teed or not ("all" in away or one in away)]
    found = sorted(node * int(each) + int(one) for node in range(int(most)) for one in seen)
    return ",".join(map(str, found)) or "none"


def streams(flag: str, typed: Mapping[str, str]) -> set[str]:
    """The local ranks of `3`, which means all of them, or of `0:1,1:2`."""
    asked = typed[flag]
    if asked in ("0", "1", "2", "3"):
        return set() if asked == "0" else {"all"}
    pairs = [pair.partition(":") for pair in asked.split(",")]
    if not all(rank.isdecimal() and std in ("0", "1", "2", "3") for rank, _, std in pairs):
        raise ConfigError(f"--{flag} {asked}: say 0, 1, 2, 3, or LOCAL_RANK:STREAMS as in --{flag} 0:3,1:2")
    return {rank for rank, _, std in pairs if std != "0"}


def program(rest: Sequence[str], module: bool, python: bool) -> list[str]:
    """script= and args=, each argument as it stands."""
    name, args = rest[0], list(rest[1:])
    if module and not python:
        raise ConfigError("--module and --no-python: say only one of them")
    if module:
        name = f"-m {name}"
    elif python and not name.endswith(".py"):
        name, args = sys.executable, ["-u", name, *args]
    elif not python and name.endswith(".py"):
        name, args = "/usr/bin/env", [name if "/" in name else f"./{name}", *args]
    return [f"script={name}", f"args={shlex.join(map(script.keep_braces, args))}"]
