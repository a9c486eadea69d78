"""Every job trains, from real files where it needs some; and the same file runs under torchrun and
alone."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydist.settings.compose import compose
from raydist.settings.config import Backend, Job
from raydist.state import checkpoint_files
from raydist.worker import target
from tests.conftest import ROOT
from tests.programs import Program
from tests.ranks import RankResult, run_ranks, succeeded

JOBS = ROOT / "jobs"


def composed(name: str, *words: str) -> tuple[Job, Callable[[Job], Any]]:
    """Compose a job of this project with its conf/; return it and the function that each rank
    calls."""
    job = replace(compose([f"job={name}", *words]), backend=Backend(name="gloo"))

    def call(job: Job) -> Any:
        return target.call_function(target.load_target(f"{JOBS / name}.py:job"), job)

    return job, call


def trained(
    name: str,
    run_dir: Path,
    *words: str,
    world: int = 2,
    env: dict[str, str] | None = None,
    before: Callable[[], None] = lambda: None,
) -> list[RankResult]:
    job, call = composed(name, *words)

    def prepared(job: Job) -> Any:
        before()
        return call(job)

    results = run_ranks(world, job, prepared, run_dir, env)
    assert [one.error for one in results] == [""] * world
    return results


def test_digits_are_learned_by_two_ranks(tmp_path: Path) -> None:
    one, two = trained("digits", tmp_path, "seed=1")
    assert one.value["accuracy"] >= 0.97
    assert two.value["accuracy"] == one.value["accuracy"]


def test_digits_take_another_model_and_optimizer(tmp_path: Path) -> None:
    (result,) = trained(
        "digits", tmp_path, "model=mlp", "optim=sgd", "job.args.test_size=0.5", world=1
    )
    saved = checkpoint_files.newest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.state["model"]["1.weight"].shape == (64, 64)
    assert saved.state["optimizer"]["param_groups"][0]["momentum"] == 0.9
    assert result.kind("begin")[0]["samples"] == 898
    assert result.value["accuracy"] > 0.9


def test_synthetic_images_are_made_from_the_seed(tmp_path: Path) -> None:
    words = (
        "job.args.samples=128",
        "job.args.size=8",
        "job.args.num_classes=3",
        "data.batch_size=16",
    )
    first, again, other = (
        trained("synthetic", tmp_path / str(index), *words, f"seed={seed}", world=1)[0]
        for index, seed in enumerate((0, 0, 1))
    )
    assert len(first.losses) == 8
    assert first.losses == again.losses != other.losses


def test_synthetic_feeds_any_of_torchvisions_models(tmp_path: Path) -> None:
    words = (
        "model=resnet18",
        "job.args.samples=4",
        "job.args.size=32",
        "data.batch_size=2",
        "train.steps=2",
    )
    (result,) = trained("synthetic", tmp_path, *words, world=1)
    assert len(result.losses) == 2


def write_mnist(root: Path) -> None:
    """MNIST's own format (yann.lecun.com/exdb/mnist), with bright squares in one of two corners."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 64), ("t10k", 20)):
        labels = np.arange(count, dtype=np.uint8) % 2
        images = np.zeros((count, 28, 28), dtype=np.uint8)
        images[labels == 1, :9, :9] = 255
        images[labels == 0, 19:, 19:] = 255
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, count) + labels.tobytes()
        )


def test_mnist_from_its_files(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    words = (f"data.root={tmp_path}", "data.batch_size=8", "train.epochs=4", "optim.warmup=0")
    one, _ = trained("mnist", tmp_path / "run", *words)
    assert one.value["accuracy"] == 1.0
    assert one.kind("begin")[0]["samples"] == 64


def write_cifar(root: Path) -> Callable[[], None]:
    """CIFAR-10's own format (pickled rows of 3 x 32 x 32), in two colours; torchvision is told
    their checksums."""
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)
    sums = {}
    for name in [entry[0] for entry in (*CIFAR10.train_list, *CIFAR10.test_list)]:
        labels = [index % 2 for index in range(10)]
        rows = np.zeros((10, 3, 1024), dtype=np.uint8)
        for row, label in zip(rows, labels, strict=True):
            row[2 * label] = 255
        (folder / name).write_bytes(
            pickle.dumps({"data": rows.reshape(10, 3072), "labels": labels})
        )
    (folder / "batches.meta").write_bytes(
        pickle.dumps({"label_names": [f"kind{index}" for index in range(10)]})
    )
    for file in folder.iterdir():
        sums[file.name] = md5(file.read_bytes()).hexdigest()

    def known() -> None:
        for part in ("train_list", "test_list"):
            setattr(CIFAR10, part, [[name, sums[name]] for name, _ in getattr(CIFAR10, part)])
        CIFAR10.meta = {**CIFAR10.meta, "md5": sums["batches.meta"]}

    return known


def test_cifar10_from_its_files(tmp_path: Path) -> None:
    known = write_cifar(tmp_path)
    words = (
        f"data.root={tmp_path}",
        "data.batch_size=5",
        "train.epochs=3",
        "optim.warmup=0",
        "model.width=8",
    )
    one, two = trained("cifar10", tmp_path / "run", *words, before=known)
    assert one.kind("begin")[0]["samples"] == 50
    assert one.value["accuracy"] == two.value["accuracy"] == 1.0


def write_folder(root: Path, size: int = 40) -> None:
    from PIL import Image

    for part, count in (("train", 8), ("val", 3)):
        for kind, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0)), ("green", (0, 255, 0))):
            (root / part / kind).mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (size, size), colour).save(root / part / kind / f"{index}.png")


def test_folder_of_ones_own_images(tmp_path: Path) -> None:
    write_folder(tmp_path)
    words = (
        f"data.root={tmp_path}",
        "data.batch_size=4",
        "train.epochs=2",
        "job.args.size=32",
        "model=small_cnn_rgb",
    )
    one, _ = trained("folder", tmp_path / "run", *words)
    assert one.kind("begin")[0]["samples"] == 24
    saved = checkpoint_files.newest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved.state["model"]["classify.2.weight"].shape[0] == 3  # one score per folder


def test_a_kind_that_one_of_the_two_folders_lacks_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, size=2)
    (tmp_path / "val" / "blue").rename(tmp_path / "blue")
    job, call = composed("folder", f"data.root={tmp_path}", "model=small_cnn_rgb")
    (result,) = run_ranks(1, job, call, tmp_path / "run")
    assert "have different kinds: blue is in train/ only" in result.error


@pytest.mark.parametrize("name", ["mnist", "cifar10", "folder"])
def test_missing_files_are_named_with_the_place_to_put_them(tmp_path: Path, name: str) -> None:
    job, call = composed(name, f"data.root={tmp_path}")
    (result,) = run_ranks(1, job, call, tmp_path)
    assert "ConfigError" in result.error
    assert f"data.root={tmp_path}" in result.error
    assert {"mnist": "MNIST/raw/", "cifar10": "cifar-10-batches-py/", "folder": "train/KIND/"}[
        name
    ] in result.error


def test_own_loop_resumes(tmp_path: Path) -> None:
    whole = trained("own_loop", tmp_path, "train.steps=30", "checkpoint.every=10")
    assert whole[0].losses[-1] < whole[0].losses[0]
    path = tmp_path / "checkpoints" / "step-00000010"
    again = trained("own_loop", tmp_path / "2", "train.steps=30", env={"RAYDIST_RESUME": str(path)})
    assert [result.losses for result in again] == [result.losses[10:] for result in whole]
    assert again[0].value == whole[0].value


def test_own_loop_makes_a_group_of_the_even_ranks(tmp_path: Path) -> None:
    results = trained("own_loop", tmp_path, "train.steps=2", "job.args.hidden=8", world=3)
    assert results[0].value == results[2].value


def program(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_under_torchrun_and_then_resumed_alone(tmp_path: Path) -> None:
    ran = program(
        tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(JOBS / "digits.py"),
        "train.steps=25", "data.batch_size=16",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    steps = re.findall(r"^step (\d+) .* accuracy", ran.stdout, re.M)
    assert steps == ["25"]
    (run,) = (tmp_path / "runs" / "digits").iterdir()  # one run folder for both ranks
    again = program(
        tmp_path, str(JOBS / "digits.py"), "train.steps=30", "data.global_batch=32", "resume=auto"
    )
    assert again.returncode == 0, again.stderr
    (new,) = (path for path in (tmp_path / "runs" / "digits").iterdir() if path != run)
    saved = checkpoint_files.newest(new / "checkpoints")
    assert saved is not None
    assert (saved.step, saved.meta.world_size) == (30, 1)
    assert saved.state["position"]["samples"] == 30 * 32
    assert len(saved.state["random"]) == 1


def test_alone_a_wrong_word_is_one_line(tmp_path: Path) -> None:
    ran = program(tmp_path, str(JOBS / "digits.py"), "optim.lrr=1")
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: optim.lrr")
    assert "did you mean optim.lr" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""


def test_a_rank_that_fails_under_torchrun_ends_with_its_code(tmp_path: Path) -> None:
    source = """
        import torch.distributed as dist, raydist
        def job():
            if dist.get_rank() == 1:
                raise ValueError("first cause")
            dist.barrier()
        raydist.main(job)
    """
    (tmp_path / "failing.py").write_text(textwrap.dedent(source))
    ran = program(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "failing.py")
    assert ran.returncode == 1
    assert "ValueError: first cause" in ran.stderr
    assert re.search(r"exitcode +: 1 ", ran.stderr), ran.stderr
    assert "SIGABRT" not in ran.stderr


SMALL_GPT = ("model.layers=2", "model.width=64", "model.heads=2", "model.kv_heads=1", "model.hidden=192",
             "optim.lr=0.01", "train.steps=60", "data.batch_size=8", "job.args.context=64", "job.args.held_out=64",
             "job.args.sample=20")  # fmt: skip


def test_the_language_model_learns_more_than_the_frequency_of_bytes(tmp_path: Path) -> None:
    results = trained("gpt", tmp_path, "parallel=fsdp", *SMALL_GPT)
    figures = results[0].value
    read = target.load_target(f"{JOBS / 'gpt'}.py:job").__globals__["read"]
    counts = np.bincount(read("")[-64 * 64 - 1 :].numpy())
    share = counts[counts > 0] / counts.sum()
    assert figures["test_loss"] < min(3.0, -(share * np.log(share)).sum())
    assert figures["perplexity"] == pytest.approx(np.exp(figures["test_loss"]))
    assert figures["bits_per_byte"] == pytest.approx(figures["test_loss"] / np.log(2))
    assert figures["tokens_per_s"] > 0
    assert "mfu" not in figures  # a CPU has no peak
    assert results[0].losses[0] > 5
    (values,) = [
        each["values"] for each in results[0].kind("report") if "perplexity" in each["values"]
    ]
    assert values["perplexity"] == figures["perplexity"]


def test_the_language_model_may_learn_from_all_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one word follows another\n" * 800)
    words = [each for each in SMALL_GPT if "held_out" not in each and "steps" not in each]
    own = ("train.steps=2", "job.args.held_out=0", "job.args.tokenizer=bpe", "model.vocab=300")
    (result,) = trained("gpt", tmp_path, *words, *own, f"data.root={tmp_path / 'text'}", world=1)
    assert result.value.keys() >= {"loss", "tokens_per_s"}
    assert "perplexity" not in result.value


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("parallel=ddp", 2),
        ("parallel=tp", 2),
        ("parallel=pp", 2),
        ("parallel=fsdp parallel.pp=2", 4),
    ],
)
def test_the_language_model_runs_under_every_division(
    words: str, world: int, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "song.txt").write_text(
        "".join(f"{n} green bottles hanging on the wall\n" for n in range(900))
    )
    few = (
        "train.steps=12",
        "data.global_batch=16",
        "model.kv_heads=2",
        "job.args.sample=5",
        f"data.root={own}",
    )
    job, call = composed("gpt", *SMALL_GPT, *few, *words.split())

    def with_output(job: Job) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            return call(job), output.getvalue()

    results = run_ranks(world, job, with_output, tmp_path / "run")
    assert [each.error for each in results] == [""] * world
    (figures, output), *others = (each.value for each in results)
    assert output.startswith("--- 5 tokens after 'def '\ndef ")
    assert figures["perplexity"] == pytest.approx(np.exp(figures["test_loss"]))
    done = [event for each in results for event in each.kind("done")]
    speeds = [each["samples"] / each["spent"]["step"] for each in done]
    assert figures["tokens_per_s"] == pytest.approx(64 * sum(speeds) / world)
    for other, silent in others:
        assert other == figures
        assert not silent
    assert all(each.losses[-1] < each.losses[0] - 1 for each in results)


def test_one_seed_gives_the_same_language_model_under_every_division(tmp_path: Path) -> None:
    """As a person types it. A pipeline of three stages has one between those with the tied
    weights."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "song.txt").write_text(
        "".join(f"{n} green bottles hanging on the wall\n" for n in range(900))
    )
    few = (
        "model.layers=3",
        "model.width=32",
        "model.kv_heads=2",
        "model.hidden=64",
        "job.args.context=16",
    )
    words = (*SMALL_GPT, *few, "train.steps=20", "optim.warmup=2", "data.global_batch=12",
             f"data.root={own}", "group=inline")  # fmt: skip
    losses = {}
    for division in (
        "parallel=ddp scale=1x2",
        "parallel=fsdp scale=1x3",
        "parallel=pp scale=1x3",
        "parallel=fsdp parallel.tp=2 scale=1x4",
    ):
        folder = tmp_path / division.replace(" ", "-")
        folder.mkdir()
        run = Program(folder, "job=gpt", *words, *division.split())
        assert run.wait(300) == 0, run.screen
        metrics = run.result()["metrics"]
        losses[division] = [metrics["test_loss"], metrics["loss"]]
    wanted = losses["parallel=ddp scale=1x2"]
    assert wanted[0] < 5  # it has learned
    assert [*losses.values()] == [pytest.approx(wanted, abs=1e-3)] * len(losses), losses


def test_the_language_model_learns_byte_pairs_of_your_own_text_in_half_precision(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    (own / "more").mkdir(parents=True)
    (own / "more" / "song.txt").write_text(
        "".join(f"{n} green bottles hanging on the wall\n" for n in range(900))
    )
    (own / "left_out.csv").write_text("no,text\n" * 9000)
    words = (
        f"data.root={own}",
        "train.precision=bf16",
        "job.args.tokenizer=bpe",
        "model.vocab=300",
    )
    job, call = composed("gpt", *SMALL_GPT, "train.steps=40", *words)

    def with_output(job: Job) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            return call(job), output.getvalue()

    results = run_ranks(2, job, with_output, tmp_path / "run")
    assert [each.error for each in results] == ["", ""]
    (figures, output), (others, silent) = (each.value for each in results)
    assert figures == others
    assert (
        0 < figures["bits_per_byte"] < figures["test_loss"] / np.log(2) / 2
    )  # a token has more than two bytes
    assert figures["bits_per_byte"] < 1  # a song repeats itself
    assert output.startswith("--- 20 tokens after 'def '\ndef ")
    assert len(output) > 60
    assert not silent
    saved = checkpoint_files.newest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    assert saved.state["model"]["embedding.weight"].shape == (300, 64)


def test_the_language_model_refuses_another_tokenizer(tmp_path: Path) -> None:
    job, call = composed("gpt", "job.args.tokenizer=bep")
    (result,) = run_ranks(1, job, call, tmp_path)
    assert "did you mean job.args.tokenizer=bpe" in result.error


def test_the_language_model_refuses_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1")
    job, call = composed("gpt", f"data.root={tmp_path}")
    (result,) = run_ranks(1, job, call, tmp_path)
    assert (
        "its 1 text files (.md, .py, .rst, .txt) have 5 bytes, too few to learn from"
        in result.error
    )


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("job.args.prompt=''", "job.args.prompt=: it is empty"),
        ("job.args.context=1100", "job.args.context=1100: .* 1101 tokens, .* has 1000; "),
    ],
)
def test_the_language_model_refuses_what_fails_after_the_training(
    tmp_path: Path, word: str, cause: str
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n\n\n\n\n" * 1000)
    job, call = composed("gpt", f"data.root={tmp_path}", word)
    (result,) = run_ranks(1, job, call, tmp_path / "run")
    assert re.search(cause, result.error)


def test_the_language_model_reports_a_perplexity_of_any_size(tmp_path: Path) -> None:
    job, call = composed("gpt", f"data.root={JOBS}", "job.args.sample=0")

    def diverged(job: Job) -> Any:
        import raydist

        raydist.fit = lambda *args, **named: {"test_loss": 710.0}
        return call(job)

    (result,) = succeeded(run_ranks(1, job, diverged, tmp_path / "run"))
    assert result.value["perplexity"] == float("inf")
