"""Weights from safetensors files into models, whole and divided, and back. On real gloo ranks."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raydist
from raydist import models
from raydist.settings.config import Backend, Data, Job, Optim, Parallel, Train
from raydist.training import export
from raydist.training.export import final_names
from raydist.training.weights import INDEX, WeightFiles
from raydist.worker import context
from tests.losses import next_token
from tests.ranks import RankResult, run_ranks, succeeded
from tests.records import Seen

safetensors = pytest.importorskip("safetensors.torch")
load_file, save_file = safetensors.load_file, safetensors.save_file
SIZES: Any = {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 64}
BASE = Job(
    backend=Backend("gloo"),
    data=Data(global_batch=8, shuffle=False),
    optim=Optim("sgd", lr=0.1),
    seed=5,
)
DIVISIONS = {
    "ddp": Parallel(),
    "fsdp": Parallel("fsdp"),
    "tp": Parallel("fsdp", tp=2),
    "pp": Parallel("fsdp", pp=2),
}


def pretrained(folder: Path, files: int = 1) -> dict[str, torch.Tensor]:
    """Write the weights of a model as someone else has trained it; return them."""
    torch.manual_seed(1)
    values = {name: value.detach() for name, value in models.GPT(**SIZES).named_parameters()}
    folder.mkdir()
    names = [*values]
    for number in range(files):
        name = f"part-{number}.safetensors" if files > 1 else "model.safetensors"
        part = {each: values[each] for each in names[number::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
    if files > 1:
        where = {each: f"part-{at % files}.safetensors" for at, each in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return values


def trained(job: Job, meta: bool = True) -> dict[str, float]:
    """Train from the weights of the settings, and save them in the run folder."""
    with torch.device("meta" if meta else "cpu"):
        model = models.GPT(**SIZES)
    drawn = torch.Generator().manual_seed(0)
    text = torch.randint(256, (24, 17), generator=drawn, dtype=torch.uint8)
    samples = TensorDataset(text[:, :-1], text[:, 1:])
    figures = raydist.fit(job, model=model, train=samples, loss=next_token)
    export.FILE_BYTES = 40_000
    folder = models.save_weights(model, context.rank().run_dir / "weights")
    assert folder == context.rank().run_dir / "weights"
    return figures


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder, as its index says."""
    files: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    assert {*files.values()} == {each.name for each in folder.glob("*.safetensors")}
    found: dict[str, Any] = {name: load_file(folder / file) for name, file in files.items()}
    return {name: tensors[name] for name, tensors in found.items()}


@pytest.fixture(scope="module", params=DIVISIONS)
def division(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights before and after three steps under a division, and what the ranks say."""
    folder = tmp_path_factory.mktemp(request.param)
    before = pretrained(folder / "pretrained", files=3)
    train = Train(steps=3, weights=str(folder / "pretrained"))
    job = replace(BASE, train=train, parallel=DIVISIONS[request.param])
    results = succeeded(run_ranks(4, job, trained, folder))
    return before, read(folder / "weights"), results


def by_hand(before: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after the same steps in a loop of one process, and the last loss."""
    model = models.GPT(**SIZES)
    model.load_state_dict(before, strict=False)  # the head is the embedding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(0)
    text = torch.randint(256, (24, 17), generator=drawn, dtype=torch.uint8)
    for number in range(0, len(text), 8):
        batch = text[number : number + 8]
        loss = next_token(model(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}, loss.item()


def test_divided_models_begin_with_the_weights_and_give_them_back(division: Any) -> None:
    before, after, results = division
    known, loss = by_hand(before)
    assert [each.value["loss"] for each in results] == [pytest.approx(loss, rel=1e-5)] * 4
    assert known.keys() <= after.keys()
    for name, value in known.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(before[name], after[name])
    assert [each for result in results for each in result.kind("warning")] == []


def test_a_whole_model_that_has_values_gets_those_of_the_files(tmp_path: Path) -> None:
    before = pretrained(tmp_path / "pretrained")
    job = replace(BASE, train=Train(steps=3, weights=str(tmp_path / "pretrained")))
    (result,) = succeeded(run_ranks(1, job, lambda job: trained(job, meta=False), tmp_path))
    known, loss = by_hand(before)
    assert result.value["loss"] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(read(tmp_path / "weights"), known, rtol=1e-5, atol=1e-6)


def test_a_second_fit_goes_on_with_what_the_first_has_trained(tmp_path: Path) -> None:
    """It began with the weights of the files once more."""
    pretrained(tmp_path / "pretrained")
    short = Train(steps=1, weights=str(tmp_path / "pretrained"))

    def train_twice(job: Job) -> list[float]:
        torch.manual_seed(0)
        model = models.GPT(**SIZES)
        text = torch.randint(256, (8, 17))
        samples = TensorDataset(text[:, :-1], text[:, 1:])
        call: Any = {"model": model, "train": samples, "loss": next_token}
        return [raydist.fit(job, **call)["loss"] for _ in range(2)]

    (result,) = succeeded(run_ranks(1, replace(BASE, train=short), train_twice, tmp_path))
    first, second = result.value
    assert second < first


def test_a_divided_model_is_not_divided_a_second_time(tmp_path: Path) -> None:
    """It was said that no class repeats in a model that had been trained by its blocks."""

    def train_twice(job: Job) -> str:
        model = models.GPT(**SIZES)
        text = torch.randint(256, (16, 17))
        samples = TensorDataset(text[:, :-1], text[:, 1:])
        raydist.fit(job, model=model, train=samples, loss=next_token)
        models.save_weights(model, tmp_path / "first")
        with pytest.raises(raydist.ConfigError, match="is divided already, by an earlier"):
            raydist.fit(job, model=model, train=samples, loss=next_token)
        job = replace(job, train=replace(job.train, weights=str(tmp_path / "first")))
        raydist.fit(job, model=models.GPT(**SIZES), train=samples, loss=next_token)
        return "trained"

    job = replace(BASE, parallel=Parallel("fsdp"), train=Train(steps=1))
    results = succeeded(run_ranks(2, job, train_twice, tmp_path))
    assert [each.value for each in results] == ["trained"] * 2


def test_a_wrapped_model_is_saved_by_its_own_names(tmp_path: Path) -> None:
    def save(job: Job) -> None:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3)))
        compiled: Any = torch.compile(model, backend="eager")
        models.save_weights(compiled, tmp_path / "saved")

    succeeded(run_ranks(1, BASE, save, tmp_path))
    assert [*load_file(tmp_path / "saved" / "model.safetensors")] == ["0.bias", "0.weight"]


def test_a_program_saves_weights_on_its_rank_0(tmp_path: Path) -> None:
    """The other ranks, which have nothing to write there, raised IndexError."""
    for rank in (1, 0):
        me = context.Rank(rank=rank, world_size=2, run_dir=tmp_path)
        context.enter(context.Context(rank=me, emit=Seen(), beat=lambda step, phase: None))
        try:
            assert models.save_weights(nn.Linear(2, 3), tmp_path / "saved") == tmp_path / "saved"
        finally:
            context.enter(None)
        assert (tmp_path / "saved").exists() == (rank == 0)
    assert [*load_file(tmp_path / "saved" / "model.safetensors")] == ["bias", "weight"]


def test_what_a_failed_save_has_written_is_removed_and_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It filled the disk, and `train.weights` took one of its files for the weights."""
    folder, killed = tmp_path / "saved", ".writing-0-7.safetensors"

    def save(job: Job) -> tuple[list[str], list[str]]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
        folder.mkdir()
        save_file({"0.weight": torch.zeros(3, 2)}, folder / killed)
        read_by = begin(replace(job, train=Train(steps=1, weights=str(folder))))
        export.FILE_BYTES = 40
        add = export.WeightWriter.add
        monkeypatch.setattr(
            export.WeightWriter,
            "add",
            lambda self, name, value, dtype: (
                setattr(self, "why", "disk full") if self.files else add(self, name, value, dtype)
            ),
        )
        with pytest.raises(raydist.RaydistError, match="disk full"):
            models.save_weights(model, folder)
        return [each.name for each in folder.iterdir()], [read_by]

    (result,) = succeeded(run_ranks(1, BASE, save, tmp_path))
    left, (read_by,) = result.value
    assert left == []
    assert "it has 0 files" in read_by


def test_one_file_in_another_type(tmp_path: Path) -> None:
    def save(job: Job) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(2, 3))
        model[2].weight = model[0].weight
        models.save_weights(model, tmp_path / "saved", dtype=torch.bfloat16)
        return model.state_dict()

    state = succeeded(run_ranks(1, BASE, save, tmp_path))[0].value
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert [each.name for each in (tmp_path / "saved").iterdir()] == ["model.safetensors"]
    assert found.keys() == state.keys() - {"2.weight"}
    assert all(
        torch.equal(value, state[name].bfloat16() if value.is_floating_point() else state[name])
        for name, value in found.items()
    )


def test_a_model_of_transformers_is_loaded_in_the_type_of_its_weights(tmp_path: Path) -> None:
    """The type was that of the weights on the hub, and the trained ones were rounded to it."""
    transformers = pytest.importorskip("transformers")

    def save(job: Job) -> Any:
        shape = transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            dtype=torch.bfloat16,
        )
        model = transformers.LlamaForCausalLM(shape)
        found = []
        for dtype in (None, torch.bfloat16, torch.float64):
            models.save_weights(model, tmp_path / "saved", dtype=dtype)
            read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
            wanted = [each.to(dtype or each.dtype) for each in model.parameters()]
            found.append(all(map(torch.equal, read.parameters(), wanted)))
        return found, shape.dtype, shape.architectures

    (result,) = succeeded(run_ranks(1, BASE, save, tmp_path))
    assert result.value == ([True] * 3, torch.bfloat16, None)


def test_earlier_weights_in_the_folder_are_removed(tmp_path: Path) -> None:
    """Some readers prefer one file to several, others take every file."""
    folder = tmp_path / "saved"

    def save(job: Job) -> list[list[str]]:
        found = []
        for number, limit in enumerate((10**6, 40, 20, 10**6)):
            export.FILE_BYTES, model = limit, constant(number)
            models.save_weights(model, folder)
            tensors = [each for file in folder.glob("*.safetensors") for each in load_file(file)]
            assert sorted(tensors) == sorted(model.state_dict())
            values = [load_file(file) for file in folder.glob("*.safetensors")]
            assert all((each == number).all() for file in values for each in file.values())
            found.append(sorted(each.name for each in folder.iterdir()))
        return found

    (result,) = succeeded(run_ranks(1, BASE, save, tmp_path))
    one, two, four, again = result.value
    assert one == again == ["model.safetensors"]
    assert two == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)] + [INDEX]
    assert four == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)] + [INDEX]


@pytest.mark.parametrize("earlier", [None, 10**6, 40, 20])
@pytest.mark.parametrize("limit", [10**6, 40])
def test_a_killed_save_leaves_no_mixture_of_weights(
    earlier: int | None, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of earlier weights named files of both; one part of new ones passed for all."""
    folder = tmp_path / "saved"

    def save(value: float, limit: int) -> None:
        export.FILE_BYTES = limit
        models.save_weights(constant(value), folder)

    def save_until_killed(job: Job) -> list[set[float]]:
        found, left = [], 0
        replace_by = Path.replace

        def replaced(self: Path, target: Path) -> Path:
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return replace_by(self, target)

        for renamed in range(4):
            shutil.rmtree(folder, ignore_errors=True)
            if earlier is not None:
                save(1, earlier)
            left = renamed
            with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
                patch.setattr(Path, "replace", replaced)
                save(2, limit)
            found.append(loaded(folder))
        return found

    (result,) = succeeded(run_ranks(1, BASE, save_until_killed, tmp_path))
    assert all(len(values) <= 1 for values in result.value)
    assert result.value[-1] == {2}


def test_weights_are_on_the_disk_before_they_replace_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, the new names had files without contents on some file systems."""
    folder = tmp_path / "saved"

    def save_noting(job: Job) -> list[tuple[str, str]]:
        export.FILE_BYTES = 16
        found: list[tuple[str, str]] = []
        replace_by, sync = Path.replace, os.fsync

        def replaced(self: Path, target: Path) -> Path:
            found.append(("replace", str(self)))
            return replace_by(self, target)

        def synced(descriptor: int) -> None:
            found.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replaced)
            patch.setattr(os, "fsync", synced)
            models.save_weights(constant(1), folder)
        return found

    (result,) = succeeded(run_ranks(1, BASE, save_noting, tmp_path))
    found = result.value
    replaced = [at for at, (what, _) in enumerate(found) if what == "replace"]
    assert len(replaced) == 5  # four tensors and the index
    assert all(("sync", found[at][1]) in found[:at] for at in replaced)
    assert ("sync", str(folder)) in found[replaced[-2] :]


def constant(value: float) -> nn.Module:
    """Return a model all of whose parameters have one value."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    for each in model.parameters():
        nn.init.constant_(each, value)
    return model


def loaded(folder: Path) -> set[float]:
    """Return the values of a model of zeros with the weights in a folder; none: it is refused."""
    model = constant(0)
    try:
        files = WeightFiles(str(folder))
    except raydist.ConfigError:
        return set()
    files.fill(model, model.modules())
    return {value for each in model.parameters() for value in each.flatten().tolist()}


def begin(job: Job) -> str:
    """Begin a training with the weights of the settings; return why that is refused."""
    samples = TensorDataset(torch.zeros(8, 2), torch.zeros(8).long())
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    try:
        raydist.fit(job, model=model, train=samples, loss=nn.functional.cross_entropy)
    except raydist.ConfigError as error:
        return error.message
    return ""


def beginning(path: Path, run_dir: Path) -> RankResult:
    job = replace(BASE, train=Train(steps=1, weights=str(path)))
    return succeeded(run_ranks(1, job, begin, run_dir))[0]


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    refusals = {}
    for name, tensors in {
        "names": {"layer.weight": torch.zeros(3, 2)},
        "shape": {"0.weight": torch.zeros(2, 3)},
    }.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        refusals[name] = beginning(tmp_path / f"{name}.safetensors", tmp_path).value
    (tmp_path / "damaged.safetensors").write_bytes(b"cut off")
    for name in (".", "nowhere", "damaged.safetensors"):
        refusals[name] = beginning(tmp_path / name, tmp_path).value
    assert "it has layer.weight, the model has 0.weight, 0.bias, 1.weight" in refusals["names"]
    assert "0.weight has the shape [2, 3], in the model it is [3, 2]" in refusals["shape"]
    assert f"it has 3 files *.safetensors, but no {INDEX}" in refusals["."]
    assert "there is no file or folder" in refusals["nowhere"]
    assert "it cannot be read" in refusals["damaged.safetensors"]
    assert all(refusal.startswith("train.weights=") for refusal in refusals.values())


def test_what_only_one_of_them_has_is_a_warning(tmp_path: Path) -> None:
    tensors = {"0.weight": torch.zeros(3, 2), "0.bias": torch.zeros(3), "head": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    warnings = [each["text"] for each in beginning(tmp_path, tmp_path).kind("warning")]
    assert [text.partition(" ")[2] for text in warnings] == [
        "does not have these, which begin as without it: 1.weight, 1.bias",
        "has these, which the model does not have: head",
    ]


def test_a_rank_that_cannot_write_is_named_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def save(job: Job) -> str:
        with pytest.raises(raydist.RaydistError) as error:
            models.save_weights(nn.Linear(2, 2), tmp_path / "file" / "weights")
        return str(error.value)

    first, second = (each.value for each in succeeded(run_ranks(2, BASE, save, tmp_path)))
    assert first == second
    assert "could not be saved" in first
    assert "rank 0: " in first


def test_the_names_of_files() -> None:
    assert final_names([1, 0]) == [["model.safetensors"], []]
    assert final_names([2, 0, 1]) == [
        ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"],
        [],
        ["model-00003-of-00003.safetensors"],
    ]
