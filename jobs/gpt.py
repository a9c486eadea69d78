"""gpt: a language model that learns Python from the sources of the installed Python, without a
download."""

import math
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raydist
from raydist import data, models

TEXT = {".py", ".txt", ".md", ".rst"}
LEFT_OUT = {"site-packages", "test", "tests"}


def job(
    config: raydist.Job,
    context: int = 128,
    held_out: int = 256,
    prompt: str = "def ",
    sample: int = 200,
    tokenizer: str = "bytes",
) -> dict[str, float]:
    if tokenizer not in ("bytes", "bpe"):
        raise raydist.ConfigError.unknown("job.args.tokenizer", tokenizer, ("bytes", "bpe"))
    if sample and not prompt:
        cause = "it is empty, and the model has nothing to continue"
        raise raydist.ConfigError.of("job.args.prompt", prompt, cause, "job.args.prompt=def")
    text = read(config.data.root)
    cut = len(text) - min(len(text) // 10, held_out * context + 1)
    parts, pairs = [text[:cut], text[cut:]], None
    if tokenizer == "bpe":
        pairs = data.byte_pairs(parts[0].numpy().tobytes(), config.model["vocab"])
        parts = [data.encode_together(pairs, part.numpy().tobytes()) for part in parts]
    if held_out and len(parts[1]) <= context:
        cause = (
            f"a sample and what follows it are {context + 1} tokens, and the text that is held out "
            f"of the training has {len(parts[1])}"
        )
        fits = f"job.args.context={len(parts[1]) - 1}"
        raise raydist.ConfigError.of("job.args.context", context, cause, fits)
    train, test = (windows(part, context) for part in parts)
    me = raydist.rank()
    # on meta nothing is made yet: raydist.fit makes one block at a time, as all of a large model
    # may not fit, and one seed gives the same model under each parallel=
    with torch.device("meta"):
        model = models.build_model(config.model)
    per_token = model.flops_per_token(context) if isinstance(model, models.GPT) else None

    def loss(scores: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), following.flatten().long())

    tested = test if held_out else None
    figures, report = raydist.fit(config, model=model, train=train, test=tested, loss=loss), {}
    if held_out:
        test_loss = figures["test_loss"]
        # above 709 math.exp raises OverflowError
        report["perplexity"] = math.inf if test_loss > 709 else math.exp(test_loss)
        report["bits_per_byte"] = test_loss / math.log(2) / bytes_per_token(test.tensors[1], pairs)
    # the mean, so that all ranks have the same: each has timed the steps by its own clock
    if rate := context * raydist.sum_over_ranks(models.samples_per_s()) / me.world_size:
        report["tokens_per_s"] = rate
    if rate and per_token and me.device.type == "cuda":
        gpu = torch.cuda.get_device_name(me.device)
        if (share := models.utilization(rate, per_token, gpu, me.world_size)) is not None:
            report["mfu"] = share
    raydist.report(None, **report)
    begin = list(prompt.encode()) if pairs is None else pairs.encode([prompt.encode()]).tolist()
    known = 256 if pairs is None else len(pairs)
    # on all ranks: each may have a part of the model
    drawn = write(model, begin, sample, context, known, me.device)
    if me.rank == 0:
        written = (bytes(drawn) if pairs is None else pairs.decode(drawn)).decode(errors="replace")
        print(f"--- {sample} tokens after {prompt!r}\n{written}\n---")
    return figures | report


def read(root: str) -> Tensor:
    """The bytes of all text files below a folder, in an order that their names give. Empty:
    Python's own sources."""
    folder = Path(root or sysconfig.get_path("stdlib"))
    files = [
        file
        for file in folder.rglob("*")
        if file.suffix in TEXT and not LEFT_OUT & {*file.relative_to(folder).parts}
    ]
    files.sort(
        key=lambda file: (zlib.crc32(str(file.relative_to(folder)).encode()), file)
    )  # mixed, and the same anywhere
    text = b"\0".join(file.read_bytes() for file in files if file.is_file())
    if len(text) < 10_000:
        cause = (
            f"its {len(files)} text files ({', '.join(sorted(TEXT))}) have {len(text)} "
            "bytes, too few to learn from"
        )
        raise raydist.ConfigError.of("data.root", root, cause, "data.root=FOLDER")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, context: int) -> TensorDataset:
    """Samples of `context` tokens, each with the tokens that follow: both of shape [samples,
    context]."""
    samples = (len(text) - 1) // context
    return TensorDataset(
        *(text[shift : shift + samples * context].view(samples, context) for shift in (0, 1))
    )


def bytes_per_token(tokens: Tensor, pairs: data.BytePairs | None) -> float:
    """The average number of bytes of these tokens: losses by tokens of different sizes can't
    be compared."""
    return (
        1.0
        if pairs is None
        else sum(len(pairs.pieces[token]) for token in tokens.flatten()) / tokens.numel()
    )


@torch.no_grad()
def write(
    model: nn.Module, begin: list[int], count: int, context: int, known: int, device: torch.device
) -> list[int]:
    """Continue `begin` by `count` tokens, each sampled from the model's distribution over the first
    `known` tokens."""
    drawn = torch.Generator().manual_seed(0)
    text = torch.tensor([begin], device=device)
    for _ in range(count):
        likely = model(text[:, -context:])[0, -1, :known].float().softmax(dim=0)
        text = torch.cat(
            [text, torch.multinomial(likely.cpu(), 1, generator=drawn)[None].to(device)], dim=1
        )
    return text[0].tolist()


if __name__ == "__main__":
    raydist.main(job)
