"""What a person sees, whole: each text of raydist beside its golden file. Wording is asserted here,
and only here.

`python -m tests.test_golden` writes the files anew, in tests/golden: read what has changed before
it is committed.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from raydist import train
from raydist.cluster import connect
from raydist.cluster.nodes import Node, NodeType
from raydist.launch import warm_server
from raydist.node import probe
from raydist.reporting import wording
from raydist.reporting.console import Console
from raydist.reporting.failures import Failures
from raydist.reporting.page_files import Pages
from raydist.settings.config import Watch
from raydist.shared.kinds import Event
from raydist.sweeps.table import (
    SweepCommands,
    SweepScreen,
    summary_facts,
    sweep_headline,
    table_rows,
)
from raydist.sweeps.trial import Trial, WatchedTrial, parse_objectives, unreported_objective
from raydist.tools import bandwidth, doctor, horovod, launch, plan, submit, sweep, warm
from tests import canned, machines
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "golden"
Main = Callable[[Sequence[str]], int]
COMMANDS: dict[str, Main] = {
    "train": train.main,
    "launch": launch.main,
    "submit": submit.main,
    "plan": plan.main,
    "doctor": doctor.main,
    "bandwidth": bandwidth.main,
    "horovod": horovod.main,
    "warm": warm.main,
    "sweep": sweep.main,
}


# Surfaces: each gives back one text, and finds itself in an empty folder


def settings(here: Path) -> str:
    """`raydist train --help`; how many models torchvision has is torchvision's business."""
    return re.sub(r"\d+ image models", "N image models", output_of("train --help"))


def tools(here: Path) -> str:
    """`--help` of each tool, an entry to a line: Python's versions differ in how they break it and
    repeat a value."""
    lines = ["launch --help", "submit --help", "plan --help", "doctor --help", "bandwidth --help"]
    lines += [
        "horovod --help",
        "horovod check --help",
        "horovod build --help",
        "warm --help",
        "warm --ned",
    ]
    with patch.dict(os.environ, COLUMNS="999"):
        text = "\n".join(output_of(line) for line in lines)
    text = re.sub(r"\n {20,}", "  ", text)
    text = re.sub(r"(?m)^( +-[\w-]+) \S+(, --)", r"\1\2", text)
    text = re.sub(r"(?m)^(  --[\w-]+) …(, --)", r"\1\2", text)
    text = re.sub(r"compiled at a time \(\d+\)", "compiled at a time (N)", text)
    return re.sub(r"(?m)(?<=\S) {2,}", "  ", text)


def plans(here: Path) -> str:
    """Return the plan on this machine, on two nodes that nobody has looked at, on two that are
    known, and on none."""
    own, many, types = (
        canned.nodes(1),
        canned.nodes(2, gpus=8),
        [NodeType("gpu", {"CPU": 8, "GPU": 8}, 20)],
    )
    numa = replace(machines.dgx(), cpus=machines.Processors())
    busy = [many[0], replace(many[1], free={"CPU": 16.0, "GPU": 1.0})]
    with patch.dict(
        os.environ, RAYDIST_RUNS="/data/runs"
    ):  # columns are as wide as what is in them
        return "\n".join(
            [
                output_of("plan scale=1x2", here, own, box=machines.plain_box(), running=None),
                output_of(
                    "plan scale=2x8 backend=nccl env.WANDB_API_KEY=hush", here, many, box=numa
                ),
                output_of("plan scale=2x2 scale.spares=1", here, canned.nodes(3, gpus=2)),
                output_of("plan scale=2x2 backend=gloo scale.gpus=4", here, busy),
                output_of("plan scale=20x4 init_method=file", here, own, types),
            ]
        )


def reports(here: Path) -> str:
    """Return the reports of the doctor about healthy and unhealthy clusters."""
    with patch.object(probe, "interfaces", lambda: canned.INTERFACES):
        doctor_reports = [
            canned.healthy(),
            canned.unplaced(),
            canned.failing(),
            canned.misconfigured(here),
        ]
    texts = []
    for report in doctor_reports:
        with patch.object(doctor, "examine_cluster", lambda job, timeout, report=report: report):
            texts.append(output_of("doctor"))
    return "\n".join(texts)


def console(here: Path) -> str:
    """Return the output of whole runs; the one with everything also with progress=none."""
    runs = [canned.finished, canned.failed, canned.stopped, canned.never_placed, canned.program]
    texts = [
        f"# {run.__name__}\n{screen(run(), Watch(progress='lines', output='all'))}" for run in runs
    ]
    return "\n".join([*texts, f"# quiet\n{screen(canned.finished(), Watch(progress='none'))}"])


def checks(here: Path) -> str:
    """Return what is said of the steps after a restart or a resume."""
    return "\n".join(canned.checks())


def screen(events: Sequence[Event], settings: Watch) -> str:
    stream = io.StringIO()
    failures = Failures()
    with Console(settings, stream, failures) as console:
        for happened in events:
            failures.add(happened)
            console(happened)
    return stream.getvalue()


def sweeps(here: Path) -> str:
    """Return a sweep's lines, its table in a terminal of 80 columns, and its summary, with one
    objective and with two."""
    files = {
        "finished": 0.31,
        "paused": 0.62,
        "failed": 1.5,
        "ended": 0.9,
        "stopped": 0.4,
        "running": 0.5,
    }
    trials = [
        Trial(
            0, {"optim.lr": "0.03215846508121117", "job.args.a_setting_with_a_long_name": "false"}
        )
    ]
    for number, (state, loss) in enumerate(files.items(), 1):
        values = {"test_loss": loss, "accuracy": 1 - loss / 2}
        why = "rank 1 failed at step 12: ValueError" if state == "failed" else ""
        settings = {
            key: value.replace("3", str(number)) for key, value in trials[0].settings.items()
        }
        trials.append(
            Trial(number, settings, state, step=8 * number, values=values, why=why, wall_s=number)  # type: ignore[arg-type]
        )
    text = []
    for wanted in (
        parse_objectives("min:test_loss"),
        parse_objectives("min:test_loss,max:accuracy"),
    ):
        stream, (live := WatchedTrial(wanted)).metrics["steps"] = io.StringIO(), 96
        sweep_screen = SweepScreen(Watch(progress="lines"), wanted, stream)
        for trial in trials[:4]:
            sweep_screen.changed(trial, trials)
        text += [stream.getvalue(), *wording.table([*table_rows(trials, {6: live}, wanted)], 80)]
        stream.truncate(0)
        facts = summary_facts(
            trials,
            wanted,
            {"optim.lr": 0.81},
            "runs/a_sweep",
            SweepCommands(
                lambda trial: f"(trial {trial.number})", "raydist sweep sweep.resume=F", False
            ),
        )
        sweep_screen.summary(facts, sweep_headline(trials, 35.2, "stopped"), good=False)
        text.append(stream.getvalue().lstrip("\0"))
    return "\n".join(text)


def failures(here: Path) -> str:
    """Return the page of each kind of failure."""
    texts = []
    for what in canned.FAILURES:
        (folder := here / what.replace("/", " ")).mkdir()
        failures = Failures()
        read = Pages(folder, failures)
        for happened in canned.failure(what):
            failures.add(happened)
            read(happened)
        page = (folder / "blame-1.txt").read_text(encoding="utf-8")
        texts.append(f"# {what}\n{page.replace(str(folder), canned.FOLDER)}")
    return "\n".join(texts)


def refusals(here: Path) -> str:
    """Show a wrong command line of each kind and its error. Nothing is started."""
    wrong_files(here)
    many = canned.nodes(2, gpus=8)
    text = "\n".join(
        output_of(line, here, many if line.startswith(("plan", "sweep")) else ())
        for line in REFUSED.strip().splitlines()
    )
    for objective in ("min:los", "max:bleu"):  # what a sweep says once its first trial has finished
        trial = Trial(0, {}, metrics={"loss": 0.1, "accuracy": 0.9, "steps": 48})
        text += f"{unreported_objective(trial, parse_objectives(objective))}\n"
    return re.sub(r"\d+ are known", "N are known", text)


def wrong_files(here: Path) -> None:
    """Files of a person's own, wrong in one way each."""
    for name, text in {
        "conf/optim/broken.yaml": "name: [sgd\nlr: 1\n",
        "conf/optim/unknown.yaml": "nam: sgd\n",
        "conf/optim/nested.yaml": "defaults: [missing]\n",
        "jobs/mine.py": "def job(config, hidden=3): ...\ndef needs(config, width): ...\n",
        "odd.env": "A B=1\n",
    }.items():
        machines.write(here / name, text.rstrip("\n"))


REFUSED = """
train optm.lr=0.1
train lr=0.1
train optim.epochs=3
train optim.lr
train =3
train nccl
train jobs/mine.py
train train=3
train dir=x
train train.epochs=abc
train optim.lr=fast
train data.shuffle=maybe
train env=5
train optim.lr=-1
train train.precision=fp8
train backend=ncl
train job=[digits,mnist]
train model=resnet81
train optim=broken
train optim=unknown
train optim=nested
train job=jobs/mien.py
train job=digit
train job=jobs/mine.py:jbo
train job=jsn.tool:main
train job=mine job.args.hiden=1
train job=jobs/mine.py:needs
train scale=0x2
train scale=axb
train scale=4
train scale=2x8 scale=1x2
train scale.nodes=3 scale.max_nodes=2
train scale.spares=1 restart.max=0
train data.global_batch=10 train.accumulate=4
train optim.lr=0.1,0.2
train optim.lr=[1
train name=a=b
train +optim.lr=1
train ~optim.lr
train 'name=${nme}'
train resume=/nope/x
train resume=ftpp://x
train storage=s3://
train checkpoint.best=accuracy
train watch.output=first
train env_file=odd.env
train working_dir=nope
train pip=[nope.txt]
train script=nope.py
train script=jobs/mine.py 'args={rnk}'
train backend=horovod init_method=tcp
train parallel.pp=3 scale=1x4
train parallel=pp data.batch_size=7 scale=1x2
train fabric=ethernet fabric.strict=true
train hydra.run.dir=jobs/mine.py/x
train --multrun
train --cfg jobb
train --multirun --cfg job
train --resolve
train --config-name nope
train --config-dir cnf
plan scale=3x8
plan scale=2x8 scale.gpus=1.5
plan scale=1x2 scale.gpus=0.5 backend=nccl
plan scale=1x1 scale.labels.zone=a
plan scale=1x1 scale.resources.TPU=1
plan --jsn
doctor --timeout soon
doctor --jsn
bandwidth --ops all_reduc
bandwidth --min 1G --max 1K
bandwidth --iters none
bandwidth --pairs backend=horovod
bandwidth --pair
submit --adress http://head:8265
submit --working-dir cnf
submit -- lr=1
sweep 'optim.lr=interval(0.1,0.01)'
sweep 'optim.lr=interval(0.1,0.1)'
sweep 'optim.lr=tag(log,interval(0,1))'
sweep 'data.batch_size=range(9,9)'
sweep optim.lr=0.1,x
sweep 'optim.lr=interval(0.01,0.1)'
sweep 'optim.lr=interval(0.01,0.1)' sweep.sampler=grid
sweep 'optim.lr=interval(0.01,0.1)' sweep.sampler=tpe
sweep optim.lr=0.1,0.2 sweep.sampler=grid sweep.trials=1
sweep 'optim.lr=interval(0.01,0.1)' model=mlp,small_cnn sweep.sampler=cmaes sweep.objective=min:loss
sweep 'optim.lr=interval(0.01,0.1)' seed=1,2 sweep.sampler=cmaes sweep.objective=min:loss,max:accuracy
sweep optim.lr=0.1,0.2 sweep.prune=asha sweep.objective=min:loss,max:accuracy
sweep optim.lr=0.1,0.2 sweep.objective=loss
sweep optim.lr=0.1,0.2 sweep.seed=1,2
sweep optim.lr=0.1,0.2 group=inline
sweep optim.lr=0.1,0.2 resume=auto
sweep sweep.resume=nowhere
sweep scale=1x1,1x64
launch
launch --nnodes two train.py
launch --nproc-per-node all train.py
launch --max-restarts some train.py
launch --node-rank 1 train.py
launch --logs-specs console train.py
launch --rdzv-endpont head:29500 train.py
launch --tee 5 train.py
launch --module --no-python train
"""


# How they are gathered and compared

SURFACES: dict[str, Callable[[Path], str]] = {
    "help": settings,
    "tools": tools,
    "plan": plans,
    "doctor": reports,
    "console": console,
    "failures": failures,
    "checks": checks,
    "refusals": refusals,
    "sweep": sweeps,
}


def output_of(
    line: str,
    here: Path = Path(),
    nodes: Sequence[Node] = (),
    types: Sequence[NodeType] = (),
    box: machines.Box | None = None,
    running: str | None = "10.0.0.1:6379",
) -> str:
    """Return a command line and its output, on a cluster of these nodes, each with this box if it
    is given."""
    name, *words = shlex.split(line)
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        stack.enter_context(pictured(here, nodes, types, box, running))
        try:
            code = COMMANDS[name](words)
        except SystemExit as ended:  # argparse's own
            code = int(ended.code or 0)
    prompt = f"raydist {line}"
    return f"$ {prompt}\n{output.getvalue()}" + (f"-> {code}\n" if code else "")


@contextlib.contextmanager
def pictured(
    here: Path,
    nodes: Sequence[Node],
    types: Sequence[NodeType],
    box: machines.Box | None,
    running: str | None,
) -> Iterator[None]:
    """Let this be the cluster that is there; no job is ever run on it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(train, "run_composed", None))
        stack.enter_context(patch.object(warm_server, "begin", lambda overrides: None))
        stack.enter_context(patch.object(connect, "running_address", lambda: running))
        stack.enter_context(patch.object(connect, "start_or_join", lambda job: False))
        if nodes:
            stack.enter_context(
                patch.object(connect, "connect", lambda job, events: contextlib.nullcontext())
            )
        stack.enter_context(patch.object(connect, "alive_nodes", lambda: list(nodes)))
        stack.enter_context(patch.object(connect, "node_types", lambda: list(types)))
        stack.enter_context(patch.object(connect, "local_node", lambda job: nodes[0]))
        stack.enter_context(
            patch.object(probe, "interfaces", lambda: canned.INTERFACES if box else {})
        )
        if box is not None:
            look = functools.partial(canned.facts, Path(tempfile.mkdtemp(dir=here)), box)
            stack.enter_context(
                patch.object(plan, "expected_facts", lambda job, made, lead: look(lead.node))
            )
        yield


@contextlib.contextmanager
def alone() -> Iterator[Path]:
    """An empty folder to stand in, and no environment but this."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "RAYDIST_LEDGER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
        if name in os.environ
    }
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        here = Path(folder).resolve()
        env = {
            **kept,
            "HOME": str(here),
            "COLUMNS": "100",
            "LINES": "50",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }
        os.chdir(here)
        try:
            with patch.dict(os.environ, env, clear=True):
                yield here
        finally:
            os.chdir(before)


def text_of(name: str) -> str:
    """Return the text of a surface without what differs between machines: folders, times, trailing
    spaces."""
    with alone() as here:
        text = SURFACES[name](here)
    for path, word in {str(here): "<here>", str(ROOT): "<raydist>"}.items():
        text = text.replace(path, word)
    text = re.sub(r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b", "<time>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", Path(canned.FOLDER).name, text)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("name", SURFACES)
def test_a_person_sees_what_the_golden_file_has(name: str) -> None:
    kept, now = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8"), text_of(name)
    lines = difflib.unified_diff(
        kept.splitlines(), now.splitlines(), f"golden/{name}.txt", "now", lineterm=""
    )
    if kept != now:
        pytest.fail(
            "\n".join(["if it is meant: python -m tests.test_golden", *lines]), pytrace=False
        )


def test_each_golden_file_is_of_a_surface() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*SURFACES}


if __name__ == "__main__":
    for each in SURFACES:
        (GOLDEN / f"{each}.txt").write_text(text_of(each), encoding="utf-8")
