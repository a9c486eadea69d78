"""gpt: a language model that learns Python from the sources of the installed Python, byte by byte: no download."""

import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist import models
from raydist.settings.mesh import mesh_shape

TEXT = {".py", ".txt", ".md", ".rst"}
LEFT_OUT = {"site-packages", "test", "tests"}


def job(
    config: raydist.Job, context: int = 128, held_out: int = 256, prompt: str = "def ", sample: int = 200
) -> dict[str, float]:
    text = read(config.data.root)
    cut = len(text) - min(len(text) // 10, held_out * context + 1)
    train, test = windows(text[:cut], context), windows(text[cut:], context)
    clock = Clock()
    # on meta nothing is made yet: raydist.fit makes one block at a time, since all of a large model may not fit
    whole = config.parallel.tp or config.parallel.pp
    with torch.device("meta" if config.parallel.name in ("fsdp", "hsdp") and not whole else "cpu"):
        model = models.build_model(config.model)

    def loss(scores: Tensor, following: Tensor) -> Tensor:
        clock.count(scores, following)
        return F.cross_entropy(scores.flatten(0, 1), following.flatten().long())

    figures = raydist.fit(config, model=model, train=train, test=test, loss=loss)
    me = raydist.rank()
    data_ranks = mesh_shape(config.parallel, me.world_size, me.local_world_size).data
    told = {"perplexity": math.exp(figures["test_loss"])}
    if clock.tokens:  # of the stages of a pipeline the last one has the loss
        told["tokens_per_s"] = clock.tokens_per_s * data_ranks
    raydist.report(None, **told)
    written = write(model, prompt, sample, context, me.device)  # on all ranks: each may have a part of the model only
    if me.rank == 0:
        print(f"--- {sample} bytes after {prompt!r}\n{written}\n---")
    return figures | told


def read(root: str) -> Tensor:
    """The bytes of all text files below a folder, in an order that their names give. Empty: Python's own sources."""
    folder = Path(root or sysconfig.get_path("stdlib"))
    files = [
        file for file in folder.rglob("*") if file.suffix in TEXT and not LEFT_OUT & {*file.relative_to(folder).parts}
    ]
    files.sort(
        key=lambda file: (zlib.crc32(str(file.relative_to(folder)).encode()), file)
    )  # mixed, and the same anywhere
    text = b"\0".join(file.read_bytes() for file in files if file.is_file())
    if len(text) < 10_000:
        cause = f"its {len(files)} text files ({', '.join(sorted(TEXT))}) have {len(text)} bytes, too few to learn from"
        raise raydist.ConfigError.of("data.root", root, cause, "data.root=FOLDER")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, context: int) -> TensorDataset:
    """Samples of `context` bytes, each with the bytes that follow: both uint8 of shape [samples, context]."""
    samples = (len(text) - 1) // context
    return TensorDataset(*(text[shift : shift + samples * context].view(samples, context) for shift in (0, 1)))


class Clock:
    """Counts the tokens of this rank's training, from its second batch on."""

    def __init__(self) -> None:
        self.tokens, self.begin, self.end = 0, 0.0, 0.0

    def count(self, scores: Tensor, following: Tensor) -> None:
        if scores.requires_grad:  # not in an evaluation
            self.end = time.perf_counter()
            self.tokens += following.numel() if self.begin else 0
            self.begin = self.begin or self.end

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.end - self.begin) if self.tokens else 0.0


@torch.no_grad()
def write(model: nn.Module, prompt: str, count: int, context: int, device: torch.device) -> str:
    """The prompt and so many more bytes, each drawn with the probability that the model gives it."""
    drawn = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(count):
        likely = model(text[:, -context:])[0, -1].float().softmax(dim=0)
        text = torch.cat([text, torch.multinomial(likely.cpu(), 1, generator=drawn)[None].to(device)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    raydist.main(job)
