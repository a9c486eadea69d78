"""Every way to type wrong settings: the error's key, value and suggestion, which its message has
too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import raydist
from raydist import train
from raydist.settings.config import MAX_BATCH, MAX_SECONDS, Job


def seconds(node: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of all settings that are a number of seconds."""
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from seconds(value, f"{prefix}{field.name}.")
        elif field.name.endswith("_s"):
            yield prefix + field.name


REFUSED: dict[str, tuple[Sequence[str], str, Any, str]] = {
    **{
        f"{key} in the home of nobody": (
            [f"{key}='~nobody_here/x.py'"],
            key,
            "~nobody_here/x.py",
            f"{key}=/FULL/PATH",
        )
        for key in ("storage", "resume", "working_dir", "env_file", "script", "job")
    },
    **{
        f"ranks that stay with {word}": (
            [word, "restart.in_place=on"],
            "restart.in_place",
            "on",
            "restart.in_place=auto",
        )
        for word in (
            "backend=nccl",
            "init_method=file",
            "snapshot.every=0",
            "script=train.py",
            "restart=none",
        )
    },
    "unknown key": (["optm.lr=0.1"], "optm.lr", "0.1", "optim.lr=0.1"),
    "key one level off": (["lr=0.1"], "lr", "0.1", "optim.lr=0.1"),
    "key of another part": (["optim.epochs=3"], "optim.epochs", "3", "train.epochs=3"),
    "misspelt key": (["optim.lrr=1"], "optim.lrr", "1", "optim.lr=1"),
    "text for a whole number": (["train.epochs=abc"], "train.epochs", "abc", "train.epochs=10"),
    "half a whole number": (["train.epochs=1.5"], "train.epochs", "1.5", "train.epochs=10"),
    "text for a number": (["optim.lr=fast"], "optim.lr", "fast", "optim.lr=0.05"),
    "no truth value": (["data.shuffle=maybe"], "data.shuffle", "maybe", "data.shuffle=true"),
    "null where a number is needed": (["optim.lr=null"], "optim.lr", "null", "optim.lr=0.05"),
    "a dictionary for a number": (["optim.lr={a:1}"], "optim.lr", "{a:1}", "optim.lr=0.05"),
    "a number for a dictionary": (["env=5"], "env", "5", "env.NAME=VALUE"),
    "a number for a part": (["train=3"], "train", "3", "train.epochs=10"),
    "unknown word": (["train.precision=fp8"], "train.precision", "fp8", "train.precision=fp32"),
    "unknown word of Ray's": (
        ["scale.placement=PACKED"],
        "scale.placement",
        "PACKED",
        "scale.placement=PACK",
    ),
    "wrong optimizer": (["optim.name=adm"], "optim.name", "adm", "optim.name=adam"),
    "wrong init_method": (["init_method=tpc"], "init_method", "tpc", "init_method=tcp"),
    "unknown choice": (["backend=ncl"], "backend", "ncl", "backend=nccl"),
    "a number as choice": (["backend=1"], "backend", "1", ""),
    "no choice": (["backend="], "backend", "", ""),
    "null as choice": (["backend=null"], "backend", "null", "backend=nccl"),
    "two choices at once": (["job=[digits,mnist]"], "job", "[digits,mnist]", "job=digits"),
    "a choice without its group": (["nccl"], "backend", "nccl", "backend=nccl"),
    "a size without its group": (["2x8"], "scale", "2x8", "scale=2x8"),
    "a file without its group": (["jobs/mine.py"], "job", "jobs/mine.py", "job=jobs/mine.py"),
    "a key without a value": (["optim.lr"], "optim.lr", None, "optim.lr=0.05"),
    "a value without a key": (["=3"], "", "3", "backend=gloo"),
    "unknown model": (["model=resnet81"], "model", "resnet81", "model=resnet18"),
    "broken yaml": (["optim=broken"], "", "<here>/conf/optim/broken.yaml", ""),
    "unknown key in a file": (["optim=unknown"], "optim.nam", None, "optim.name"),
    "wrong type in a file": (["optim=mistyped"], "optim.lr", "abc", "optim.lr=0.05"),
    "negative rate": (["optim.lr=-1"], "optim.lr", -1.0, "optim.lr=0.05"),
    "no batch": (["data.batch_size=0"], "data.batch_size", 0, "data.batch_size=1"),
    "negative seed": (["seed=-1"], "seed", -1, "seed=0"),
    "endless rate": (["optim.lr=inf"], "optim.lr", math.inf, "optim.lr=0.05"),
    "endless CPUs": (["scale.cpus=inf"], "scale.cpus", math.inf, "scale.cpus=1.0"),
    "hardly a CPU": (["scale.cpus=0.00001"], "scale.cpus", 0.00001, "scale.cpus=0.0001"),
    "hardly a GPU": (["scale.gpus=0.00001"], "scale.gpus", 0.00001, "scale.gpus=1"),
    "negative resource": (
        ["scale.resources.x=-1"],
        "scale.resources.x",
        -1.0,
        "scale.resources.x=1",
    ),
    "endless resource": (
        ["scale.resources.x=inf"],
        "scale.resources.x",
        math.inf,
        "scale.resources.x=1",
    ),
    "endless buffer": (
        ["backend.horovod.fusion_mb=inf"],
        "backend.horovod.fusion_mb",
        math.inf,
        "backend.horovod.fusion_mb=1",
    ),
    "seed of torch": (["seed=9223372036854775808"], "seed", 2**63, f"seed={2**63 - 1}"),
    "seed of a sampler": (
        ["--multirun", "sweep.seed=4294967296"],
        "sweep.seed",
        2**32,
        f"sweep.seed={2**32 - 1}",
    ),
    "too many ranks": (["scale=1000000000x1"], "scale", "1000000000x1", "scale=2x8"),
    "too many ranks for tp": (
        ["parallel.tp=1000000000000", "scale=1x8"],
        "parallel.tp",
        10**12,
        "parallel.tp=8",
    ),
    "too many stages": (
        ["parallel.pp=1000000000000", "scale=1x8"],
        "parallel.pp",
        10**12,
        "parallel.pp=8",
    ),
    "too many micro-batches": (
        ["parallel=pp", "parallel.microbatches=1000000000", "scale=1x2"],
        "data.batch_size",
        32,
        "data.batch_size=1000000000",
    ),
    **{
        f"more than {most} for {key}": (
            [f"{key}={10 * most}"],
            key,
            10 * most,
            f"{key}={most}",
        )
        for key, most in {
            "data.batch_size": MAX_BATCH,
            "data.global_batch": MAX_BATCH,
            "data.workers": 1024,
            "parallel.microbatches": MAX_BATCH,
            **dict.fromkeys(seconds(Job()), MAX_SECONDS),
        }.items()
    },
    "hang sooner than its limit": (["hang.limit_s=2"], "hang.limit_s", 2.0, "hang.limit_s=3"),
    "best with a space": (
        ["checkpoint.best='max: accuracy'"],
        "checkpoint.best",
        "max: accuracy",
        "checkpoint.best=max:accuracy",
    ),
    "objective with a space": (
        ["--multirun", "sweep.objective='min: loss'"],
        "sweep.objective",
        "min: loss",
        "sweep.objective=min:loss",
    ),
    "a tracker twice": (
        ["track=[tensorboard,tensorboard]"],
        "track",
        "tensorboard,tensorboard",
        "track=[tensorboard]",
    ),
    "arguments of no program": (["args=--epochs 3"], "args", "--epochs 3", "script=FILE.py"),
    "a job's setting for a program": (
        ["script=train.py", "train.epochs=3"],
        "train.epochs",
        "3",
        "args='--epochs 3'",
    ),
    "a job's argument for a program": (
        ["script=train.py", "job.args.x=3"],
        "job.args.x",
        "3",
        "args='--x 3'",
    ),
    "a model for a program": (
        ["script=train.py", "model=mlp"],
        "model",
        "mlp",
        "args='--model mlp'",
    ),
    "a rank's own number": (["env.RANK=0", "scale=1x2"], "env.RANK", "0", "scale=NODESxRANKS"),
    "Horovod's number": (
        ["env.HOROVOD_LOCAL_RANK=0"],
        "env.HOROVOD_LOCAL_RANK",
        "0",
        "scale=NODESxRANKS",
    ),
    "one GPU for all ranks": (
        ["env.CUDA_VISIBLE_DEVICES=0", "scale=1x2"],
        "env.CUDA_VISIBLE_DEVICES",
        "0",
        "scale.gpus=1",
    ),
    "no GPU by a variable": (
        ["env.HIP_VISIBLE_DEVICES=-1"],
        "env.HIP_VISIBLE_DEVICES",
        "-1",
        "scale.gpus=0",
    ),
    "a variable of two words": (["env.A B=1"], "env.A B", "1", "env.A_B=1"),
    "the folder above as a name": (["name=.."], "name", "..", "name=NAME"),
    "a name without a letter": (["name=///"], "name", "///", "name=NAME"),
    "a name too long": ([f"name={'x' * 300}"], "name", "x" * 300, f"name={'x' * 40}"),
    "the whole disk": (["working_dir=/"], "working_dir", "/", "working_dir=."),
    "a file for storage": (["storage=/dev/null"], "storage", "/dev/null", "storage=FOLDER"),
    "a web server for storage": (
        ["storage=https://example.com/runs"],
        "storage",
        "https://example.com/runs",
        "storage=FOLDER",
    ),
    "negative GPUs": (["scale.gpus=-1"], "scale.gpus", -1.0, "scale.gpus=0"),
    "batch that can't be split": (
        ["data.global_batch=10", "train.accumulate=4"],
        "data.global_batch",
        10,
        "data.global_batch=8",
    ),
    "batch that shards can't share": (
        ["parallel=fsdp", "scale=1x4", "data.global_batch=10"],
        "data.global_batch",
        10,
        "data.global_batch=8",
    ),
    "job file missing": (["job=nope.py"], "job", "nope.py", "job=odd.py"),
    "job file misspelt": (["job=jobs/mien.py"], "job", "jobs/mien.py", "job=jobs/mine.py"),
    "job misspelt": (["job=digit"], "job", "digit", "job=digits"),
    "function missing": (
        ["job=jobs/mine.py:jbo"],
        "job",
        "jobs/mine.py:jbo",
        "job=jobs/mine.py:job",
    ),
    "module missing": (["job=jsn.tool:main"], "job", "jsn.tool:main", "job=json.tool:main"),
    "wrong argument": (["job=mine", "job.args.hiden=1"], "job.args.hiden", 1, "job.args.hidden=1"),
    "no nodes": (["scale=0x2"], "scale", "0x2", "scale=1x2"),
    "half a size": (["scale=2x"], "scale", "2x", "scale=1x2"),
    "no size": (["scale=axb"], "scale", "axb", "scale=local"),
    "ranks alone": (["scale=4"], "scale", "4", "scale=1x4"),
    "capital size": (["scale=2X8"], "scale", "2X8", "scale=2x8"),
    "group chosen twice": (["scale=2x8", "scale=1x2"], "scale", "1x2", "scale=1x2"),
    "list without --multirun": (
        ["optim.lr=0.1,0.2"],
        "optim.lr",
        "0.1,0.2",
        "--multirun optim.lr=0.1,0.2",
    ),
    "open bracket": (["optim.lr=[1"], "optim.lr", "[1", "\"optim.lr='[1'\""),
    "two equal signs": (["name=a=b"], "name", "a=b", "\"name='a=b'\""),
    "a plus too many": (["+optim.lr=1"], "optim.lr", "1", "optim.lr=1"),
    "a plus before a group": (["+backend=gloo"], "backend", "gloo", "backend=gloo"),
    "a plus before nonsense": (["+optm.lr=1"], "optm.lr", "1", "optim.lr=1"),
    "taking a setting away": (["~optim.lr"], "optim.lr", None, "optim.lr=0.05"),
    "taking another choice away": (["~backend=nccl"], "backend", "nccl", ""),
    "missing interpolation": (["name=${nme}"], "name", "${nme}", "name=${name}"),
    "missing variable": (["name=${oc.env:NO_SUCH}"], "name", "${oc.env:NO_SUCH}", ""),
    "missing variable for a rank": (
        ["env.HF_TOKEN=${oc.env:NO_SUCH}"],
        "env.HF_TOKEN",
        "${oc.env:NO_SUCH}",
        "",
    ),
    "missing variable in an argument": (
        ["job=mine", "++job.args={hidden: '${oc.env:NO_SUCH}'}"],
        "job.args.hidden",
        "${oc.env:NO_SUCH}",
        "",
    ),
    "missing interpolation in the folder": (["hydra.run.dir=${nope}"], "hydra.run.dir", None, ""),
    "wrong key of Hydra's": (["hydra.run.dirr=x"], "hydra.run.dirr", "x", ""),
    "unknown launcher": (["hydra/launcher=joblib"], "hydra/launcher", "joblib", ""),
    "the folder by the wrong key": (["dir=x"], "dir", "x", "hydra.run.dir=x"),
    "best without max or min": (
        ["checkpoint.best=accuracy"],
        "checkpoint.best",
        "accuracy",
        "checkpoint.best=max:accuracy",
    ),
    "nothing to go on from": (["resume=/nope/x"], "resume", "/nope/x", "resume=auto"),
    "unknown flag": (["--multrun"], "--multrun", None, "--multirun"),
    "unknown short flag": (["-z"], "-z", None, ""),
    "wrong word after --cfg": (["--cfg", "jobb"], "--cfg", "jobb", "--cfg job"),
    "wrong word after --info": (
        ["--info", "serchpath"],
        "--info",
        "serchpath",
        "--info searchpath",
    ),
    "two flags": (["--multirun", "--cfg", "job"], "--cfg", None, "--multirun"),
    "--resolve alone": (["--resolve"], "--resolve", None, "--cfg job --resolve"),
    "no such config": (["--config-name", "nope"], "--config-name", "nope", "--config-name config"),
    "no such folder": (["--config-dir", "cnf"], "--config-dir", "cnf", "--config-dir conf"),
    "one of many runs": (["--multirun", "optim.lr=0.1,abc"], "optim.lr", "abc", "optim.lr=0.05"),
    "ranks alone, many": (["--multirun", "scale=1x1,2"], "scale", "2", "scale=1x2"),
    "a folder below a file": (
        ["hydra.run.dir=jobs/mine.py/x"],
        "hydra.run.dir",
        "jobs/mine.py/x",
        "hydra.run.dir=FOLDER",
    ),
    "a file for a folder": (
        ["hydra.run.dir=jobs/mine.py"],
        "hydra.run.dir",
        "jobs/mine.py",
        "hydra.run.dir=jobs/mine.py-2",
    ),
    "a list as a file": (["optim=listed"], "", None, ""),
    "text as a file": (["optim=text"], "optim.sgd", None, "optim.fused"),
    "not even text": (["optim=binary"], "", None, ""),
    "a default that is not there": (["optim=nested"], "optim", "missing", ""),
    "one of many sizes": (["--multirun", "scale=1x1,0x1"], "scale", "0x1", "scale=1x1"),
    "wrong word shown": (["--cfg", "job", "lr=1"], "lr", "1", "optim.lr=1"),
    "job path without .py": (["job=jobs/mine"], "job", "jobs/mine", "job=jobs/mine.py"),
    "job path without .py, with a function": (
        ["job=jobs/mine:job"],
        "job",
        "jobs/mine:job",
        "job=jobs/mine.py:job",
    ),
    "no function after the colon": (
        ["job=jobs/mine.py:"],
        "job",
        "jobs/mine.py:",
        "job=jobs/mine.py:job",
    ),
    "module without a function": (["job=json.tool"], "job", "json.tool", "job=json.tool:job"),
    "function missing in a module": (
        ["job=json.tool:mian"],
        "job",
        "json.tool:mian",
        "job=json.tool:main",
    ),
    "job folder misspelt": (["job=jbos/mine.py"], "job", "jbos/mine.py", "job=jobs/mine.py"),
    "argument missing": (["job=needs"], "job", "needs", "job.args.width=VALUE"),
    "config as an argument": (["job=mine", "job.args.config=3"], "job.args.config", 3, ""),
    "job file is not Python": (["job=odd.py"], "job", "odd.py", ""),
    "a setting of no likeness": (["zzzz=1"], "zzzz", "1", ""),
    "without a part": (["batch_size=4"], "batch_size", "4", "data.batch_size=4"),
    "group misspelt": (["bakend=nccl"], "bakend", "nccl", "backend=nccl"),
    "group misspelt, removed": (["~bakend"], "bakend", None, "backend"),
    "group without a choice": (["backend"], "backend", None, "backend=CHOICE"),
    "two pluses before a group": (["++backend=gloo"], "backend", "gloo", "backend=gloo"),
    "entry without a name": (["model.=1"], "model.", "1", "model.NAME=1"),
    "unknown placeholder": (["script=train.py", "args={rnk}"], "args", "{rnk}", "args={rank}"),
    "placeholder without a value": (
        ["script=train.py", "args={master_port}", "init_method=file"],
        "args",
        "{master_port}",
        "init_method=tcp",
    ),
    "placeholder without a value under Horovod": (
        ["script=train.py", "args={master_port}", "backend=horovod"],
        "args",
        "{master_port}",
        "",
    ),
    "open quote": (["script=train.py", "args='a"], "args", "'a", "args=[VALUE,VALUE]"),
    "script with arguments": (
        ["script=python -u train.py --lr 1"],
        "script",
        "python -u train.py --lr 1",
        "script=python args='-u train.py --lr 1'",
    ),
    "script misspelt": (["script=trian.py"], "script", "trian.py", "script=train.py"),
    "script module missing": (
        ["script=-m jsn.tool"],
        "script",
        "-m jsn.tool",
        'script="-m json.tool"',
    ),
    "script module with arguments": (
        ["script=-m train x"],
        "script",
        "-m train x",
        'script="-m package.module"',
    ),
    "script package": (["script=-m package"], "script", "-m package", 'script="-m package.MODULE"'),
    "working_dir missing": (["working_dir=nowhere"], "working_dir", "nowhere", "working_dir=."),
    "requirements missing": (["pip=[needed.txt]"], "pip", "[needed.txt]", "pip=[PACKAGE,PACKAGE]"),
    "env_file missing": (["env_file=od.env"], "env_file", "od.env", "env_file=odd.env"),
    "env_file with an odd name": (["env_file=odd.env"], "env_file", "odd.env", "NAME=value"),
    "output of no ranks": (["watch.output=first"], "watch.output", "first", "watch.output=0,3"),
    "restart with MPI": (
        ["script=train.py", "backend=mpi", "restart.max=1"],
        "restart.max",
        1,
        "restart=none",
    ),
    "a priority that is none": (
        ["queue=on", "queue.priority=urgent"],
        "queue.priority",
        "urgent",
        "queue.priority=high",
    ),
    "a run that cannot shrink": (
        ["queue=on", "queue.shrink=true", "scale=4x8"],
        "queue.shrink",
        "true",
        "scale.nodes=1..4 queue.shrink=true",
    ),
    "horovod with tcp": (
        ["backend=horovod", "init_method=tcp"],
        "init_method",
        "tcp",
        "init_method=env",
    ),
    "horovod's seconds": (
        ["backend=horovod", "backend.horovod.stall_fail_s=60"],
        "backend.horovod.stall_fail_s",
        60,
        "backend.horovod.stall_fail_s=120",
    ),
    "horovod's sets": (
        ["backend=horovod", "backend.horovod.process_sets=[[0,0]]"],
        "backend.horovod.process_sets",
        [0, 0],
        "backend.horovod.process_sets=[[0,1],[2,3]]",
    ),
    "a search that is not deterministic": (
        ["deterministic=true", "train.cudnn_search=true"],
        "train.cudnn_search",
        "true",
        "train.cudnn_search=false",
    ),
    "least more than most": (
        ["scale.nodes=3", "scale.max_nodes=2"],
        "scale.nodes",
        "3..2",
        "scale.nodes=2..3",
    ),
    "spares beside max_nodes": (
        ["scale=1..2x2", "scale.spares=1"],
        "scale.spares",
        1,
        "scale.spares=0",
    ),
    "spares of the whole cluster": (
        ["scale=cluster", "scale.spares=1"],
        "scale.spares",
        "1",
        "scale.nodes=1 scale.spares=1",
    ),
    "most of the whole cluster": (
        ["scale=cluster", "scale.max_nodes=4"],
        "scale.max_nodes",
        4,
        "scale.nodes=1..4",
    ),
    "elastic MPI": (
        ["script=train.py", "backend=mpi", "restart=none", "scale=1..2x2"],
        "scale.nodes",
        "1..2",
        "scale.max_nodes=null",
    ),
    "elastic inline": (["scale=1..2x2", "group=inline"], "scale.nodes", "1..2", "group=ray"),
    "elastic, packed": (
        ["scale=1..2x2", "scale.placement=PACK"],
        "scale.nodes",
        "1..2",
        "scale.placement=STRICT_SPREAD",
    ),
    "spares without restart": (
        ["scale.spares=1", "restart.max=0"],
        "scale.spares",
        "1",
        "restart.max=1",
    ),
    "too few samples for all": (
        ["scale=1..64x8", "data.batch_size=1"],
        "scale.nodes",
        "1..64",
        "data.global_batch=512",
    ),
    "fixed batch, scaled": (
        ["scale=1..2x2", "data.resize=scale", "data.global_batch=64"],
        "data.resize",
        "scale",
        "data.resize=keep",
    ),
    "RDMA over ethernet": (
        ["fabric=ethernet", "fabric.strict=true"],
        "fabric.strict",
        "true",
        "fabric.kind=auto",
    ),
    "HCAs over ethernet": (
        ["fabric=ethernet", "fabric.hca=[mlx5_0]"],
        "fabric.hca",
        "[mlx5_0]",
        "fabric.kind=auto",
    ),
    "HCAs, but the site chooses": (
        ["fabric=site", "fabric.hca=[mlx5_0,mlx5_1]"],
        "fabric.hca",
        "[mlx5_0,mlx5_1]",
        "fabric.kind=auto",
    ),
    "resume from an unknown store": (
        ["resume=ftpp://x"],
        "resume",
        "ftpp://x",
        "resume=s3://BUCKET/FOLDER",
    ),
    "no bucket": (["storage=s3://"], "storage", "s3://", "storage=s3://BUCKET/FOLDER"),
    "password in a URL": (
        ["storage=s3://me:pw@bucket/x"],
        "storage",
        "s3://…",
        "storage=s3://bucket/x",
    ),
    "no URL": (
        ["notify.webhook=example.org/x"],
        "notify.webhook",
        "***",
        "notify.webhook=https://HOST/PATH",
    ),
    "unknown form": (["notify.form=slak"], "notify.form", "slak", "notify.form=slack"),
    "unknown message": (
        ["notify.events=[fialed]"],
        "notify.events",
        "fialed",
        "notify.events=failed",
    ),
    "messages that are no list": (
        ["notify.events=failed,hung"],
        "notify.events",
        "failed,hung",
        "notify.events=[failed,hung]",
    ),
    "half a command": (
        ["notify.command=echo 'x"],
        "notify.command",
        "echo 'x",
        "notify.command='mail -s \"$RAYDIST_NOTIFY_TITLE\" ADDRESS'",
    ),
    "no program": (
        ["notify.command=mial -s x me"],
        "notify.command",
        "mial -s x me",
        "notify.command='mail -s \"$RAYDIST_NOTIFY_TITLE\" ADDRESS'",
    ),
    "unknown setting in a part": (["train={foo: 3}"], "train.foo", None, "train.tf32"),
    "a range without --multirun": (
        ["train.epochs=range(1,3)"],
        "train.epochs",
        "range(1,3)",
        "--multirun train.epochs=range(1,3)",
    ),
}
"""What is typed; the error's key, value and suggestion. <here> is the folder with the wrong
files."""


def write_wrong_files(here: Path) -> None:
    """A job, and files that are wrong in one way each."""
    (here / "conf" / "optim").mkdir(parents=True)
    (here / "jobs").mkdir()
    (here / "package").mkdir()
    texts = {
        "conf/optim/broken.yaml": "name: [sgd\nlr: 1\n",
        "conf/optim/unknown.yaml": "nam: sgd\n",
        "conf/optim/listed.yaml": "- sgd\n",
        "conf/optim/text.yaml": "sgd\n",
        "conf/optim/nested.yaml": "defaults: [missing]\n",
        "conf/optim/mistyped.yaml": "lr: abc\n",
        "jobs/mine.py": "def job(config, hidden=3): ...\n",
        "jobs/needs.py": "def job(config, width): ...\n",
        "odd.py": "def job(:\n",
        "odd.env": "A B\n",
        "train.py": "",
        "package/__init__.py": "",
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    (here / "conf" / "optim" / "binary.yaml").write_bytes(b"name: \xff\xfe\n")


@pytest.mark.parametrize("kind", REFUSED)
def test_the_error_has_key_value_and_suggestion(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, key, value, suggestion = REFUSED[kind]
    monkeypatch.chdir(tmp_path)
    write_wrong_files(tmp_path)
    with pytest.raises(raydist.ConfigError) as refused:
        train.run_command(train.parse_arguments(overrides))
    error = refused.value
    actual = (
        error.value.replace(str(tmp_path), "<here>")
        if isinstance(error.value, str)
        else error.value
    )
    assert (error.key, actual, error.suggestion) == (key, value, suggestion)
    assert suggestion in str(error)
    assert value is None or str(error.value) in str(error)
    assert key.partition(".")[0] in str(error) or str(value) in str(error)


def test_no_number_is_refused_for_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(raydist.ConfigError, match="must be a finite number") as refused:
        train.run_command(train.parse_arguments(["backend.timeout_s=nan"]))
    assert math.isnan(refused.value.value)
    assert refused.value.key == "backend.timeout_s"
    assert refused.value.suggestion == "backend.timeout_s=600.0"
