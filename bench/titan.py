"""The debug model of torchtitan (Llama 3, 6 M parameters), trained by torchtitan's trainer and by
raydist.fit from the same weights with the same samples, on two gloo ranks with FSDP.

Steps per second, and the largest difference between the losses and the norms of the gradients.
torchtitan is for GPUs: it gets a stand-in for torch.cuda, plain attention in place of
FlexAttention, which has no backward pass on CPUs, and FSDP's sum without a factor, which gloo does
not have. Both train in fp32. It needs `pip install torchtitan`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import raydist
from bench.measure import RANKS, heads, row
from tests.losses import next_token

SAMPLES, TOKENS, STEPS = 4, 128, 40
"""Samples of a rank in a step, tokens of a sample, steps."""
FIRST = 10
"""Steps that are not timed."""
WORDS = (
    f"scale=1x{RANKS}",
    "group=inline",
    "backend=gloo",
    "parallel=fsdp",
    "parallel.blocks=Llama3TransformerBlock",
    "optim=adamw",
    "optim.lr=8e-4",
    "optim.args.betas=[0.9,0.95]",
    "optim.args.weight_decay=0.1",
    f"data.batch_size={SAMPLES}",
    "data.shuffle=false",
    "train.epochs=1",
    "train.clip=1.0",
    "checkpoint.every=100000",
    "watch.progress=none",
)
Row = tuple[float, float, float]
"""Of a step: when it was done, its loss, the norm of its gradient."""


def use_cpu() -> None:
    """Make torchtitan, which is not imported yet, use the CPU."""
    cpu: Any = ModuleType("cpu")
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = type("Facts", (), {"total_memory": size})
    cpu.synchronize = torch.cpu.synchronize
    cpu.set_device = cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
    cpu.current_device, cpu.device_count = lambda: 0, lambda: 1
    cpu.get_device_name, cpu.get_device_properties = lambda _: "CPU", lambda _: facts
    cpu.memory_stats = lambda _: {}
    private: Any = torch._utils
    private._get_available_device_type = lambda: "cpu"
    private._get_device_module = lambda _: cpu


def model_spec() -> tuple[Any, int]:
    """Return the model as torchtitan describes it, and the size of its vocabulary."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec, decoder_vocab_size(spec)


def samples(vocabulary: int) -> torch.Tensor:
    """Return the tokens of all samples: sequences that can be learned."""
    generator = torch.Generator().manual_seed(1)
    begin = torch.randint(vocabulary, (SAMPLES * RANKS * STEPS, 1), generator=generator)
    return (begin + 7 * torch.arange(TOKENS + 1)) % vocabulary


def by_torchtitan(folder: Path) -> None:
    """On a rank of torchrun: torchtitan's trainer. Rank 0 writes the first weights."""
    use_cpu()
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    spec, vocabulary = model_spec()

    class Samples(BaseDataLoader):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
            self.first, self.all = dp_rank * SAMPLES, dp_world_size * SAMPLES

        def __iter__(self) -> Iterator[Any]:
            tokens = samples(vocabulary)
            for first in range(self.first, len(tokens), self.all):
                own = tokens[first : first + SAMPLES]
                yield {"input": own[:, :-1]}, own[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        decode = encode

        def get_vocab_size(self) -> int:
            return vocabulary

    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=vocabulary),
        dump_folder=str(folder),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=SAMPLES,
            seq_len=TOKENS,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        tokenizer=NoTokenizer.Config(),
        dataloader=Samples.Config(),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
    )
    trainer = config.build()
    (model,) = trainer.model_parts
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)
    begin = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    rows: list[Row] = []
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        rows.append((time.time(), loss, norm))
        log(step, loss, most, norm, **more)

    trainer.metrics_processor.log = note
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        torch.save(begin, folder / "begin.pt")
    trainer.train()
    if is_first:
        (folder / "torchtitan.json").write_text(json.dumps(rows))
    trainer.close()
    torch.distributed.destroy_process_group()


def by_raydist(config: Any, folder: str) -> None:
    """On a rank of raydist: the same model in raydist.fit."""
    use_cpu()
    from torch.utils.data import TensorDataset

    spec, vocabulary = model_spec()
    model = spec.model.build()
    begin = torch.load(Path(folder) / "begin.pt", weights_only=True)
    with torch.no_grad():
        model.init_weights(buffer_device=None)  # what is no parameter, too
        for name, each in model.named_parameters():
            each.copy_(begin[name])
    rows: list[Row] = []

    def on_step(step: int, values: Any) -> None:
        rows.append((time.time(), float(values["loss"]), float(values["grad_norm"])))

    tokens = samples(vocabulary)
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    raydist.fit(config, model=model, train=data, loss=next_token, on_step=on_step)
    if raydist.rank().rank == 0:
        (Path(folder) / "raydist.json").write_text(json.dumps(rows))


def steps_per_s(rows: list[Row]) -> float:
    """Of the steps after the first ones."""
    return (len(rows) - FIRST) / (rows[-1][0] - rows[FIRST - 1][0])


def turn(folder: Path) -> tuple[list[Row], list[Row]]:
    """Train with both; return the steps of torchtitan and of raydist."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", __file__, str(folder)]
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    raydist.run(by_raydist, *WORDS, f"hydra.run.dir={folder}/run", folder=str(folder))
    titan, ours = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("torchtitan", "raydist")
    )
    assert len(titan) == len(ours) == STEPS
    return titan, ours


def main(rounds: int = 3) -> list[str]:
    """The table's rows."""
    figures: dict[str, list[float]] = {"raydist": [], "torchtitan": []}
    apart = [0.0, 0.0]
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as made:
            titan, ours = turn(Path(made))
        figures["raydist"].append(steps_per_s(ours))
        figures["torchtitan"].append(steps_per_s(titan))
        for kind in (0, 1):
            both = zip(titan, ours, strict=True)
            apart[kind] = max(
                apart[kind], *(abs(theirs[1 + kind] - own[1 + kind]) for theirs, own in both)
            )
        print(f"titan: {number}: {figures}, apart {apart}", flush=True)
    return [
        f"| {heads(figures, 'raydist')} | losses differ by | norms differ by |",
        "|---" * 5 + "|",
        f"| {row(figures, 'raydist', 'steps/s')} | {apart[0]:.1e} | {apart[1]:.1e} |",
    ]


if __name__ == "__main__":  # a rank of torchrun
    by_torchtitan(Path(sys.argv[1]))
